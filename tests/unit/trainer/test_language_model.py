"""Reading published models: the same function as transformers', or a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer.language_model import ModelFolderError, load_language_model

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# With 12 numbers a head, frequencies that are kept, divided, and in between.
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PUBLISHED: dict[str, PreTrainedModel] = {
    "llama, tied, stretched": LlamaForCausalLM(
        LlamaConfig(
            **SIZES, tie_word_embeddings=True, rope_scaling={**STRETCHED, "rope_theta": 10_000.0}
        )
    ),
    "llama, untied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen2, tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3, untied": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
}


@pytest.fixture(params=PUBLISHED)
def published(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = PUBLISHED[request.param]
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize("shard", ["1GB", "30KB"])
def test_it_computes_what_transformers_computes(
    shard: str, published: PreTrainedModel, tmp_path: Path
) -> None:
    published.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "30KB")
    ours = load_language_model(tmp_path)
    tokens = torch.randint(97, (2, 200), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        theirs = published(tokens).logits
        torch.testing.assert_close(ours(tokens), theirs, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    PUBLISHED["llama, untied"].save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "its architecture is MistralForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ({"mlp_bias": True}, "its MLPs have biases"),
        ({"attention_bias": True}, "its projections have biases"),
        ({"layer_types": ["sliding_attention"]}, "do not see the whole context"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"scaled \(yarn\)"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 0}}, "lacks a number above 0"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"num_hidden_layers": 10**9}, "are not a valid decoder"),
        ({"num_hidden_layers": "many"}, "'many' as layers"),
        ({"num_key_value_heads": 3}, "are not a valid decoder"),
        ({"num_hidden_layers": 4}, "do not fit its config"),
        ({"intermediate_size": 65}, "do not fit its config"),
        ({"tie_word_embeddings": False, "hidden_size": 64}, "do not fit its config"),
    ],
)
def test_what_is_not_one_of_them_is_refused(
    change: dict[str, Any], reason: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelFolderError, match=reason):
        load_language_model(folder)


def test_damaged_folders_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = load_file(weights)
    save_file({**whole, "model.norm.weight": torch.full((48,), torch.nan)}, weights)
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight contains NaN"):
        load_language_model(folder)
    key = "model.layers.0.self_attn.k_proj.weight"
    save_file({name: part for name, part in whole.items() if name != key}, weights)
    with pytest.raises(ModelFolderError, match="do not fit together"):
        load_language_model(folder)
    weights.write_bytes(b"no tensors")
    with pytest.raises(ModelFolderError, match="cannot be read"):
        load_language_model(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelFolderError, match="not a file of its folder"):
        load_language_model(folder)
    index.write_text("[]")
    with pytest.raises(ModelFolderError, match="not an index"):
        load_language_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="not an object"):
        load_language_model(folder)

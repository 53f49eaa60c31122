"""Configurations of published targets and drafters, for tests that need no weights."""

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
_LLAMA = _QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
_MIXTRAL = _QWEN3 | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_MIMO = _QWEN3 | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
# Runs its 32 layers twice.
_LOOPED = _LLAMA | {
    "architectures": ["NanbeigeForCausalLM"],
    "model_type": "nanbeige",
    "num_loops": 2,
    "vocab_size": 151936,
}
_EAGLE3 = _QWEN3 | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
_EAGLE = _LLAMA | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
_DFLASH = _QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
_DOMINO = {
    "projector_type": "domino",
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "shift_label": True,
}


def _drop_keys(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _layers(*layers: int, **extra: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), **extra}}


def _reads(*layers: int, **extra: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 151669, "target_layer_ids": list(layers), **extra}}


CONFIGS: dict[str, Any] = {
    "qwen3": _QWEN3,
    "llama": _LLAMA,
    "mixtral": _MIXTRAL,
    "mimo": _MIMO,
    "looped": _LOOPED,
    "mimo-without-predictor": _MIMO | {"num_nextn_predict_layers": 0},
    "eagle3": _EAGLE3,
    "eagle3-layers": _EAGLE3 | _layers(1, 17, 32),
    "eagle3-no-layers-named": _EAGLE3 | {"draft_vocab_size": None} | _layers(),
    "eagle3-last-state": _EAGLE3 | _layers(use_aux_hidden_state=False),
    "eagle3-padded": _EAGLE3 | {"vocab_size": 151936 + 128},
    "eagle3-narrower": _EAGLE3 | {"hidden_size": 2048, "target_hidden_size": 4096},
    "eagle3-other-width": _EAGLE3 | {"hidden_size": 6144, "target_hidden_size": 8192},
    "eagle3-other-vocabulary": _EAGLE3 | {"vocab_size": 128256},
    "eagle3-many-drafts": _EAGLE3 | {"draft_vocab_size": 200000},
    "eagle3-no-draft-vocabulary": _drop_keys(_EAGLE3, "draft_vocab_size"),
    "eagle3-absent-layers": _EAGLE3 | _layers(1, 17, 40),
    "eagle3-two-layers": _EAGLE3 | _layers(1, 17) | {"num_aux_hidden_states": 3},
    "eagle3-deep": _EAGLE3 | {"num_hidden_layers": 36},
    "eagle3-short": _EAGLE3 | {"max_position_embeddings": 2048},
    "eagle3-llama": _EAGLE3 | {"vocab_size": 128256},
    "eagle": _EAGLE,
    "eagle-wide": _EAGLE | {"hidden_size": 8192, "num_attention_heads": 64},
    "eagle-as-published": _EAGLE | {"architectures": ["LlamaForCausalLM"]},
    "eagle3-as-published": _EAGLE
    | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000},
    "peagle-inside": _EAGLE3 | {"eagle_config": {"parallel_drafting": True, "ptd_token_id": 7}},
    "eagle-qwen2": _QWEN3
    | {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2", "num_hidden_layers": 1},
    "dflash": _DFLASH,
    "dflash-nested": _drop_keys(_DFLASH, "block_size") | _reads(1, 9, 17, 25, 33, block_size=8),
    "dflash-second-loop": _DFLASH | _reads(1, 20, 40),
    "dflash-unnamed-layers": _DFLASH | {"dflash_config": {"mask_token_id": 151669}},
    "dflash-third-loop": _DFLASH | _reads(1, 20, 64),
    "dflash-window": _DFLASH
    | {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048},
    "dflash-domino": _DFLASH | _reads(1, 9, 17, 25, 33, **_DOMINO),
    "dflash2": _DFLASH
    | {"architectures": ["DFlash2DraftModel"]}
    | _reads(1, 9, 17, 25, 33, selector_rank=256, selector_top_k=16),
    "dflash2-small-vocabulary": _DFLASH
    | {"architectures": ["DFlash2DraftModel"], "vocab_size": 151000}
    | _reads(1, 9, 17, 25, 33, selector_rank=256, selector_top_k=16)
    | {"mask_token_id": 150000},
    "dflash-muse": _DFLASH | {"architectures": ["MuseGlimmerAssistantModel"]},
    "dflash-lilicorr": _DFLASH | _reads(1, 9, 17, 25, 33, lilicorr_candidate_topk=8),
    "dflash-absent-layers": _DFLASH | _reads(1, 9, 17, 25, 40),
    "dflash-absent-mask": _DFLASH
    | {"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1, 9, 17, 25, 33]}},
    "dflash-other-width": _DFLASH | {"hidden_size": 2048},
    "dflash-other-vocabulary": _DFLASH | {"vocab_size": 128256} | _reads(1, 9, 17, 25, 33),
    "dflash-unknown": _DFLASH | {"architectures": ["DFlash9DraftModel"]},
    "dspark": _DFLASH
    | {"architectures": ["DSparkDraftModel"]}
    | _reads(1, 9, 17, 25, 33, projector_type="dspark", markov_rank=256),
    "peagle": _EAGLE3 | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4},
    "medusa": {"base_model_name_or_path": "org/base-8b", "medusa_num_heads": 4},
    "pard": _QWEN3
    | {"hidden_size": 1024, "num_hidden_layers": 28, "pard_token": 151665, "spd_type": "pard"},
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": _EAGLE3,
    },
    "unknown-class": _EAGLE3 | {"architectures": ["LlamaForCausalLMEagle4"]},
    "text-for-a-number": _EAGLE3 | {"hidden_size": "wide"},
    "no-model-type": {},
    "a-list": [_EAGLE3],
    "a-number": 7,
}


def write_configurations(folder: Path) -> None:
    """Writes each into a folder of its name, and three that hold nothing to read."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "no-json").mkdir()
    (folder / "no-json" / "config.json").write_text('{"architectures": [')
    (folder / "not-text").mkdir()
    (folder / "not-text" / "config.json").write_bytes(b"\xff\xfe\x00{")
    (folder / "empty").mkdir()

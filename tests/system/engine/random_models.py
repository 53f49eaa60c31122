"""Tiny models with random weights, for algorithms that the shipped models do not cover.

Nothing is learned.  The layers only ripple what the embedding says, in target and draft alike, so
that the draft is right occasionally, and every accepted length occurs.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 48
HIDDEN = 64
_HEAD = 16
_HEADS = HIDDEN // _HEAD
_INTERMEDIATE = 96
_LAYERS = 3
_RIPPLE = 0.3

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS // 2,
    "head_dim": _HEAD,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class _Weights(dict[str, torch.Tensor]):
    """Random tensors by name, the same every time."""

    def __init__(self) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(11)

    def matrix(self, name: str, rows: int, columns: int, strength: float = 1.0) -> None:
        scale = strength / columns**0.5
        self[name] = scale * torch.randn(rows, columns, generator=self._random)

    def embedding(self) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self[name] = torch.randn(VOCABULARY, HIDDEN, generator=self._random)

    def ones(self, *names: str) -> None:
        for name in names:
            self[name] = torch.ones(HIDDEN)

    def block(self, prefix: str, *, bias: bool) -> None:
        for part, heads in (("q", _HEADS), ("k", _HEADS // 2), ("v", _HEADS // 2)):
            self.matrix(f"{prefix}.self_attn.{part}_proj.weight", heads * _HEAD, HIDDEN)
            if bias:
                self[f"{prefix}.self_attn.{part}_proj.bias"] = torch.zeros(heads * _HEAD)
        self.matrix(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HIDDEN, _RIPPLE)
        self.matrix(f"{prefix}.mlp.gate_proj.weight", _INTERMEDIATE, HIDDEN)
        self.matrix(f"{prefix}.mlp.up_proj.weight", _INTERMEDIATE, HIDDEN)
        self.matrix(f"{prefix}.mlp.down_proj.weight", HIDDEN, _INTERMEDIATE, _RIPPLE)
        self.ones(f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight")


def _save(folder: Path, weights: _Weights, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_SHAPE | config))
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mtp_target(folder: Path) -> Path:
    """A MiMo model: a Qwen2-like target whose checkpoint carries a multi-token predictor."""
    weights = _Weights()
    weights.embedding()
    weights.ones("model.norm.weight")
    for layer in range(_LAYERS):
        weights.block(f"model.layers.{layer}", bias=True)
    predictor = "model.mtp_layers.0"
    weights.block(predictor, bias=True)
    # From (hidden state, embedding of the next token): the token, and a little of the state.
    weights.matrix(f"{predictor}.input_proj.weight", HIDDEN, 2 * HIDDEN, _RIPPLE)
    weights[f"{predictor}.input_proj.weight"][:, HIDDEN:] += torch.eye(HIDDEN)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights.ones(f"{predictor}.{norm}.weight")
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": _LAYERS,
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
    }
    return _save(folder, weights, config)


def eagle_draft(folder: Path) -> Path:
    """A first-generation EAGLE draft for the same target."""
    weights = _Weights()
    # From (embedding of the next token, hidden state).
    weights.matrix("fc.weight", HIDDEN, 2 * HIDDEN, _RIPPLE)
    weights["fc.weight"][:, :HIDDEN] += torch.eye(HIDDEN)
    weights["fc.bias"] = torch.zeros(HIDDEN)
    weights.block("layers.0", bias=False)
    del weights["layers.0.input_layernorm.weight"]  # the first layer has none
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "attention_bias": False,
    }
    return _save(folder, weights, config)

"""Qwen3.6-35B-A3B with its two drafters: shapes, acceptance, and the draft lengths found best.

From "Adaptive speculative decoding" (F. Finn, Doubleword), appendices, and the model's published
configuration.
"""

from collections.abc import Mapping

from controller.core import model_shapes

_HIDDEN, _VOCABULARY = 2048, 248_320
_HEAD_PARAMS = _HIDDEN * _VOCABULARY
_EXPERT_PARAMS = 3 * _HIDDEN * 512
# Queries and output of 16 heads, keys and values of 2.
_GQA_PARAMS = _HIDDEN * 256 * (2 * 16 + 2 * 2)
# GatedDeltaNet in: 16 query and 16 key heads, 32 value heads and their gates, two scalars a head.
_GDN_PARAMS = _HIDDEN * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * _HIDDEN
# In bf16: a matrix a value head, and a convolution over 4 positions of all channels going in.
_GDN_STATE_BYTES = 2 * (32 * 128 * 128 + 4 * (2 * 16 * 128 + 32 * 128))

TARGET = model_shapes.ModelShape(
    hidden_size=_HIDDEN,
    vocabulary_size=_VOCABULARY,
    attention=(
        (model_shapes.GroupedQueryAttention(query_heads=16, kv_heads=2, head_dim=256), 10),
        # About 8 FLOPs a token on every element of the state.
        (model_shapes.LinearAttention(_GDN_STATE_BYTES, token_flops=8.0 * 32 * 128 * 128), 30),
    ),
    dense_params=10 * _GQA_PARAMS + 30 * _GDN_PARAMS + 40 * _HIDDEN * 256,
    experts=model_shapes.Experts(
        layers=40, experts=256, experts_per_token=8, shared=1, params_per_expert=_EXPERT_PARAMS
    ),
)
DRAFTERS: Mapping[str, model_shapes.DrafterShape] = {
    # One MoE layer behind a fusion 2 d -> d; the target's head is read in every pass.
    "mtp": model_shapes.DrafterShape(
        model_shapes.DrafterKind.MTP,
        dense_params=_HEAD_PARAMS + _GQA_PARAMS + 2 * _HIDDEN * _HIDDEN,
        experts=model_shapes.Experts(
            layers=1, experts=256, experts_per_token=8, shared=1, params_per_expert=_EXPERT_PARAMS
        ),
    ),
    # Eight dense layers and a fusion of five hidden states, about 474 M; the target's head.
    "dflash": model_shapes.DrafterShape(
        model_shapes.DrafterKind.DFLASH, dense_params=_HEAD_PARAMS + 474_000_000, block_size=16
    ),
}
# P(the first k drafts are all accepted), k = 1, 2, ...: SPEED-Bench (qualitative), temperature 0.6.
SURVIVAL: Mapping[str, tuple[float, ...]] = {
    "mtp": (0.779, 0.583, 0.444, 0.349, 0.279, 0.226, 0.185, 0.155),
    "dflash": (
        0.772, 0.565, 0.420, 0.323, 0.256, 0.208, 0.170, 0.141,
        0.120, 0.103, 0.089, 0.078, 0.068, 0.059, 0.051,
    ),
}  # fmt: skip
GAMMA_MAX: Mapping[str, int] = {"mtp": 8, "dflash": 16}

# The simulated sweep: prompts of 1 token, outputs of 1,024, so 512 context tokens on average.
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MEAN_CONTEXT = 512.0
# Best fixed draft length at each of the concurrencies, in hindsight.
BEST_GAMMA: Mapping[str, tuple[int, ...]] = {
    "mtp": (1, 1, 1, 2, 8, 8, 8, 8, 8, 7, 4, 3),
    "dflash": (3, 2, 2, 15, 15, 15, 15, 15, 14, 8, 5, 4),
}
BEST_DRAFTER = (
    "dflash", "mtp", "mtp", "dflash", "dflash", "dflash",
    "dflash", "dflash", "dflash", "mtp", "mtp", "mtp",
)  # fmt: skip


def expected_accepted(drafter: str, gamma: int) -> float:
    """E[accepted | gamma] = s_1 + ... + s_gamma; positions past the curve add nothing."""
    return sum(SURVIVAL[drafter][:gamma])

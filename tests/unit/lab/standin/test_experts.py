"""Experts and how they are chosen, against plain float64 arithmetic written out token by token."""

import pytest
import torch
from sgl_kernel import (
    biased_grouped_topk_cpu,
    fused_experts_cpu,
    fused_linear_sigmoid_mul,
    shared_expert_cpu,
    topk_sigmoid_cpu,
    topk_softmax_cpu,
)
from torch import Tensor

TOKENS, SIZE, HIDDEN, EXPERTS, TOPK = 13, 32, 24, 8, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def expert(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = (w1.double() @ x.double()).chunk(2)
    return w2.double() @ (gate * gate.sigmoid() * up)


def run_experts(x: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w2: Tensor, **other: object):
    rest = [None] * 5 + [None, None, None, None, True]
    named = {"activation": "silu"} | other
    return fused_experts_cpu(x, w1, w2, weights, ids, False, 0, *rest, **named)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("choose", "scored"),
    [
        (topk_softmax_cpu, lambda row: row.double().softmax(0)),
        (topk_sigmoid_cpu, lambda row: row.double().sigmoid()),
    ],
)
def test_the_best_experts_are_chosen_by_corrected_scores(choose, scored, renormalize: bool) -> None:
    scores, bias = draw(TOKENS, EXPERTS), 2 * draw(EXPERTS)
    weights, ids = choose(draw(TOKENS, SIZE), scores, TOPK, renormalize, correction_bias=bias)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    for token in range(TOKENS):
        row = scored(scores[token])
        best = sorted(range(EXPERTS), key=lambda e: -(row[e] + bias[e]))[:TOPK]
        assert ids[token].tolist() == best
        expected = row[best] / (row[best].sum() if renormalize else 1)
        torch.testing.assert_close(weights[token].double(), expected, rtol=1e-5, atol=1e-6)


def test_experts_are_chosen_within_the_best_groups() -> None:
    scores, bias = draw(TOKENS, EXPERTS), draw(EXPERTS)
    weights, ids = biased_grouped_topk_cpu(
        draw(TOKENS, SIZE), scores, bias, TOPK, True, 4, 2, 0, 2.5
    )
    for token in range(TOKENS):
        row = scores[token].double().sigmoid()
        corrected = (row + bias).tolist()
        groups = [corrected[2 * g : 2 * g + 2] for g in range(4)]
        kept = sorted(range(4), key=lambda g: -sum(groups[g]))[:2]
        inside = [e for e in range(EXPERTS) if e // 2 in kept]
        best = sorted(inside, key=lambda e: -corrected[e])[:TOPK]
        assert ids[token].tolist() == best
        expected = 2.5 * row[best] / row[best].sum()
        torch.testing.assert_close(weights[token].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_token_is_the_weighted_sum_of_its_experts() -> None:
    x, w1, w2 = draw(TOKENS, SIZE), draw(EXPERTS, 2 * HIDDEN, SIZE), draw(EXPERTS, SIZE, HIDDEN)
    weights, ids = topk_softmax_cpu(x, draw(TOKENS, EXPERTS), TOPK, True)
    outputs = run_experts(x, weights, ids, w1, w2)
    for token in range(TOKENS):
        expected = sum(
            weight.double() * expert(x[token], w1[e], w2[e])
            for weight, e in zip(weights[token], ids[token].tolist(), strict=True)
        )
        torch.testing.assert_close(outputs[token].double(), expected, rtol=1e-4, atol=1e-3)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    x, w1, w2 = draw(TOKENS, SIZE), draw(EXPERTS, 2 * HIDDEN, SIZE), draw(EXPERTS, SIZE, HIDDEN)
    weights, ids = topk_softmax_cpu(x, draw(TOKENS, EXPERTS), TOPK, True)
    together = run_experts(x, weights, ids, w1, w2)
    for token in range(TOKENS):
        one = slice(token, token + 1)
        assert torch.equal(run_experts(x[one], weights[one], ids[one], w1, w2), together[one])


def test_an_expert_of_all_tokens_is_added() -> None:
    x, w1, w2 = draw(TOKENS, SIZE), draw(2 * HIDDEN, SIZE), draw(SIZE, HIDDEN)
    routed = draw(TOKENS, SIZE, seed=1)
    none = [False, False, False, None, None, None, True]
    outputs = shared_expert_cpu(x, w1, w2, routed, 2.5, *none)
    expected = torch.stack([expert(row, w1, w2) for row in x]) + 2.5 * routed.double()
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-4, atol=1e-3)
    gate = draw(1, SIZE)
    gated = fused_linear_sigmoid_mul(x, gate, None, True, routed)
    expected = (x.double() @ gate.double().T).sigmoid() * routed.double()
    torch.testing.assert_close(gated.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_implemented_is_refused() -> None:
    x, w1, w2 = draw(2, SIZE), draw(EXPERTS, 2 * HIDDEN, SIZE), draw(EXPERTS, SIZE, HIDDEN)
    weights, ids = topk_softmax_cpu(x, draw(2, EXPERTS), TOPK, True)
    with pytest.raises(NotImplementedError, match="SiLU only"):
        run_experts(x, weights, ids, w1, w2, activation="gelu")
    with pytest.raises(NotImplementedError, match="shared experts"):
        biased_grouped_topk_cpu(x, draw(2, EXPERTS), draw(EXPERTS), TOPK, True, 1, 1, 1, None)
    with pytest.raises(NotImplementedError, match="unquantized"):
        shared_expert_cpu(x, w1[0], w2[0], x, 1.0, True, True, False, None, None, None, True)

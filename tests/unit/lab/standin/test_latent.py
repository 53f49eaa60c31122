"""Latent attention's projections, and its prompts, against plain arithmetic."""

import pytest
import torch
from sgl_kernel import (
    bmm_cpu,
    extend_attention_cpu,
    qkv_proj_with_rope_fused_weight,
    rotary_embedding_cpu,
)
from torch import Tensor

TOKENS, SIZE, HEADS, Q_RANK, KV_RANK, PLAIN, ROTARY = 7, 32, 4, 24, 16, 8, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-4)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def test_queries_meet_latent_rows_as_they_would_meet_keys() -> None:
    hidden, qkv_a = draw(TOKENS, SIZE), draw(Q_RANK + KV_RANK + ROTARY, SIZE)
    q_b, up = draw(HEADS * (PLAIN + ROTARY), Q_RANK), draw(HEADS, PLAIN, KV_RANK)
    norms, positions = (draw(Q_RANK), draw(KV_RANK)), torch.arange(TOKENS) + 3
    angles = torch.outer(torch.arange(32.0), 10000 ** (-torch.arange(0, ROTARY, 2) / ROTARY))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    query, rows, values = qkv_proj_with_rope_fused_weight(
        hidden, qkv_a, q_b, up.transpose(1, 2), *norms, positions, cache, 1e-6, False, False,
        None, None, None, True, None, Q_RANK, KV_RANK, ROTARY,
    )  # fmt: skip
    low, latent, turned = (hidden @ qkv_a.T).split((Q_RANK, KV_RANK, ROTARY), -1)
    latent = normed(latent, norms[1])
    near(rows[:, 0, :KV_RANK], latent)
    assert torch.equal(values, rows[..., :KV_RANK])
    heads = (normed(low, norms[0]) @ q_b.T).view(TOKENS, HEADS, PLAIN + ROTARY)
    q_turned, k_turned = rotary_embedding_cpu(
        positions, heads[..., PLAIN:].contiguous(), turned[:, None].contiguous(), ROTARY, cache,
        False,
    )  # fmt: skip
    keys = torch.einsum("hpr,tr->thp", up, latent)
    scores = torch.einsum("qhp,khp->hqk", heads[..., :PLAIN], keys)
    scores += torch.einsum("qhp,kp->hqk", q_turned, k_turned[:, 0])
    near(torch.einsum("qhr,kr->hqk", query, rows[:, 0]), scores)


def test_each_head_is_multiplied() -> None:
    x, weight = draw(HEADS, TOKENS, SIZE), draw(HEADS, 6, SIZE)
    out = torch.empty(HEADS, TOKENS, 6)
    bmm_cpu(out, x, weight, True, None)
    near(out, x.double() @ weight.double().transpose(1, 2))
    with pytest.raises(NotImplementedError, match="unquantized"):
        bmm_cpu(out, x, weight, True, torch.ones(1))


def extend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    out = torch.empty(len(query), HEADS, value.shape[-1])
    latent = torch.zeros(40, 1, KV_RANK + ROTARY)
    extend_attention_cpu(
        query, key, value, out, latent, latent[..., :KV_RANK], 1.0, 1.0,
        torch.zeros(2, 40, dtype=torch.int64), torch.tensor([0, 1]), lengths, new,
        torch.tensor([0, int(new[0])]), int(new.max()), 0.3, 0.0, False, -1, None, None, None, True,
    )  # fmt: skip
    return out


def test_a_prompt_attends_with_keys_and_values_of_its_own() -> None:
    lengths = torch.tensor([4, 3])
    query, key = draw(TOKENS, HEADS, 16), draw(TOKENS, HEADS, 16, seed=1)
    value = draw(TOKENS, HEADS, 8)
    outputs = extend(query, key, value, lengths, lengths)
    for rows in (slice(0, 4), slice(4, 7)):
        scores = 0.3 * torch.einsum("qhd,khd->hqk", query[rows], key[rows])
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        near(outputs[rows], torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[rows]))
    with pytest.raises(NotImplementedError, match="prefix"):
        extend(query, key, value, lengths + 2, lengths)

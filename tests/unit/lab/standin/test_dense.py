"""Linear layers, norms, activation and rotary embedding against plain float64 arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel import (
    convert_weight_packed,
    fused_add_rmsnorm_cpu,
    gelu_tanh_and_mul_cpu,
    gemma3_rmsnorm_cpu,
    gemma4_rmsnorm_cpu,
    gemma_fused_add_rmsnorm_cpu,
    gemma_rmsnorm_cpu,
    multimodal_rotary_embedding_cpu,
    rmsnorm_cpu,
    rotary_embedding_cpu,
    silu_and_mul_cpu,
    weight_packed_linear,
)
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the rounding of ``dtype``; ``expected`` is float64."""
    assert actual.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 1.2e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_multiplies_and_adds(rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = draw(rows, 96, dtype=dtype), draw(40, 96, dtype=dtype) / 10
    # SGLang keeps the bias of a packed layer in float32 whatever the dtype of the weight.
    offset = draw(40) if bias else None
    before = x.clone()
    result = weight_packed_linear(x, weight, offset, True)
    expected = x.double() @ weight.double().T
    if offset is not None:
        expected += offset.to(dtype).double()
    assert result.shape == (rows, 40)
    assert_near(result, expected, dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("outputs", "inputs"), [(768, 128), (128, 384), (1024, 128), (48, 64)])
def test_float32_rows_have_the_same_bits_in_any_company(outputs: int, inputs: int) -> None:
    x, weight = draw(70, inputs), draw(outputs, inputs) / inputs**0.5
    together = weight_packed_linear(x, weight, None, True)
    for rows in (1, 2, 3, 4, 5, 8, 17, 33):
        for first in (0, 5, 31):
            alone = weight_packed_linear(x[first : first + rows].clone(), weight, None, True)
            assert torch.equal(alone, together[first : first + rows]), (rows, first)


def test_a_weight_updated_in_place_is_used_at_once() -> None:
    weight = draw(32, 64)
    packed = convert_weight_packed(weight)
    x = draw(1, 64)
    weight_packed_linear(x, packed, None, True)
    weight.mul_(2)
    assert_near(
        weight_packed_linear(x, packed, None, True), x.double() @ weight.double().T, x.dtype
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (5, 96), (3, 4, 32)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], seed=1, dtype=dtype)
    before = x.clone()
    assert_near(rmsnorm_cpu(x, weight, 1e-6), rms_norm(x, weight, 1e-6), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_of_a_vanishing_row_is_bounded_by_eps(eps: float) -> None:
    x, weight = torch.zeros(2, 32), draw(32)
    x[1] = 1e-12
    assert_near(rmsnorm_cpu(x, weight, eps), rms_norm(x, weight, eps), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_add_and_norm_updates_both_in_place(rows: int, dtype: torch.dtype) -> None:
    x, residual = draw(rows, 128, dtype=dtype), draw(rows, 128, seed=1, dtype=dtype)
    weight = draw(128, seed=2, dtype=dtype)
    total = x.double() + residual.double()
    assert fused_add_rmsnorm_cpu(x, residual, weight, 1e-6) is None
    assert_near(residual, total, dtype)
    assert_near(x, rms_norm(total, weight, 1e-6), dtype)


def test_bfloat16_norm_is_taken_before_the_sum_is_rounded() -> None:
    x, residual = draw(9, 128, dtype=torch.bfloat16), draw(9, 128, seed=1, dtype=torch.bfloat16)
    weight = torch.ones(128, dtype=torch.bfloat16)
    expected = rms_norm(x.double() + residual.double(), weight, 1e-6).bfloat16()
    fused_add_rmsnorm_cpu(x, residual, weight, 1e-6)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_norms_and_activation_have_the_same_bits_in_any_company(rows: int) -> None:
    x, residual, weight = draw(64, 96), draw(64, 96, seed=1), draw(96, seed=2)
    normed, activated = rmsnorm_cpu(x, weight, 1e-6), silu_and_mul_cpu(x)
    assert torch.equal(rmsnorm_cpu(x[7 : 7 + rows].clone(), weight, 1e-6), normed[7 : 7 + rows])
    assert torch.equal(silu_and_mul_cpu(x[7 : 7 + rows].clone()), activated[7 : 7 + rows])
    part, part_residual = x[7 : 7 + rows].clone(), residual[7 : 7 + rows].clone()
    fused_add_rmsnorm_cpu(part, part_residual, weight, 1e-6)
    fused_add_rmsnorm_cpu(x, residual, weight, 1e-6)
    assert torch.equal(part, x[7 : 7 + rows])
    assert torch.equal(part_residual, residual[7 : 7 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 768), (5, 34), (2, 3, 32)])
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    before = x.clone()
    gate, up = x.double().chunk(2, -1)
    assert_near(silu_and_mul_cpu(x), gate / (1 + (-gate).exp()) * up, dtype)
    assert torch.equal(x, before)


def rotated(x: Tensor, positions: Tensor, head: int, table: Tensor, neox: bool) -> Tensor:
    """Every pair of numbers turned by its angle, one pair at a time."""
    result: Tensor = x.double().unflatten(1, (-1, head)).clone()
    half = table.shape[1] // 2
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            cos, sin = table[position, pair].double(), table[position, half + pair].double()
            one, other = (pair, half + pair) if neox else (2 * pair, 2 * pair + 1)
            a, b = result[token, :, one].clone(), result[token, :, other].clone()
            result[token, :, one] = a * cos - b * sin
            result[token, :, other] = b * cos + a * sin
    return result.reshape(x.shape)


def rotary_table(size: int, positions: int = 64) -> Tensor:
    angles = torch.arange(positions)[:, None] / 50 ** (torch.arange(0, size, 2) / size)
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head", "rotary"), [(32, 32), (16, 16), (32, 16)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rotary_embedding(
    tokens: int, head: int, rotary: int, neox: bool, dtype: torch.dtype
) -> None:
    query, key = draw(tokens, 4 * head, dtype=dtype), draw(tokens, 2 * head, seed=1, dtype=dtype)
    positions = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(tokens))
    table = rotary_table(rotary).to(dtype)
    before = query.clone(), key.clone()
    turned_query, turned_key = rotary_embedding_cpu(positions, query, key, head, table, neox)
    assert_near(turned_query, rotated(query, positions, head, table, neox), dtype)
    assert_near(turned_key, rotated(key, positions, head, table, neox), dtype)
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def test_rotary_embedding_keeps_heads_apart_where_they_come_apart() -> None:
    query, key, table = draw(3, 4, 32), draw(3, 2, 32), rotary_table(32)
    positions = torch.tensor([3, 0, 9])
    apart = rotary_embedding_cpu(positions, query, key, 32, table, True)
    flat = rotary_embedding_cpu(positions, query.flatten(1), key.flatten(1), 32, table, True)
    assert [x.shape for x in apart] == [query.shape, key.shape]
    assert all(torch.equal(a.flatten(1), b) for a, b in zip(apart, flat, strict=True))


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["move", "rewrite", "same"])), max_size=8
    )
)
def test_rotary_embedding_never_uses_factors_of_another_call(
    changes: list[tuple[int, str]],
) -> None:
    table, positions = rotary_table(32), torch.zeros(2, dtype=torch.int64)
    query, key = draw(2, 64), draw(2, 32)
    for amount, kind in [(0, "same"), *changes]:
        if kind == "move":
            positions.fill_(amount)
        elif kind == "rewrite":
            table.add_(0.01 * amount)
        turned, _ = rotary_embedding_cpu(positions, query, key, 32, table, True)
        assert_near(turned, rotated(query, positions, 32, table, True), query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemmas_norms_add_one_to_the_weight(dtype: torch.dtype) -> None:
    x, residual = draw(5, 64, dtype=dtype), draw(5, 64, seed=1, dtype=dtype)
    weight = draw(64, dtype=dtype)
    ones = torch.ones(64, dtype=torch.float64)
    expected = _normed(x.double(), ones + weight.double())
    for norm in (gemma_rmsnorm_cpu, gemma3_rmsnorm_cpu):
        assert_near(norm(x, weight, 1e-6), expected, dtype)
    assert_near(gemma4_rmsnorm_cpu(x, weight, 1e-6, 1.0, True), expected, dtype)
    assert_near(gemma4_rmsnorm_cpu(x, weight, 1e-6, 1.0, False), _normed(x.double(), ones), dtype)
    total = x.double() + residual.double()
    gemma_fused_add_rmsnorm_cpu(x, residual, weight, 1e-6)
    assert_near(residual, total, dtype)
    assert_near(x, _normed(total, ones + weight.double()), dtype)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_gelu_gates() -> None:
    x = draw(5, 64)
    gate, up = x.double().chunk(2, -1)
    inner = 0.7978845608028654 * (gate + 0.044715 * gate**3)
    assert_near(gelu_tanh_and_mul_cpu(x), 0.5 * gate * (1 + inner.tanh()) * up, torch.float32)


@pytest.mark.parametrize(("interleaved", "axes"), [(True, [0, 1, 2, 0]), (False, [0, 0, 1, 2])])
def test_frequencies_turn_with_time_height_or_width(interleaved: bool, axes: list[int]) -> None:
    cache, positions = draw(50, 8), torch.tensor([[3, 9], [4, 20], [31, 2]])
    query, key = draw(2, 3 * 16), draw(2, 16)
    turned = query.clone(), key.clone()
    multimodal_rotary_embedding_cpu(positions, *turned, 16, cache, [2, 1, 1], interleaved, True)
    own = torch.stack(
        [
            torch.cat([cache[positions[axes[i % 4], token], i].view(1) for i in range(8)])
            for token in range(2)
        ]
    )
    expected = rotary_embedding_cpu(torch.arange(2), query, key, 16, own, True)
    assert all(map(torch.equal, turned, expected))
    # The same position in all three is that of a text.
    text = query.clone(), key.clone()
    token_positions = torch.tensor([5, 7])
    multimodal_rotary_embedding_cpu(token_positions, *text, 16, cache, [2, 1, 1], interleaved, True)
    assert all(
        map(torch.equal, text, rotary_embedding_cpu(token_positions, query, key, 16, cache, True))
    )

"""Layers of a gated delta network against plain float64 arithmetic, one token after the other."""

import pytest
import torch
from sgl_kernel import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_qkvzba_split_reshape_cat_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
    gemma_rmsnorm_cpu,
)
from torch import Tensor

CHANNELS, WIDTH, SLOTS = 6, 4, 5
KEY_HEADS, HEADS, D_K, D_V = 2, 4, 8, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-5)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A whole sequence ``[d, tokens]`` from its beginning."""
    padded = torch.cat((torch.zeros(len(x), WIDTH - 1), x), -1).double()
    rows = [
        (padded[:, offset : offset + WIDTH] * weight.double()).sum(-1) + bias
        for offset in range(x.shape[1])
    ]
    out = torch.stack(rows, -1)
    return out * out.sigmoid()


def read(x: Tensor, states: Tensor, slot: int, weight: Tensor, bias: Tensor, *, known: bool):
    return causal_conv1d_fn_cpu(
        x, weight, bias, activation="silu", conv_states=states,
        has_initial_state=torch.tensor([known]), cache_indices=torch.tensor([slot]),
        query_start_loc=torch.tensor([0, x.shape[1]]),
    )  # fmt: skip


@pytest.mark.parametrize("cut", [1, 2, 7, 12])
def test_a_sequence_is_convolved_alike_in_any_parts(cut: int) -> None:
    x, weight, bias = draw(CHANNELS, 13), draw(CHANNELS, WIDTH), draw(CHANNELS)
    states = draw(SLOTS, CHANNELS, WIDTH - 1)
    whole = read(x, states.clone(), 3, weight, bias, known=False)
    near(whole, convolved(x, weight, bias))
    first = read(x[:, :cut], states, 3, weight, bias, known=False)
    rest = read(x[:, cut:], states, 3, weight, bias, known=True)
    assert torch.equal(torch.cat((first, rest), -1), whole)


def test_decoding_and_verifying_convolve_as_reading_does() -> None:
    x, weight, bias = draw(CHANNELS, 9), draw(CHANNELS, WIDTH), draw(CHANNELS)
    states = torch.zeros(SLOTS, CHANNELS, WIDTH - 1)
    whole = read(x, states.clone(), 2, weight, bias, known=False)
    read(x[:, :4], states, 2, weight, bias, known=False)
    before = states.clone()
    slots = torch.tensor([2, -1])
    windows = torch.full((3, 5, CHANNELS, WIDTH - 1), 7.0)
    drafts = torch.stack((x[:, 4:], draw(CHANNELS, 5)))
    verified = causal_conv1d_update_cpu(
        drafts, states, weight, bias, "silu", conv_state_indices=slots,
        intermediate_conv_window=windows, intermediate_state_indices=torch.tensor([1, 2]),
    )  # fmt: skip
    assert torch.equal(verified[0], whole[:, 4:])
    assert torch.equal(states, before)
    assert (windows[[0, 2]] == 7.0).all()
    for step in range(5):
        alone = causal_conv1d_update_cpu(
            x[None, :, 4 + step], states, weight, bias, "silu", conv_state_indices=slots[:1]
        )
        assert torch.equal(alone[0], whole[:, 4 + step])
        assert torch.equal(windows[1, step], states[2])


def layer(tokens: int) -> dict[str, Tensor]:
    return {
        "q": draw(1, tokens, KEY_HEADS, D_K),
        "k": draw(1, tokens, KEY_HEADS, D_K, seed=1),
        "v": draw(1, tokens, HEADS, D_V),
        "a": draw(tokens, HEADS),
        "b": draw(tokens, HEADS, seed=1),
    }


A_LOG, DT_BIAS = 0.3 * draw(HEADS, seed=2), 0.3 * draw(HEADS, seed=3)


def reference(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs ``[tokens, heads, d_v]`` and the last state of a sequence from its beginning."""
    x = {name: part.double() for name, part in x.items()}
    state, rows = torch.zeros(HEADS, D_V, D_K, dtype=torch.float64), []
    for position in range(x["a"].shape[0]):
        for head in range(HEADS):
            q, k = (x[n][0, position, head // (HEADS // KEY_HEADS)] for n in "qk")
            q, k = q / (q @ q + 1e-6).sqrt() / D_K**0.5, k / (k @ k + 1e-6).sqrt()
            gate = (x["a"][position, head] + DT_BIAS[head].double()).exp().log1p()
            state[head] *= (-A_LOG[head].double().exp() * gate).exp()
            change = x["b"][position, head].sigmoid() * (
                x["v"][0, position, head] - state[head] @ k
            )
            state[head] += change[:, None] * k[None]
            rows.append(state[head] @ q)
    return torch.stack(rows).view(-1, HEADS, D_V), state


def update(x: dict[str, Tensor], states: Tensor, slots: Tensor, starts: list[int], **named: object):
    return fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=A_LOG, dt_bias=DT_BIAS, **x, initial_state_source=states,
        initial_state_indices=slots, cu_seqlens=torch.tensor(starts), use_qk_l2norm_in_kernel=True,
        **named,
    )  # fmt: skip


def read_all(x: dict[str, Tensor], states: Tensor, slot: int) -> Tensor:
    g, beta = fused_gdn_gating_cpu(A_LOG, x["a"], x["b"], DT_BIAS)
    out: Tensor
    out, *_ = chunk_gated_delta_rule_cpu(
        x["q"], x["k"], x["v"], g, beta, initial_state=states,
        cu_seqlens=torch.tensor([0, x["a"].shape[0]]), head_first=False,
        use_qk_l2norm_in_kernel=True, initial_state_indices=torch.tensor([slot]),
    )  # fmt: skip
    return out


def tokens_of(x: dict[str, Tensor], where: slice) -> dict[str, Tensor]:
    return {name: part[:, where] if part.dim() == 4 else part[where] for name, part in x.items()}


def test_a_prompt_is_read_as_the_equation_says() -> None:
    x, states = layer(11), torch.zeros(SLOTS, HEADS, D_V, D_K)
    out, (expected, state) = read_all(x, states, 3), reference(x)
    near(out[0], expected)
    near(states[3], state)
    assert not states[[0, 1, 2, 4]].any()


def test_decoding_and_verifying_update_as_reading_does() -> None:
    x, states = layer(9), torch.zeros(SLOTS, HEADS, D_V, D_K)
    whole = read_all(x, states.clone(), 2)
    read_all(tokens_of(x, slice(0, 4)), states, 2)
    before = states.clone()
    drafts, other = tokens_of(x, slice(4, 9)), layer(5)
    both = {
        name: torch.cat((part, other[name]), 1 if part.dim() == 4 else 0)
        for name, part in drafts.items()
    }
    after = torch.full((3, 7, HEADS, D_V, D_K), 7.0)
    verified = update(
        both, states, torch.tensor([2, -1]), [0, 5, 10], disable_state_update=True,
        intermediate_states_buffer=after, intermediate_state_indices=torch.tensor([1, 2]),
        cache_steps=5,
    )  # fmt: skip
    assert torch.equal(verified[:, :5], whole[:, 4:])
    assert torch.equal(states, before)
    assert (after[[0, 2]] == 7.0).all()
    assert (after[1, 5:] == 7.0).all()
    for step in range(5):
        alone = update(tokens_of(drafts, slice(step, step + 1)), states, torch.tensor([2]), [0, 1])
        assert torch.equal(alone[0], whole[0, 4 + step : 5 + step])
        assert torch.equal(after[1, step], states[2])


def test_trees_and_gates_of_channels_are_refused() -> None:
    x, states = layer(1), torch.zeros(SLOTS, HEADS, D_V, D_K)
    with pytest.raises(NotImplementedError, match="chains only"):
        update(x, states, torch.tensor([0]), [0, 1], retrieve_parent_token=torch.zeros(1, 1))
    with pytest.raises(NotImplementedError, match="one gate for each head"):
        update(x, states, torch.tensor([0]), [0, 1], is_kda=True)


def test_projections_are_split_in_both_orders() -> None:
    parts = {
        "q": draw(3, KEY_HEADS, D_K), "k": draw(3, KEY_HEADS, D_K, seed=1),
        "v": draw(3, HEADS, D_V), "z": draw(3, HEADS, D_V, seed=1),
    }  # fmt: skip
    b, a = draw(3, HEADS), draw(3, HEADS, seed=1)
    flat = [part.reshape(3, -1) for part in parts.values()]
    sizes = (KEY_HEADS, HEADS, D_K, D_V)
    plain = fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat(flat, -1), torch.cat((b, a), -1), *sizes
    )
    grouped = torch.cat([part.reshape(3, KEY_HEADS, -1) for part in parts.values()], -1)
    gates = torch.cat([gate.reshape(3, KEY_HEADS, -1) for gate in (b, a)], -1)
    shared = fused_qkvzba_split_reshape_cat_cpu(
        grouped.reshape(3, -1), gates.reshape(3, -1), *sizes
    )
    for projections in (plain, shared):
        assert torch.equal(projections[0], torch.cat(flat[:3], -1))
        assert all(map(torch.equal, projections[1:], (parts["z"], b, a)))


def test_gates_multiply() -> None:
    x, gate, weight = draw(5, 16), draw(5, 16, seed=1), draw(16)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = normed * weight.double() * gate.double() * gate.double().sigmoid()
    near(fused_rmsnorm_gated_cpu(x, weight, gate, 1e-6), expected)
    product = x.clone()
    fused_sigmoid_mul_cpu(product, gate)
    near(product, x.double() * gate.double().sigmoid())


def test_a_head_holds_its_query_and_its_gate() -> None:
    q, gate, k = draw(5, 3, 8), draw(5, 3, 8, seed=1), draw(5, 8)
    weights = draw(8), draw(8, seed=1)
    both = torch.cat((q, gate), -1).reshape(5, -1)
    outputs = fused_qk_gemma_rmsnorm_with_gate_cpu(both, k, *weights, 1e-6, 8, 3)
    assert torch.equal(outputs[0], gemma_rmsnorm_cpu(q.reshape(-1, 8), weights[0], 1e-6))
    assert torch.equal(outputs[1], gemma_rmsnorm_cpu(k, weights[1], 1e-6))
    assert torch.equal(outputs[2], gate.reshape(-1, 8))

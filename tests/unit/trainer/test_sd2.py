"""Steering a drafter (SD2): its equations, where it begins, and what its training sees."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.training_rounds import LAYERS, SHAPE
from trainer.sd2 import (
    Sd2Draft,
    Sd2Shape,
    divergence,
    draw_random_offsets,
    greedy_chain,
    load_sd2,
    save_sd2,
)

DECODER = replace(SHAPE, layers=2, mlp=40)


@pytest.fixture
def draft() -> Sd2Draft:
    torch.manual_seed(3)
    return Sd2Draft(Sd2Shape(DECODER, SHAPE.hidden, LAYERS))


def steered_somewhere(draft: Sd2Draft) -> Sd2Draft:
    layers: Any = draft.decoder.model.layers
    steer: Any = draft.steer
    with torch.no_grad():
        for part, layer in zip(steer, layers, strict=True):
            part.weight.normal_(std=0.5)
            layer.mlp.down_proj.weight.mul_(30)
    return draft


def tokens(rows: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(
        SHAPE.vocabulary, (batch, rows), generator=torch.Generator().manual_seed(seed)
    )


def test_at_first_it_is_the_plain_drafter(draft: Sd2Draft):
    text = tokens(9)
    g = draft.steering(torch.randn(1, 9, len(LAYERS) * SHAPE.hidden))
    assert torch.equal(draft(text, g), draft(text))
    assert torch.allclose(draft(text), draft.decoder(text), atol=1e-5)


def test_at_first_g_is_the_sum_of_the_hidden_states(draft: Sd2Draft):
    features = torch.randn(2, 3, len(LAYERS), SHAPE.hidden)
    expected = functional.layer_norm(features.sum(2), (SHAPE.hidden,))
    assert torch.allclose(draft.steering(features.flatten(2)), expected, atol=1e-5)


def test_the_bias_enters_before_the_gate(draft: Sd2Draft):
    """Eq. 2 by hand, in a drafter of one layer without attention."""
    shape = Sd2Shape(replace(DECODER, layers=1), SHAPE.hidden, LAYERS)
    torch.manual_seed(1)
    one = steered_somewhere(Sd2Draft(shape))
    layer: Any = one.decoder.model.layers[0]
    steer: Any = one.steer[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
    text, g = tokens(5), torch.randn(1, 5, SHAPE.hidden)
    residual = one.decoder.model.embed_tokens(text)
    a = layer.post_attention_layernorm(residual)
    w_g, w_u = layer.mlp.gate_up_proj.weight.chunk(2)
    inner = (a @ w_u.T + g @ steer.weight.T) * functional.silu(a @ w_g.T)
    final = one.decoder.model.norm(residual + inner @ layer.mlp.down_proj.weight.T)
    expected = final @ one.decoder.model.embed_tokens.weight.T
    assert torch.allclose(one(text, g), expected, atol=1e-4)


def test_each_row_is_steered_by_one_of_the_last_rows():
    back = draw_random_offsets(50, 400, 4, torch.Generator().manual_seed(2))
    row_offsets = torch.arange(50) - back
    assert back.min() == 0
    assert set(row_offsets[:, 3:].unique().tolist()) == {0, 1, 2, 3}
    shares = torch.bincount(row_offsets[:, 3:].flatten()) / row_offsets[:, 3:].numel()
    assert shares.min() > 0.2


def test_the_loss_sees_only_what_a_server_would_hand_over(draft: Sd2Draft):
    """Row p is steered by hidden states at p at the latest: those at p + 1 are not known yet."""
    steered_somewhere(draft)
    text = tokens(8)
    logits = torch.randn(1, 8, SHAPE.vocabulary)
    features = torch.randn(1, 8, len(LAYERS) * SHAPE.hidden, requires_grad=True)
    back = torch.arange(7)[None]
    divergence(draft, text, logits, features, back).backward()
    assert features.grad is not None
    moved = features.grad.abs().sum(-1)[0] > 0
    assert moved.tolist() == [True] * 7 + [False]


def test_a_row_predicts_the_token_after_the_one_it_takes(draft: Sd2Draft):
    text = tokens(8)
    with torch.no_grad():
        own = torch.cat([torch.randn(1, 1, SHAPE.vocabulary), draft(text[:, 1:])], dim=1)
        assert divergence(draft, text, own, None, torch.arange(7)[None]).abs() < 1e-5


def test_training_with_steering_finds_what_only_the_hidden_states_tell():
    """Tokens that follow from the hidden states and from nothing else."""
    torch.manual_seed(5)
    draft = Sd2Draft(Sd2Shape(DECODER, SHAPE.hidden, LAYERS))
    table = torch.randn(SHAPE.vocabulary, len(LAYERS) * SHAPE.hidden)
    generator = torch.Generator().manual_seed(1)

    def lesson(steer: bool) -> torch.Tensor:
        text = torch.randint(SHAPE.vocabulary, (8, 20), generator=generator)
        lesson_tokens = torch.randint(SHAPE.vocabulary, (8, 20), generator=generator)
        # The hidden states at p tell the token at p + 2.
        features = table[lesson_tokens]
        logits = torch.full((8, 20, SHAPE.vocabulary), -8.0)
        logits[:, 1:].scatter_(2, lesson_tokens[:, :-1, None], 8.0)
        back = torch.arange(19).expand(8, 19)
        return divergence(draft, text, logits, features if steer else None, back)

    begun = lesson(True).item()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(250):
        optimizer.zero_grad()
        lesson(True).backward()
        optimizer.step()
    assert lesson(True).item() < begun / 3
    assert lesson(False).item() > begun / 2


def test_a_chain_is_steered_by_the_last_verified_position(draft: Sd2Draft):
    steered_somewhere(draft)
    text = tokens(10)
    features = torch.randn(1, 9, len(LAYERS) * SHAPE.hidden)
    chain = greedy_chain(draft, features, text, 3)
    g = draft.steering(features)
    grown = text
    for _ in range(3):
        rows = grown.shape[1] - 1
        steering = torch.cat([g, g[:, -1:].expand(-1, rows - 9, -1)], dim=1)
        grown = torch.cat([grown, draft(grown[:, 1:], steering)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(chain, grown[:, 10:])
    assert not torch.equal(chain, greedy_chain(draft, features, text, 3, steered=False))


def test_it_comes_back_from_its_folder(draft: Sd2Draft, tmp_path: Path):
    steered_somewhere(draft)
    save_sd2(draft, tmp_path / "steered")
    again = load_sd2(tmp_path / "steered")
    assert again.shape == draft.shape
    for (name, one), (_, other) in zip(
        draft.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one.to(torch.bfloat16).float(), other), name


@pytest.mark.parametrize(("hidden", "layers"), [(0, LAYERS), (SHAPE.hidden, (1,))])
def test_sizes_that_cannot_be_steered_are_refused(hidden: int, layers: tuple[int, ...]):
    with pytest.raises(ValueError, match="steering vector"):
        Sd2Shape(DECODER, hidden, layers)

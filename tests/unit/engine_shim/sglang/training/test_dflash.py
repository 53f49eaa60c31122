"""The DFlash student: many blocks in one pass are what each would be alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_shim.sglang.training.blocks import DecoderLayer, DecoderShape
from engine_shim.sglang.training.dflash import (
    DFlashShape,
    DFlashStudent,
    loss_decay,
    position_weights,
)

DECODER = DecoderShape(
    hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=2, vocabulary=61, max_positions=64
)
SHAPE = DFlashShape(DECODER, (0, 2), block=5, mask_token=60)
BATCH, LENGTH = 3, 14


@pytest.fixture
def student() -> DFlashStudent:
    torch.manual_seed(5)
    new_student = DFlashStudent(SHAPE, torch.randn(DECODER.vocabulary, DECODER.hidden))
    with torch.no_grad():
        for parameter in new_student.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return new_student.eval()


@pytest.fixture
def features() -> Tensor:
    return torch.randn(
        BATCH, LENGTH, 2 * DECODER.hidden, generator=torch.Generator().manual_seed(6)
    )


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(60, (BATCH, LENGTH + 5), generator=torch.Generator().manual_seed(7))


def test_blocks_do_not_see_each_other_nor_what_comes_later(
    student: DFlashStudent, features: Tensor, tokens: Tensor
) -> None:
    anchors = torch.tensor([3, 9, 1, 14])
    together = student.block_logits(features, tokens, anchors)
    assert together.shape == (BATCH, 4, 4, 61)
    for index, anchor in enumerate(anchors.tolist()):
        alone = student.block_logits(
            features[:, :anchor], tokens[:, : anchor + 1], anchors[[index]]
        )
        assert torch.allclose(together[:, index], alone[:, 0], atol=1e-5)


def test_of_a_block_only_the_newest_token_is_read(
    student: DFlashStudent, features: Tensor, tokens: Tensor
) -> None:
    anchor = torch.tensor([6])
    before = student.block_logits(features, tokens, anchor)
    tokens[:, 7:] = 0
    assert torch.equal(student.block_logits(features, tokens, anchor), before)
    tokens[:, 6] += 1
    assert not torch.allclose(student.block_logits(features, tokens, anchor), before)


def test_rows_of_a_block_see_each_other_in_both_directions(
    student: DFlashStudent, features: Tensor, tokens: Tensor
) -> None:
    """Written apart from the code under test: one block, row by row, head by head."""
    length, block = 6, SHAPE.block
    half = DECODER.head_dim // 2

    def turned(x: Tensor, position: int) -> Tensor:
        angles = position * DECODER.rope_base ** (-torch.arange(half) * 2 / DECODER.head_dim)
        a, b = x[:, :half], x[:, half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
        )

    ids = [int(tokens[0, length]), *[SHAPE.mask_token] * (block - 1)]
    rows = [student.embedding[i] for i in ids]
    context = student.hidden_norm(student.fc(features[0, :length]))
    for layer in student.layers:
        assert isinstance(layer, DecoderLayer)
        attention = layer.self_attn
        assert attention.q_norm is not None
        assert attention.k_norm is not None
        sizes = [DECODER.query_width, DECODER.kv_width, DECODER.kv_width]
        normed = [layer.input_layernorm(row) for row in rows]
        keys, values, queries = [], [], []
        for position, source in enumerate([*context, *normed]):
            q, k, v = attention.qkv_proj(source).split(sizes)
            keys.append(turned(attention.k_norm(k.view(2, 8)), position))
            values.append(v.view(2, 8))
            if position >= length:
                queries.append(turned(attention.q_norm(q.view(4, 8)), position))
        out = []
        for row, query in zip(rows, queries, strict=True):
            heads = []
            for head in range(4):
                scores = torch.stack([query[head] @ key[head // 2] for key in keys]) / 8**0.5
                mixed = scores.softmax(0) @ torch.stack([value[head // 2] for value in values])
                heads.append(mixed)
            residual = row + attention.o_proj(torch.cat(heads))
            out.append(residual + layer.mlp(layer.post_attention_layernorm(residual)))
        rows = out
    expected = torch.stack([student.embedding @ student.norm(row) for row in rows[1:]])
    block_logits = student.block_logits(features, tokens, torch.tensor([length]))[0, 0]
    assert torch.allclose(block_logits, expected, atol=1e-4)
    drafted = student.greedy_block(features[:1, :length], tokens[:1, : length + 1])
    assert torch.equal(drafted[0], expected.argmax(-1))


# The DFlash paper's values (arXiv:2602.06036, appendix A.1), and between and beyond them ours.
@pytest.mark.parametrize(
    ("block", "expected"),
    [(8, 4), (10, 5), (16, 7), (2, 1), (4, 2), (12, 5 + 2 / 3), (32, 12.333333)],
)
def test_the_loss_decays_as_the_paper_suggests(block: int, expected: float) -> None:
    assert loss_decay(block) == pytest.approx(expected)
    weights = position_weights(block)
    assert float(weights.sum()) == pytest.approx(1)
    student = DFlashStudent(replace(SHAPE, block=block), torch.zeros(61, 32))
    if block > 2:
        ratio = float(weights[1] / weights[0])
        assert ratio == pytest.approx(math.exp(-1 / expected), rel=1e-5)
        # What an online update weighs by, position after position.
        assert student.position_discount == pytest.approx(ratio, rel=1e-5)


def test_a_larger_block_is_never_weighed_over_fewer_positions() -> None:
    decays = [loss_decay(block) for block in range(2, 65)]
    assert decays == sorted(decays)
    assert len(set(decays)) == len(decays)


def test_near_positions_count_more() -> None:
    weights = position_weights(8)
    assert weights.shape == (7,)
    assert float(weights.sum()) == pytest.approx(1)
    assert float(weights[0] / weights[4]) == pytest.approx(2.718281828, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 1}, "drafts nothing"),
        ({"mask_token": 61}, "outside the vocabulary"),
        ({"feature_layers": (2, 0)}, "not ascending"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    fields = {"decoder": DECODER, "feature_layers": (0, 2), "block": 5, "mask_token": 60}
    with pytest.raises(ValueError, match=message):
        DFlashShape(**fields | changes)  # type: ignore[arg-type]


def test_drafting_from_a_row_is_a_block_behind_it(
    student: DFlashStudent, features: Tensor, tokens: Tensor
) -> None:
    steps = student.unroll(features, tokens, 3, first_anchor=4)
    blocks = student.block_logits(features, tokens, torch.arange(5, LENGTH + 1))
    assert len(steps) == 3
    for step, logits in enumerate(steps):
        assert torch.equal(logits, blocks[:, :, step])
    with pytest.raises(ValueError, match="4 drafts, not 5"):
        student.unroll(features, tokens, 5)
    assert len(student.unroll(features, tokens, student.max_drafts)) == 4


def test_a_padded_window_from_further_on_drafts_as_the_window_alone(
    student: DFlashStudent, features: Tensor, tokens: Tensor
) -> None:
    """Right-aligned, as a round is; where it lies in its request is nothing to the drafts."""
    alone = student.unroll(features[:1, 5:], tokens[:1, 5:], 3)
    valid = torch.arange(LENGTH)[None] >= 5
    garbage = features[:1].clone()
    garbage[:, :5] = 1e3
    positions = torch.arange(LENGTH)[None] + 20
    padded_logits = student.unroll(
        garbage, tokens[:1], 3, first_anchor=5, positions=positions, valid=valid
    )
    for one, other in zip(alone, padded_logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_the_head_is_the_targets_own_where_it_has_one(
    student: DFlashStudent, features: Tensor, tokens: Tensor
) -> None:
    headed = DFlashStudent(SHAPE, student.embedding, head=2 * student.embedding)
    headed.load_state_dict(student.state_dict())
    assert "head" not in headed.state_dict()
    anchor = torch.tensor([6])
    twice = 2 * student.block_logits(features, tokens, anchor)
    assert torch.allclose(headed.block_logits(features, tokens, anchor), twice, atol=1e-4)


def test_at_the_end_of_all_positions_it_still_drafts(
    student: DFlashStudent, features: Tensor, tokens: Tensor
) -> None:
    last = torch.arange(DECODER.max_positions - LENGTH, DECODER.max_positions)
    (step, *_) = student.unroll(features, tokens, 3, positions=last)
    assert bool(torch.isfinite(step).all())

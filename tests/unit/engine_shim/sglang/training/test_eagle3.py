"""The draft student: training sees exactly what drafting computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student

DECODER = DecoderShape(
    hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=1, vocabulary=61, max_positions=64
)
BATCH, LENGTH, STEPS = 3, 12, 4


@pytest.fixture
def student() -> Eagle3Student:
    torch.manual_seed(5)
    new_student = Eagle3Student(
        Eagle3Shape(DECODER, (0, 2)), torch.randn(DECODER.vocabulary, DECODER.hidden)
    )
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
    return torch.randint(
        DECODER.vocabulary, (BATCH, LENGTH + STEPS), generator=torch.Generator().manual_seed(7)
    )


def chain_one_row_at_a_time(
    student: Eagle3Student, features: Tensor, tokens: Tensor, anchor: int
) -> list[Tensor]:
    """Drafting as a server does it: one new row a step, causal attention over all rows.

    ``features`` [rows, width] and ``tokens`` [rows + steps] of one sequence.  Written apart from
    the code under test.
    """
    layer = student._layer
    width, heads, kv_heads, head = DECODER.hidden, DECODER.heads, DECODER.kv_heads, DECODER.head_dim

    def turned(x: Tensor, position: int) -> Tensor:
        half = head // 2
        angles = position * DECODER.rope_base ** (-torch.arange(half) * 2 / head)
        a, b = x[:, :half], x[:, half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
        )

    keys: list[Tensor] = []
    values: list[Tensor] = []

    def run_row(hidden: Tensor, token: Tensor, position: int) -> tuple[Tensor, Tensor]:
        embedded = layer.input_layernorm(student.embedding[token])
        qkv = layer.self_attn.qkv_proj(torch.cat([embedded, layer.hidden_norm(hidden)]))
        q, k, v = qkv.split([heads * head, kv_heads * head, kv_heads * head])
        keys.append(turned(k.view(kv_heads, head), position))
        values.append(v.view(kv_heads, head))
        outputs = []
        for index, query in enumerate(turned(q.view(heads, head), position)):
            group = index // (heads // kv_heads)
            scores = torch.stack([query @ key[group] for key in keys]) / head**0.5
            outputs.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        residual = hidden + layer.self_attn.o_proj(torch.cat(outputs))
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        assert residual.shape == (width,)
        assert student.lm_head is not None
        return residual, student.lm_head(student.model.norm(residual))

    for row in range(anchor + 1):
        hidden, logits = run_row(student.model.fc(features[row]), tokens[row + 1], row)
    chain = [logits]
    for step in range(1, STEPS):
        hidden, logits = run_row(hidden, tokens[anchor + 1 + step], anchor + step)
        chain.append(logits)
    return chain


@pytest.mark.parametrize("anchor", [0, 1, 7, LENGTH - 1])
def test_unroll_equals_drafting_one_row_at_a_time(
    student: Eagle3Student, features: Tensor, tokens: Tensor, anchor: int
) -> None:
    unrolled = student.unroll(features, tokens, STEPS)
    for sequence in range(BATCH):
        chain = chain_one_row_at_a_time(student, features[sequence], tokens[sequence], anchor)
        for step in range(STEPS):
            torch.testing.assert_close(
                unrolled[step][sequence, anchor], chain[step], rtol=1e-4, atol=1e-4
            )


def test_anchors_see_earlier_rows_as_context(
    student: Eagle3Student, features: Tensor, tokens: Tensor
) -> None:
    whole = student.unroll(features, tokens, STEPS)
    tail = student.unroll(features, tokens, STEPS, first_anchor=8)
    for step in range(STEPS):
        assert tail[step].shape == (BATCH, LENGTH - 8, DECODER.vocabulary)
        torch.testing.assert_close(tail[step], whole[step][:, 8:])


def test_rows_marked_invalid_are_as_if_absent(
    student: Eagle3Student, features: Tensor, tokens: Tensor
) -> None:
    shorter = student.unroll(
        features[:, 3:], tokens[:, 3:], STEPS, positions=torch.arange(3, LENGTH)
    )
    valid = torch.arange(LENGTH).expand(BATCH, -1) >= 3
    masked = student.unroll(features, tokens, STEPS, first_anchor=3, valid=valid)
    for step in range(STEPS):
        torch.testing.assert_close(masked[step], shorter[step], rtol=1e-4, atol=1e-4)


def test_only_distances_between_positions_matter(
    student: Eagle3Student, features: Tensor, tokens: Tensor
) -> None:
    here = student.unroll(features, tokens, STEPS)
    there = student.unroll(
        features, tokens, STEPS, positions=torch.arange(LENGTH).expand(BATCH, -1) + 30
    )
    torch.testing.assert_close(here[-1], there[-1], rtol=1e-4, atol=1e-4)


def test_greedy_chain_proposes_the_unrolls_own_best_tokens(
    student: Eagle3Student, features: Tensor, tokens: Tensor
) -> None:
    known = tokens[:, : LENGTH + 1]
    proposed = student.greedy_chain(features, known, STEPS)
    logits = student.unroll(features, torch.cat([known, proposed], dim=1), STEPS)
    assert proposed.shape == (BATCH, STEPS)
    for step in range(STEPS):
        assert torch.equal(proposed[:, step], logits[step][:, -1].argmax(dim=-1))


def test_the_embedding_is_never_trained(
    student: Eagle3Student, features: Tensor, tokens: Tensor
) -> None:
    torch.stack(student.unroll(features, tokens, STEPS)).sum().backward()
    assert not student.embedding.requires_grad
    assert "embedding" not in student.state_dict()
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.parametrize("layers", [(2,), (2, 2), (3, 1)])
def test_feature_layers_sglang_would_misread_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two or more, ascending and distinct"):
        Eagle3Shape(DECODER, layers)


def test_a_draft_of_two_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="one layer, not 2"):
        Eagle3Shape(DECODER.replace_layers(2), (0, 2))

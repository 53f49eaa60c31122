"""A drafter that can draft some of the target's tokens: its loss, its acceptance, its files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_shim.sglang.training.chain import Eagle3Student
from engine_shim.sglang.training.online import OnlineSettings, OnlineStudent, divergence
from engine_shim.sglang.training.students import (
    UnsupportedDrafterError,
    decode_shape,
    encode_shape,
)
from engine_shim.sglang.training.students import make_student as make_live_student
from engine_shim.sglang.training.versions import VersionError, VersionOrigin, Versions
from lab.cpu_engine.models.targets import Qwen3Target
from tests.support.training_rounds import (
    SHAPE,
    make_pruned_student,
    make_round,
    make_signal,
    make_student,
    make_target,
    with_draft_vocabulary,
)
from trainer.adapt import AdaptSettings, acceptance_rate, fine_tune
from trainer.checkpoint import load_eagle3, save_eagle3

TOKENS = torch.tensor([token for token in range(SHAPE.vocabulary) if token % 4 != 1])


@pytest.fixture(scope="module")
def target() -> Qwen3Target:
    return make_target()


def parameters(student: Eagle3Student) -> dict[str, Tensor]:
    return {name: part.detach() for name, part in student.named_parameters()}


def test_it_drafts_what_the_whole_one_would_among_its_tokens(target: Qwen3Target) -> None:
    whole, pruned = make_student(target), make_pruned_student(target)
    teacher_round = make_round(target, 20, seed=1, top=4)
    features, tokens = teacher_round.features[:, :16], teacher_round.tokens
    for all_of_it, part in zip(
        whole.unroll(features, tokens, 3), pruned.unroll(features, tokens, 3), strict=True
    ):
        torch.testing.assert_close(part, all_of_it[..., TOKENS])
        kept = torch.full_like(all_of_it, -torch.inf)
        kept[..., TOKENS] = all_of_it[..., TOKENS]
        assert torch.equal(pruned.drafted_tokens(part), kept.argmax(-1))
    # A server continues from the target's ids, too.
    drafts = pruned.greedy_chain(features, tokens[:, :17], 4)
    assert set(drafts.flatten().tolist()) <= set(TOKENS.tolist())


def test_columns_are_those_of_the_head(target: Qwen3Target) -> None:
    pruned = make_pruned_student(target)
    assert torch.equal(pruned.columns(TOKENS), torch.arange(len(TOKENS)))
    assert pruned.columns(torch.tensor([1, 5, 37])).tolist() == [-1, -1, -1]
    everything = torch.arange(SHAPE.vocabulary)
    assert torch.equal(make_student(target).columns(everything), everything)


def test_what_cannot_be_drafted_is_pooled_with_what_is_not_listed() -> None:
    torch.manual_seed(3)
    theirs = torch.randn(5, 7, SHAPE.vocabulary).log_softmax(-1)
    mine = torch.randn(5, 7, len(TOKENS)).log_softmax(-1)
    top_logs, top_tokens = theirs.topk(6, dim=-1)
    columns = torch.full((SHAPE.vocabulary,), -1)
    columns[TOKENS] = torch.arange(len(TOKENS))
    listed = columns[top_tokens]
    assert (listed < 0).any()
    expected = torch.zeros(5, 7)
    for row in torch.cartesian_prod(torch.arange(5), torch.arange(7)).tolist():
        position = tuple(row)
        here = [column for column in listed[position].tolist() if column >= 0]
        p, q = theirs[position].exp(), mine[position].exp()
        pairs = [(float(p[TOKENS[column]]), float(q[column])) for column in here]
        pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
        expected[position] = sum(a * torch.tensor(a / b).log() for a, b in pairs)
    torch.testing.assert_close(divergence(listed, top_logs, mine), expected, rtol=1e-4, atol=1e-5)


def test_a_position_of_which_nothing_can_be_drafted_has_a_finite_loss_and_no_gradient() -> None:
    logits = torch.randn(1, 2, len(TOKENS), requires_grad=True)
    top_logs = torch.tensor([[[-0.1, -3.0], [0.0, -torch.inf]]])
    loss = divergence(torch.full((1, 2, 2), -1), top_logs, logits.log_softmax(-1)).sum()
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_it_learns_a_round(target: Qwen3Target) -> None:
    student = make_pruned_student(target)
    online = OnlineStudent(student, OnlineSettings(anchors=8, top=12, learning_rate=3e-3))
    teacher_round = make_round(target, 24, seed=2, top=12, requests=3)
    losses = [online.learn(teacher_round, 3).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    # What it only uses stays.
    assert torch.equal(student.embedding, target.model.embed_tokens.weight)
    assert student.tokens is not None
    assert torch.equal(student.tokens, TOKENS)


def test_it_accepts_more_of_what_it_was_trained_on(target: Qwen3Target) -> None:
    student = make_pruned_student(target)
    signals = [make_signal(target, seed) for seed in range(8)]
    tuned_student = fine_tune(
        student, signals, AdaptSettings(passes=20, batch=4, learning_rate=3e-3)
    )
    before, after = acceptance_rate(student, signals, 3), acceptance_rate(tuned_student, signals, 3)
    assert after > before + 0.2
    # No more than the tokens that it can draft.
    draftable = torch.isin(torch.cat([signal.tokens for signal in signals]), TOKENS).float().mean()
    assert after < float(draftable) + 0.1 < 1


def test_a_checkpoint_keeps_the_vocabulary_by_sglangs_convention(
    target: Qwen3Target, tmp_path: Path
) -> None:
    student = make_pruned_student(target)
    save_eagle3(student, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(len(TOKENS)), TOKENS)
    assert stored["t2d"].shape == (SHAPE.vocabulary,)
    assert torch.equal(stored["t2d"].nonzero().flatten(), TOKENS)
    back = load_eagle3(tmp_path, student.embedding)
    assert back.shape == student.shape
    assert back.tokens is not None
    assert torch.equal(back.tokens, TOKENS)
    # Many published ones hold an embedding, in whose place SGLang puts the target's.
    save_file(stored | {"embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert torch.equal(load_eagle3(tmp_path, student.embedding).embedding, student.embedding)
    save_file(stored | {"d2t": stored["d2t"] + 20}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedDrafterError, match="names tokens that the target's 40 do not"):
        load_eagle3(tmp_path, student.embedding)


def test_versions_keep_the_vocabulary_and_know_drafters_apart_by_it(
    target: Qwen3Target, tmp_path: Path
) -> None:
    student, versions = make_pruned_student(target), Versions(tmp_path)
    versions.adopt_base(student.shape, parameters(student), student.borrowed)
    versions.publish(parameters(student), VersionOrigin(0, 0.1, 0.2, 0.1, 1, 1.0))
    for number in (0, 1):
        back = versions.load_student(number)
        assert isinstance(back, Eagle3Student)
        assert back.shape == student.shape
        assert back.tokens is not None
        assert torch.equal(back.tokens, TOKENS)
    others = student.borrowed._replace(tokens=TOKENS.flip(0))
    with pytest.raises(VersionError, match="another drafter"):
        versions.adopt_base(student.shape, parameters(student), others)


def test_shapes_survive_and_wrong_ones_are_refused(target: Qwen3Target) -> None:
    student = make_pruned_student(target)
    assert decode_shape(encode_shape(student.shape)) == student.shape
    with pytest.raises(ValueError, match="40 tokens are given for a draft vocabulary of 30"):
        make_live_student(student.shape, student.borrowed._replace(tokens=None))
    with pytest.raises(ValueError, match=r"must be in \[1, 40\]"):
        replace(student.shape, draft_vocabulary=41)
    with pytest.raises(ValueError, match="needs its own head"):
        replace(student.shape, own_head=False)


def test_it_starts_from_the_rows_of_the_targets_head(target: Qwen3Target) -> None:
    student = with_draft_vocabulary(make_student(target), TOKENS)
    head, norm = torch.randn(SHAPE.vocabulary, SHAPE.hidden), torch.randn(SHAPE.hidden)
    student.initialise_from_target(head, norm)
    assert student.lm_head is not None
    assert torch.equal(student.lm_head.weight, head[TOKENS])

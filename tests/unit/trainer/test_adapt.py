"""Training on signals, and the acceptance that is expected of a drafter on them."""

from dataclasses import replace

import pytest
import torch

from engine_shim.sglang.training.dflash import DFlashStudent
from engine_shim.sglang.training.online import NotFiniteError
from engine_shim.sglang.training.signals import Signal
from engine_shim.sglang.training.students import DraftStudent
from lab.cpu_engine.models.targets import Qwen3Target
from tests.support.training_rounds import (
    SHAPE,
    make_block_student,
    make_signal,
    make_student,
    make_target,
)
from trainer import adapt
from trainer.adapt import (
    AdaptSettings,
    acceptance_rate,
    fine_tune,
    served_acceptance,
    split_signals,
)

DEPTH = 3
LENGTH = 48


@pytest.fixture(scope="module")
def target() -> Qwen3Target:
    return make_target()


@pytest.fixture(params=[make_student, make_block_student], ids=["eagle3", "dflash"])
def student(request: pytest.FixtureRequest, target: Qwen3Target) -> DraftStudent:
    draft_student: DraftStudent = request.param(target)
    return draft_student


def test_every_so_many_th_is_held_out(target: Qwen3Target):
    signals = [make_signal(target, seed, 8) for seed in range(11)]
    train, held = split_signals(signals, 5)
    assert held == [signals[4], signals[9]]
    assert train == [one for one in signals if one is not signals[4] and one is not signals[9]]
    assert [len(part) for part in split_signals(signals[:2], 5)] == [1, 1]
    with pytest.raises(ValueError, match="cannot be split"):
        split_signals(signals[:1], 5)


def test_the_rate_in_service_is_that_of_all_drafts(target: Qwen3Target):
    one = make_signal(target, 1, 8)
    assert served_acceptance([one, replace(one, accepted=0, tried=4)]) == pytest.approx(0.3)
    assert served_acceptance([replace(one, accepted=0, tried=0)]) is None


def with_prompt(signal: Signal, context: int, start: int = 0) -> Signal:
    """The same with its first positions as those of a prompt."""
    return replace(
        signal,
        top_tokens=signal.top_tokens[context:],
        top_logs=signal.top_logs[context:],
        context=context,
        start=start,
    )


def by_chains(student: DraftStudent, signal: Signal, depth: int, position: int = 16) -> float:
    """The same, as a server goes: one greedy chain after the other."""
    accepted = tried = 0
    while position + depth + 1 < len(signal.tokens):
        features, tokens = (
            signal.features[None, : position + 1].float(),
            signal.tokens[None, : position + 2],
        )
        if isinstance(student, DFlashStudent):
            drafts = student.greedy_block(features, tokens)[0, :depth]
        else:
            drafts = student.greedy_chain(features, tokens, depth)[0]
        served = signal.tokens[position + 2 : position + 2 + depth]
        run = int((drafts == served).long().cumprod(0).sum())
        accepted += run
        tried += min(run + 1, depth)
        position += run + 1
    return accepted / tried


@pytest.mark.parametrize("seed", range(4))
def test_the_expected_rate_is_that_of_drafting_step_by_step(
    target: Qwen3Target, student: DraftStudent, seed: int
):
    signal = make_signal(target, seed)
    trained = fine_tune(student, [signal], AdaptSettings(passes=40, learning_rate=3e-3))
    expected = by_chains(trained, signal, DEPTH)
    assert expected > 0
    assert acceptance_rate(trained, [signal], DEPTH) == pytest.approx(expected)


# Where not all of the prompt is known, as many positions as elsewhere are passed over.
@pytest.mark.parametrize(
    ("context", "start", "first"), [(4, 0, 3), (30, 0, 29), (4, 7, 16), (30, 7, 29)]
)
def test_behind_a_prompt_the_first_drafts_count(
    target: Qwen3Target, student: DraftStudent, context: int, start: int, first: int
):
    signal = make_signal(target, 1)
    trained = fine_tune(student, [signal], AdaptSettings(passes=15, learning_rate=3e-3))
    # Here other tokens were served than it drafts, so that the first position matters.
    for part in (slice(6, 15), slice(19, 28)):
        signal.tokens[part] = (signal.tokens[part] + 1) % SHAPE.vocabulary
    expected = {position: by_chains(trained, signal, DEPTH, position) for position in (3, 16, 29)}
    assert len(set(expected.values())) == 3
    # Attention sees how far apart positions are, and not where they begin.
    rate = acceptance_rate(trained, [with_prompt(signal, context, start)], DEPTH)
    assert rate == pytest.approx(expected[first])


def test_a_prompt_does_not_teach_unless_it_is_asked_to(target: Qwen3Target, student: DraftStudent):
    one = with_prompt(make_signal(target, 1), 20)

    def weights(signal: Signal, **settings: bool) -> torch.Tensor:
        tuned_student = fine_tune(student, [signal], AdaptSettings(passes=2, **settings))
        return torch.cat([part.detach().flatten() for part in tuned_student.parameters()])

    assert not torch.equal(weights(one), weights(one, teach_prompts=True))
    round_ = adapt._make_round([one], torch.device("cpu"), teach_prompts=False)
    assert round_.has_target[0].tolist() == [False] * 20 + [True] * 28
    assert torch.equal(round_.top_tokens[0, 20:].int(), one.top_tokens)
    taught = adapt._make_round([one], torch.device("cpu"), teach_prompts=True)
    assert taught.has_target.all()
    assert torch.equal(taught.top_tokens[0, :20, 0], one.tokens[1:21])
    assert torch.equal(taught.top_logs[0, :20].exp().sum(-1), torch.ones(20))


def test_a_signal_too_short_to_draft_on_counts_nothing(target: Qwen3Target, student: DraftStudent):
    assert acceptance_rate(student, [make_signal(target, 1, DEPTH + 1)], DEPTH) == 0


def test_training_raises_what_held_out_signals_accept_and_leaves_the_old_one(
    target: Qwen3Target, student: DraftStudent
):
    signals = [make_signal(target, seed, LENGTH - seed % 7) for seed in range(30)]
    train, held = split_signals(signals, 5)
    before = {name: part.clone() for name, part in student.named_parameters()}
    progress: list[tuple[float, float]] = []
    tuned_student = fine_tune(
        student,
        train,
        AdaptSettings(passes=20, batch=6, learning_rate=3e-3),
        lambda *update: progress.append(update),
    )
    assert acceptance_rate(tuned_student, held, DEPTH) > acceptance_rate(student, held, DEPTH) + 0.1
    assert all(torch.equal(part, before[name]) for name, part in student.named_parameters())
    assert [share for share, _ in progress] == pytest.approx([(k + 1) / 80 for k in range(80)])
    assert progress[-1][1] < progress[0][1]


def test_the_same_seed_makes_the_same_drafter(target: Qwen3Target, student: DraftStudent):
    signals = [make_signal(target, seed) for seed in range(6)]

    def train_weights(seed: int) -> torch.Tensor:
        tuned_student = fine_tune(student, signals, AdaptSettings(passes=2, batch=2, seed=seed))
        return torch.cat([part.detach().flatten() for part in tuned_student.parameters()])

    assert torch.equal(train_weights(3), train_weights(3))
    assert not torch.equal(train_weights(3), train_weights(4))


def test_numbers_that_are_none_end_the_training(target: Qwen3Target, student: DraftStudent):
    broken = make_signal(target, 1)
    broken.features[5, 0] = float("nan")
    with pytest.raises(NotFiniteError):
        fine_tune(student, [make_signal(target, 2), broken], AdaptSettings())


@pytest.mark.parametrize(
    "fields", [{"passes": 0}, {"batch": 0}, {"depth": 0}, {"held_out": 1}, {"learning_rate": 0.0}]
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, float]):
    with pytest.raises(ValueError, match=r"start|must"):
        AdaptSettings(**fields)  # type: ignore[arg-type]


def test_a_block_is_trained_whole_and_drafts_no_more_than_it_has(target: Qwen3Target):
    block, signal = make_block_student(target, block=5), make_signal(target, 3)
    tuned_student = fine_tune(block, [signal], AdaptSettings(passes=2, depth=9))
    assert acceptance_rate(tuned_student, [signal], 9) == acceptance_rate(
        tuned_student, [signal], 4
    )

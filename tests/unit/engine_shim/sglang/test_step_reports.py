"""What one decode step becomes as a report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from controller.core.clock import VirtualClock
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.sglang import step_reports
from engine_shim.sglang.eager_passes import NO_PASSES, EagerPasses, Passes
from engine_shim.sglang.learning.verified_step import UpdateStatus
from engine_shim.sglang.step_reports import (
    LaunchedStep,
    StepReporter,
    delivered_token_counts,
    discarded_rows,
    kv_tokens_at_launch,
    kv_tokens_before,
)
from speculation.v1.engine_pb2 import StepReport
from tests.support.step_reports import class_counts, fill_report, group, proposals


@dataclass
class RecordingLink:
    reports: list[StepReport] = field(default_factory=list)
    plan_follower: Any = field(default_factory=lambda: SimpleNamespace(drafter_names=("eagle3",)))

    def report(self, fill: Callable[[StepReport], None]) -> bool:
        self.reports.append(fill_report(fill))
        return True


def choice(
    gamma: int, *, epoch: int = 1, probe_id: int = 0, source: Source = Source.PLAN
) -> StepChoice:
    return StepChoice(0, gamma, False, epoch, probe_id, source, 7)


def result(gamma: int, accept_lens: list[int], *, graph: bool = False) -> Any:
    return SimpleNamespace(
        speculative_num_draft_tokens=gamma + 1,
        num_correct_drafts_per_req_cpu=[length - 1 for length in accept_lens],
        can_run_cuda_graph=graph,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    virtual_clock = VirtualClock()
    monkeypatch.setattr(step_reports, "perf_counter", virtual_clock.now)
    return virtual_clock


def tap(graph_batch_sizes: tuple[int, ...] = ()) -> tuple[StepReporter, RecordingLink]:
    link = RecordingLink()
    eager = EagerPasses(Passes.VERIFICATION | Passes.DRAFT if graph_batch_sizes else NO_PASSES)
    return StepReporter(link, graph_batch_sizes, eager), link  # type: ignore[arg-type]


def _now() -> float:
    """By the clock that launches are given."""
    return LaunchedStep(choice(0), None, None).start_time


def settle_launch(steps: StepReporter, launch: LaunchedStep, forward_result: Any) -> None:
    """Reads a result now, of which the answers take everything."""
    launch.read_at = _now()
    kept = [accepted + 1 for accepted in forward_result.num_correct_drafts_per_req_cpu]
    steps.report_step(launch, forward_result, kept)


def settle(
    steps: StepReporter,
    iteration: int | None,
    gamma: int,
    accept_lens: list[int],
    *,
    graph: bool = False,
    asleep: bool = False,
    source: Source = Source.PLAN,
) -> None:
    launch = LaunchedStep(choice(gamma, source=source), iteration, 10)
    launch.asleep = asleep
    settle_launch(steps, launch, result(gamma, accept_lens, graph=graph))


@given(st.integers(0, 7).flatmap(lambda g: st.tuples(st.just(g), st.lists(st.integers(1, g + 1)))))
def test_the_histogram_counts_every_row_once_without_the_bonus_token(
    step: tuple[int, list[int]],
) -> None:
    gamma, accept_lens = step
    steps, link = tap()
    settle(steps, 1, gamma, accept_lens)
    report = link.reports[0]
    assert len(report.accepted_counts) == gamma + 1
    assert sum(report.accepted_counts) == report.batch_size == len(accept_lens)
    accepted = sum(k * count for k, count in enumerate(report.accepted_counts))
    assert accepted == sum(accept_lens) - len(accept_lens)


def test_the_gamma_that_ran_is_reported_not_the_one_that_was_chosen() -> None:
    steps, link = tap()
    settle_launch(steps, LaunchedStep(choice(5), 1, 10), result(3, [4, 1]))
    assert link.reports[0].gamma == 3
    assert link.reports[0].accepted_counts == [1, 0, 0, 1]


def test_consecutive_steps_are_timed_from_end_to_end(clock: VirtualClock) -> None:
    steps, link = tap()
    settle(steps, 1, 3, [1])
    clock.advance(0.02)
    settle(steps, 2, 3, [1])
    assert link.reports[1].step_seconds == pytest.approx(0.02)
    assert not link.reports[1].flags.after_gap


@pytest.mark.parametrize("iteration", [3, None])
def test_a_forward_in_between_is_a_gap_timed_from_the_launch(
    iteration: int | None, clock: VirtualClock
) -> None:
    steps, link = tap()
    settle(steps, 1, 3, [1])
    clock.advance(0.05)
    launch = LaunchedStep(choice(3), iteration, 10)
    clock.advance(0.01)
    settle_launch(steps, launch, result(3, [1]))
    assert link.reports[1].flags.after_gap
    assert link.reports[1].step_seconds == pytest.approx(0.01)


def test_the_first_step_is_after_a_gap_and_does_not_count_as_a_switch() -> None:
    steps, link = tap()
    settle(steps, 1, 3, [1])
    assert link.reports[0].flags.after_gap
    assert not link.reports[0].flags.switched


def test_first_use_is_flagged_once_for_each_gamma_and_batch_size() -> None:
    steps, link = tap()
    for iteration, (gamma, rows) in enumerate([(3, 1), (3, 1), (3, 2), (1, 1), (3, 2)]):
        settle(steps, iteration, gamma, [1] * rows)
    assert [r.flags.first_use for r in link.reports] == [True, False, True, True, False]


def test_batch_sizes_that_share_a_graph_share_its_first_use() -> None:
    steps, link = tap((1, 4, 8))
    for iteration, rows in enumerate([2, 3, 4, 5, 9, 9]):
        settle(steps, iteration, 3, [1] * rows, graph=rows <= 8)
    assert [r.flags.first_use for r in link.reports] == [
        True, False, False, True, True, False,
    ]  # fmt: skip


def test_a_change_of_gamma_or_of_sleep_is_a_switch() -> None:
    steps, link = tap()
    for iteration, (gamma, asleep) in enumerate(
        [(3, False), (3, False), (0, False), (0, True), (0, True), (3, False)]
    ):
        settle(steps, iteration, gamma, [1], asleep=asleep)
    switched = [r.flags.switched for r in link.reports]
    assert switched == [False, False, True, True, False, True]


def test_a_step_without_a_valid_plan_is_unsteered() -> None:
    steps, link = tap()
    for iteration, source in enumerate(Source):
        settle(steps, iteration, 3, [1], source=source)
    unsteered = {s: r.flags.unsteered for s, r in zip(Source, link.reports, strict=True)}
    assert unsteered == {Source.PLAN: False, Source.GRACE: True, Source.SAFE_DEFAULT: True}


def test_a_step_outside_the_graphs_is_flagged_only_when_there_are_graphs() -> None:
    with_graphs, link = tap((1, 2))
    settle(with_graphs, 1, 3, [1], graph=True)
    settle(with_graphs, 2, 3, [1], graph=False)
    assert [r.flags.eager_fallback for r in link.reports] == [False, True]
    eager_steps, link = tap()
    settle(eager_steps, 1, 3, [1], graph=False)
    assert not link.reports[0].flags.eager_fallback


@pytest.mark.parametrize(("eager", "flagged"), [(Passes.DRAFT, True), (Passes.DRAFT_EXTEND, False)])
def test_a_drafters_pass_outside_its_graphs_is_flagged(eager: Passes, *, flagged: bool) -> None:
    steps, link = tap((1, 2))
    launch = LaunchedStep(choice(3), 1, 10)
    launch.eager = eager
    settle_launch(steps, launch, result(3, [1], graph=True))
    assert link.reports[0].flags.eager_fallback == flagged


def test_with_overlapped_steps_each_report_has_the_facts_of_its_own_launch() -> None:
    steps, link = tap()
    first = LaunchedStep(choice(3, epoch=4, probe_id=9), 1, 100)
    second = LaunchedStep(choice(1, epoch=5), 2, 101)
    settle_launch(steps, first, result(3, [2]))
    settle_launch(steps, second, result(1, [2]))
    seen = [(r.step, r.gamma, r.plan_epoch, r.probe_id, r.kv_tokens) for r in link.reports]
    assert seen == [(1, 3, 4, 9, 100), (2, 1, 5, 0, 101)]
    assert all(r.plan_session == 7 for r in link.reports)


@pytest.mark.parametrize(
    ("largest", "sizes", "flagged"),
    [(2, (), False), (3, (), True), (0, (), False), (4, (1, 4, 8), False), (5, (1, 4, 8), True)],
)
def test_a_step_as_long_as_another_ranks_larger_batch_has_no_seconds_of_its_own(
    largest: int, sizes: tuple[int, ...], flagged: bool
) -> None:
    steps, link = tap(sizes)
    settle(steps, 1, 3, [1, 1])
    settle_launch(steps, LaunchedStep(choice(3), 2, 10, largest), result(3, [1, 1]))
    assert link.reports[-1].flags.after_gap is flagged


def test_context_lengths_before_a_step_follow_from_what_it_gave() -> None:
    running, ended, left = (
        SimpleNamespace(
            kv=SimpleNamespace(kv_committed_len=n), finished_reason=finish_reason, is_retracted=r
        )
        for n, finish_reason, r in ((11, None, False), (6, "stop", False), (5, None, True))
    )
    assert kv_tokens_before([running], [[1, 2, 3, 4]]) == 7
    # With the overlap schedule, such requests may be in a step that gives them nothing.
    assert kv_tokens_before([running, ended, left], [[1, 2, 3, 4], [5], [6]]) == 7 + 6 + 5


def test_context_lengths_come_from_the_cpu_where_it_has_them() -> None:
    cpu = torch.tensor([3, 4])
    assert kv_tokens_at_launch(SimpleNamespace(seq_lens_sum=9, seq_lens_cpu=cpu)) == 9
    assert kv_tokens_at_launch(SimpleNamespace(seq_lens_sum=None, seq_lens_cpu=cpu)) == 7
    assert kv_tokens_at_launch(SimpleNamespace(seq_lens_sum=None, seq_lens_cpu=None)) is None


def row(output: int, ends_at: int | None = None, *, ended: bool = False) -> Any:
    """A request with a number of output tokens, and where its answer ends, if it does."""
    reason = "stop" if ended or ends_at is not None else None
    return SimpleNamespace(
        output_ids=[0] * output, finished_len=ends_at, finished_reason=reason, is_retracted=False
    )


def test_answers_take_what_lies_before_their_ends_only() -> None:
    requests = [row(10), row(10, 8), row(10, 10), row(9, 9, ended=True), row(12, ended=True)]
    assert discarded_rows(requests) == [1, 2, 3, 4]
    launch = LaunchedStep(choice(3), 1, 10)
    launch.tokens = [[1] * 4, [1] * 4, [1] * 4, [1] * 4, [1] * 2]
    # The fourth had ended before; a grammar has cut the last, and ended it.
    launch.discarded_rows = [3]
    assert delivered_token_counts(launch, requests) == [4, 2, 4, 0, 2]


def test_rows_that_were_cut_show_what_their_answers_took_and_no_rejection() -> None:
    steps, link = tap()
    launch = LaunchedStep(choice(5), 1, 10)
    launch.labels = ["a", "a", "b", "b"]
    # Accepted 1, 4, 5 and 2 of 5; the second's answer took 2 tokens, the third's 5.
    steps.report_step(launch, result(5, [2, 5, 6, 3]), [2, 2, 5, 3])
    (report,) = link.reports
    assert report.accepted_counts == [0, 1, 1, 0, 1, 1]
    assert not report.groups
    assert report.delivered_tokens == 12
    (own,) = report.proposals
    assert own == proposals("eagle3", [0, 1, 1, 0, 0, 1], [0, 0, 1, 0, 0])
    assert list(report.classes) == [
        class_counts("a", [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0]),
        class_counts("b", [0, 0, 1, 0, 0, 1]),
    ]


def test_rows_whose_requests_had_ended_are_a_group_that_shows_nothing() -> None:
    steps, link = tap()
    launch = LaunchedStep(choice(3), 1, 10)
    launch.discarded_rows, launch.undrafted_rows, launch.labels = [1, 2], [2, 3], ["a", "a", "", ""]
    steps.report_step(launch, result(3, [3, 4, 1, 1]), [3, 0, 0, 1])
    (report,) = link.reports
    assert report.accepted_counts == [3, 0, 1, 0]
    assert list(report.groups) == [
        group("eagle3", [0, 0, 1, 0]),
        group("", [1]),
        group("eagle3", [2], ended=True),
    ]
    assert (len(report.proposals), report.delivered_tokens) == (0, 4)
    assert list(report.classes) == [class_counts("a", [0, 0, 1, 0])]


def test_a_step_without_drafts_is_never_cut() -> None:
    steps, link = tap()
    settle(steps, 1, 0, [1, 1])
    (report,) = link.reports
    assert (len(report.groups), len(report.proposals), report.delivered_tokens) == (0, 0, 2)


@pytest.mark.parametrize("learnt_from", [None, 0, 2])
def test_weights_learnt_online_are_said_to_be_learnt(learnt_from: int | None) -> None:
    steps, link = tap()
    launch = LaunchedStep(choice(3), 1, 10)
    launch.update_status = UpdateStatus(True, True, 0.25, 3, learnt_from)
    settle_launch(steps, launch, result(3, [1]))
    (report,) = link.reports
    assert (report.flags.updating, report.flags.drafter_reset) == (True, True)
    assert (report.update_seconds, report.draft_version) == (0.25, 3)
    assert report.HasField("learnt_from") == (learnt_from is not None)
    assert report.learnt_from == (learnt_from or 0)


@pytest.mark.parametrize("tokens", [None, 0, 700])
def test_prompts_that_wait_are_reported_where_they_are_counted(tokens: int | None) -> None:
    link = RecordingLink()
    waiting: Any = None if tokens is None else SimpleNamespace(count=lambda: tokens)
    settle(StepReporter(link, waiting_prompts=waiting), 1, 3, [1])  # type: ignore[arg-type]
    (report,) = link.reports
    assert report.HasField("waiting_prompt_tokens") == (tokens is not None)
    assert report.waiting_prompt_tokens == (tokens or 0)

"""Reports each decode step.

A step is read when SGLang has its tokens on the CPU.  It is reported after SGLang has processed
them, because only then is it known which answers have ended, and where.

The facts of a step come from its launch (the choice, the batch size) and from its result (the
draft length that ran, the accepted drafts, the time of its end).  With SGLang's overlap schedule
the next step is launched before the result of this one is read, so the launch is attached to the
result object.

step_seconds runs from the time when the previous decode step's result was read to the time when
this one's was read.  If another forward (a prefill) or an idle time lies between, it runs from this
step's own launch and is flagged AFTER_GAP.  With data-parallel attention, a step that took as long
as a larger batch of another rank has that flag as well: its acceptance counts, and its seconds do
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine_shim.common.arm_history import ArmHistory
from engine_shim.common.row_groups import DraftEvidence, add_classes, add_remaining_groups
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.sglang.drafters.row_counts import NO_CUT_ROWS
from engine_shim.sglang.eager_passes import NO_PASSES, EagerPasses, Passes
from engine_shim.sglang.learning.verified_step import NO_UPDATE, UpdateStatus
from speculation.v1.engine_pb2 import StepReport

if TYPE_CHECKING:
    from engine_shim.common.waiting_prompts import WaitingPrompts
    from engine_shim.link.engine_link import EngineLink
    from engine_shim.sglang.drafters.row_drafting import RowDrafting
    from engine_shim.sglang.drafters.sleep_backlog import BacklogStep


class LaunchedStep:
    """A decode step that was launched.

    `forward_iter`: SGLang's counter of forwards, prefills included.  `kv_tokens`: sum of context
    lengths before the step; None until the requests have been read.  `largest_batch`: sequences of
    the rank with the largest batch, 0 where ranks share one batch.  `start_time`, and `read_at` of
    its result: perf_counter seconds.  `tokens`: what the step gives each row, cut only by a
    grammar; `discarded_rows`: rows of requests that had ended or been retracted when the result was
    read. `update_status`: of the drafter's online updates.  `eager`: the drafters' passes that ran
    without a graph.  `is_read_back`: whether the scheduler has counted what the step accepted.
    `is_catching_up`: the planned drafter is waking up and drafts from the next step on.
    `backlog_step`: the step as the sleeping drafter's backlog holds it, whose accepted counts the
    host has not read yet; None if no drafter slept.  `undrafted_rows`: rows that must not be
    drafted for. `labels`: class of each row; empty if no row has a class.
    """

    __slots__ = (
        "asleep",
        "backlog_step",
        "choice",
        "discarded_rows",
        "eager",
        "forward_iter",
        "is_catching_up",
        "is_read_back",
        "kv_tokens",
        "labels",
        "largest_batch",
        "read_at",
        "start_time",
        "tokens",
        "undrafted_rows",
        "update_status",
    )  # fmt: skip

    def __init__(
        self,
        choice: StepChoice,
        forward_iter: int | None,
        kv_tokens: int | None,
        largest_batch: int = 0,
    ) -> None:
        self.choice = choice
        self.forward_iter = forward_iter
        self.kv_tokens = kv_tokens
        self.largest_batch = largest_batch
        self.asleep = self.is_catching_up = self.is_read_back = False
        self.backlog_step: BacklogStep | None = None
        self.undrafted_rows: list[int] = []
        self.labels: list[str] = []
        self.discarded_rows: list[int] = []
        self.tokens: list[list[int]] = []
        self.read_at = 0.0
        self.update_status = NO_UPDATE
        self.eager = NO_PASSES
        self.start_time = perf_counter()


def kv_tokens_at_launch(batch: Any) -> int | None:
    """Returns the sum of context lengths; None if only the device has it."""
    if batch.seq_lens_sum is not None:
        return int(batch.seq_lens_sum)
    if batch.seq_lens_cpu is not None:
        return int(batch.seq_lens_cpu.sum())
    return None


def discarded_rows(requests: list[Any]) -> list[int]:
    """Returns the rows whose tokens SGLang discards.

    With the overlap schedule, a request can end while its next step is running.
    """
    return [
        row
        for row, request in enumerate(requests)
        if request.finished_reason is not None or request.is_retracted
    ]


def delivered_token_counts(launch: LaunchedStep, requests: list[Any]) -> list[int]:
    """Returns how many tokens of a step each answer has taken, after SGLang has processed it."""
    delivered_counts = [*map(len, launch.tokens)]
    for row, request in enumerate(requests):
        if request.finished_reason is not None and request.finished_len is not None:
            delivered_counts[row] = max(
                0, delivered_counts[row] - max(0, len(request.output_ids) - request.finished_len)
            )
    for row in launch.discarded_rows:
        delivered_counts[row] = 0
    return delivered_counts


def unread_prompt_tokens(request: Any) -> int:
    """Returns the prompt length of a waiting request; 0 if it was read and then retracted."""
    return 0 if request.output_ids else len(request.origin_input_ids)


def kv_tokens_before(requests: list[Any], tokens: list[list[int]]) -> int:
    """Returns the sum of context lengths before a step, after SGLang has counted its result.

    tokens: what the step gave each request; those that had ended or been retracted got nothing.
    """
    return sum([
        request.kv.kv_committed_len
        if request.finished_reason is not None or request.is_retracted
        else request.kv.kv_committed_len - len(new)
        for request, new in zip(requests, tokens, strict=True)
    ])  # fmt: skip


class StepReporter:
    """Turns launches and results into reports.

    `graph_batch_sizes`: ascending; batches are padded up to the next one, and a larger batch runs
    eagerly.  Empty: the engine has no graphs.  `eager`: counts the passes without a graph.
    `row_drafting`: knows which drafter each row used.  `waiting_prompts`: counts the tokens of
    waiting prompts; None on a server that reads no prompts.
    """

    def __init__(
        self, link: EngineLink, graph_batch_sizes: tuple[int, ...] = (),
        eager: EagerPasses | None = None, row_drafting: RowDrafting | None = None,
        waiting_prompts: WaitingPrompts | None = None,
    ) -> None:  # fmt: skip
        self._link = link
        self._drafter_names = link.plan_follower.drafter_names
        self._row_drafting = row_drafting
        self._waiting_prompts = waiting_prompts
        self._eager = eager or EagerPasses()
        self._has_graphs = bool(graph_batch_sizes)
        self._arms_run = ArmHistory(graph_batch_sizes)
        self._step_number = 0
        self._last_iteration: int | None = None
        self._last_read_at = 0.0

    def report_step(self, launch: LaunchedStep, result: Any, delivered_counts: list[int]) -> None:
        """Reports a step whose result SGLang has processed.

        delivered_counts: tokens that each answer has taken of it (`delivered_token_counts`).
        """
        self._link.report(lambda report: self._fill(report, launch, result, delivered_counts))

    def _fill(
        self, report: StepReport, launch: LaunchedStep, result: Any, delivered_counts: list[int]
    ) -> None:
        gamma: int = result.speculative_num_draft_tokens - 1
        accepted: list[int] = result.num_correct_drafts_per_req_cpu
        batch_size, delivered = len(accepted), sum(delivered_counts)
        choice, cut_row_tokens, labels = launch.choice, NO_CUT_ROWS, launch.labels
        self._step_number += 1
        report.step = self._step_number
        report.batch_size = batch_size
        report.kv_tokens = launch.kv_tokens or 0
        report.drafter = self._drafter_names[choice.drafter_index]
        report.gamma = gamma
        report.delivered_tokens = delivered
        if self._waiting_prompts is not None:
            report.waiting_prompt_tokens = self._waiting_prompts.count()
        if delivered < sum(accepted) + batch_size:
            cut_row_tokens = {
                row: tokens
                for row, tokens in enumerate(delivered_counts)
                if tokens <= accepted[row] and row not in launch.discarded_rows
            }
        if (
            self._row_drafting is not None
            or launch.undrafted_rows
            or launch.discarded_rows
            or cut_row_tokens
        ):
            accepted = self._add_row_groups(report, launch, result, cut_row_tokens)
            if launch.discarded_rows and labels:
                labels = [
                    "" if row in launch.discarded_rows else label
                    for row, label in enumerate(labels)
                ]
        counts = [0] * (gamma + 1)
        for length in accepted:
            counts[length] += 1
        report.accepted_counts.extend(counts)
        if labels:
            add_classes(report, labels, accepted, cut_row_tokens, gamma)
        seconds, is_gap = self._measure_step(launch, batch_size)
        report.step_seconds = seconds
        if choice.epoch:
            report.plan_epoch = choice.epoch
            report.plan_session = choice.session
        if choice.probe_id:
            report.probe_id = choice.probe_id
        self._set_flags(report, launch, result, is_gap=is_gap)
        if launch.update_status is not NO_UPDATE:
            _add_update_status(report, launch.update_status)

    def _set_flags(
        self, report: StepReport, launch: LaunchedStep, result: Any, *, is_gap: bool
    ) -> None:
        """Sets the flags that are true, since a message with flags is larger."""
        choice = launch.choice
        if is_gap:
            report.flags.after_gap = True
        executed_arm = (choice.drafter_index, report.gamma, launch.asleep, report.batch_size)
        if executed_arm != self._arms_run.last_arm:
            self._arms_run.flag_change(executed_arm, report)
        if choice.source is not Source.PLAN:
            report.flags.unsteered = True
        eager = launch.eager
        if self._has_graphs and not result.can_run_cuda_graph:
            eager |= Passes.VERIFICATION
        if eager and self._eager.count(eager):
            report.flags.eager_fallback = True

    def _measure_step(self, launch: LaunchedStep, batch_size: int) -> tuple[float, bool]:
        """Returns the seconds of a step, and whether they are not the cost of its shape."""
        iteration, last_iteration = launch.forward_iter, self._last_iteration
        is_gap = iteration is None or last_iteration is None or iteration != last_iteration + 1
        seconds = launch.read_at - (launch.start_time if is_gap else self._last_read_at)
        self._last_iteration, self._last_read_at = iteration, launch.read_at
        largest_batch, padded = launch.largest_batch, self._arms_run.padded_batch_size
        if largest_batch > batch_size and padded(largest_batch) > padded(batch_size):
            # The step took as long as another rank's larger batch.
            is_gap = True
        return seconds, is_gap

    def _add_row_groups(
        self,
        report: StepReport,
        launch: LaunchedStep,
        result: Any,
        cut_row_tokens: Mapping[int, int],
    ) -> list[int]:
        """Adds counts of rows that differ in what was verified.

        cut_row_tokens: tokens that the answers took, for rows that were cut at the end of an
        answer.  Returns accepted drafts by row, 0 for rows that do not count.
        """
        accepted: list[int] = result.num_correct_drafts_per_req_cpu
        discarded_rows, drafter_index, gamma = (
            launch.discarded_rows,
            launch.choice.drafter_index,
            report.gamma,
        )
        undrafted = [row for row in launch.undrafted_rows if row not in discarded_rows]
        excluded_rows = {*undrafted, *discarded_rows}
        if excluded_rows:
            accepted = accepted.copy()
            for row in excluded_rows:
                accepted[row] = 0
        main_index = drafter_index
        if self._row_drafting is not None:
            self._row_drafting.add_counts(
                report, result, accepted, excluded_rows, cut_row_tokens, drafter_index
            )
            main_index = self._row_drafting.main_drafter_index(drafter_index)
        if excluded_rows:
            main_name = self._drafter_names[main_index if gamma else 0]
            add_remaining_groups(report, undrafted, discarded_rows, main_name, accepted, gamma)
        # A lookup that drafts alone has already added its evidence as proposals.
        if (
            cut_row_tokens
            and gamma
            and all(entry.drafter != report.drafter for entry in report.proposals)
        ):
            evidence = DraftEvidence(gamma)
            for row, length in enumerate(accepted):
                if row not in excluded_rows:
                    compared_drafts = cut_row_tokens.get(row, gamma)
                    evidence.add(min(length, compared_drafts), compared_drafts)
            evidence.add_to_report(report, report.drafter)
        return accepted


def _add_update_status(report: StepReport, status: UpdateStatus) -> None:
    """Adds the status of online updates of the drafter that served the step."""
    if status.updating:
        report.flags.updating = True
    if status.reset:
        report.flags.drafter_reset = True
    report.update_seconds = status.seconds
    report.draft_version = status.version
    if status.learnt_from is not None:
        report.learnt_from = status.learnt_from

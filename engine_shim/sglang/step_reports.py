"""Reports each decode step.

It is read when SGLang has the step's tokens on the CPU, and reported when SGLang has worked them
in: only then is it known which answers have ended, and where.

A step is known from its launch (what was decided, how large the batch was) and from its result
(what really ran, what was accepted, when it ended).  With SGLang's overlap schedule the next step
is launched before this one's result is read, so the launch's facts travel on the result object.

step_seconds runs from the reading of the previous decode step's result to that of this one's.
Where another forward (a prefill) or an idle time lies between, it runs from this step's own launch
and is flagged AFTER_GAP.  So is a step that took as long as a larger batch of another rank, with
data-parallel attention: what it accepted counts, and its seconds do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine_shim.common.arms_run import ArmsRun
from engine_shim.common.row_groups import Evidence, classes_of, groups_with
from engine_shim.link.packets import (
    AFTER_GAP,
    DRAFTER_RESET,
    EAGER_FALLBACK,
    UNSTEERED,
    UPDATING,
    ProposalsEntry,
    ReportPacket,
)
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.sglang.drafters.row_counts import NOT_CUT, NOTHING_APART, RowCounts
from engine_shim.sglang.eager_passes import NO_PASSES, EagerPasses, Passes
from engine_shim.sglang.learning.verified_step import NO_UPDATE

if TYPE_CHECKING:
    from engine_shim.link.engine_link import EngineLink
    from engine_shim.sglang.drafters.idle_kv_buffer import BacklogStep
    from engine_shim.sglang.drafters.row_drafting import RowDrafting


class Launch:
    """A decode step that was launched.

    `forward_iter`: SGLang's counter of forwards, prefills included.  `kv_tokens`: sum of context
    lengths before the step; None while only the requests know it.  `largest_batch`: sequences of
    the rank that has most, 0 where ranks share one batch.  `started`, and `read_at` of its result:
    perf_counter seconds.  `tokens`: what it gives each row, which a grammar only has cut; `ended`:
    rows of requests that had ended or left by then.
    `update_status`: of the drafter's online updates.  `eager`: the drafters' passes that ran
    without a graph.  `is_read_back`: whether the scheduler has counted what the step accepted.
    `waits`: the drafter that is wanted will draft from the next step on.
    `slept`: what a drafter slept through, whose counts the host has yet to read, if anything.
    `undrafted`: rows that must not be drafted for.  `labels`: class of each row, or none at all.
    """

    __slots__ = (
        "asleep", "choice", "eager", "ended", "forward_iter", "is_read_back", "kv_tokens", "labels",
        "largest_batch", "read_at", "slept", "started", "tokens", "undrafted", "update_status",
        "waits",
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
        self.asleep = self.waits = self.is_read_back = False
        self.slept: BacklogStep | None = None
        self.undrafted: list[int] = []
        self.labels: list[str] = []
        self.ended: list[int] = []
        self.tokens: list[list[int]] = []
        self.read_at = 0.0
        self.update_status = NO_UPDATE
        self.eager = NO_PASSES
        self.started = perf_counter()


def kv_tokens_at_launch(batch: Any) -> int | None:
    """Sum of context lengths, from what is on the CPU; None when it is on the device only."""
    if batch.seq_lens_sum is not None:
        return int(batch.seq_lens_sum)
    if batch.seq_lens_cpu is not None:
        return int(batch.seq_lens_cpu.sum())
    return None


def ended_rows(requests: list[Any]) -> list[int]:
    """Returns the rows whose tokens SGLang throws away.

    With the overlap schedule, a request can end while its next step is on its way.
    """
    return [
        row
        for row, request in enumerate(requests)
        if request.finished_reason is not None or request.is_retracted
    ]


def kept_tokens(launch: Launch, requests: list[Any]) -> list[int]:
    """Returns how many tokens of a step each answer has taken, once SGLang has worked it in."""
    kept = [*map(len, launch.tokens)]
    for row, request in enumerate(requests):
        if request.finished_reason is not None and request.finished_len is not None:
            kept[row] = max(0, kept[row] - max(0, len(request.output_ids) - request.finished_len))
    for row in launch.ended:
        kept[row] = 0
    return kept


def kv_tokens_before(requests: list[Any], tokens: list[list[int]]) -> int:
    """The same from the requests, once SGLang has counted the step's result.

    tokens: what the step gave each of them; those that had ended or left got nothing.
    """
    return sum([
        request.kv.kv_committed_len
        if request.finished_reason is not None or request.is_retracted
        else request.kv.kv_committed_len - len(new)
        for request, new in zip(requests, tokens, strict=True)
    ])  # fmt: skip


class StepTap:
    """Turns launches and results into reports.

    `graph_batch_sizes`: ascending; batches are padded up to the next one, and a larger batch runs
    eagerly.  Empty: the engine has no graphs.  `eager`: counts the passes without a graph.  `rows`:
    knows which drafter each row used.
    """

    def __init__(
        self, link: EngineLink, graph_batch_sizes: tuple[int, ...] = (),
        eager: EagerPasses | None = None, rows: RowDrafting | None = None,
    ) -> None:  # fmt: skip
        self._link = link
        self._rows = rows
        self._eager = eager or EagerPasses()
        self._has_graphs = bool(graph_batch_sizes)
        self._arms_run = ArmsRun(graph_batch_sizes)
        self._step = 0
        self._last_iter: int | None = None
        self._last_end = 0.0

    def settle(self, launch: Launch, result: Any, kept: list[int]) -> None:
        """Reports a step whose result SGLang has worked in.

        kept: tokens that each answer has taken of it (`kept_tokens`).
        """
        gamma: int = result.speculative_num_draft_tokens - 1
        accepted: list[int] = result.num_correct_drafts_per_req_cpu
        batch_size, delivered = len(accepted), sum(kept)
        apart, cut, labels = NOTHING_APART, NOT_CUT, launch.labels
        if delivered < sum(accepted) + batch_size:
            cut = {
                row: tokens
                for row, tokens in enumerate(kept)
                if tokens <= accepted[row] and row not in launch.ended
            }
        if self._rows is not None or launch.undrafted or launch.ended or cut:
            accepted, apart = self._count_apart(launch, result, gamma, cut)
            if launch.ended and labels:
                labels = ["" if row in launch.ended else label for row, label in enumerate(labels)]
        counts = [0] * (gamma + 1)
        for length in accepted:
            counts[length] += 1
        choice = launch.choice
        seconds, is_gap = self._timed(launch, batch_size)
        flags = AFTER_GAP if is_gap else 0
        ran = (choice.drafter_index, gamma, launch.asleep, batch_size)
        if ran != self._arms_run.last:
            flags |= self._arms_run.change(ran)
        if choice.source is not Source.PLAN:
            flags |= UNSTEERED
        eager = launch.eager
        if self._has_graphs and not result.can_run_cuda_graph:
            eager |= Passes.VERIFICATION
        if eager and self._eager.count(eager):
            flags |= EAGER_FALLBACK
        update_status = launch.update_status
        if update_status is not NO_UPDATE:
            if update_status.updating:
                flags |= UPDATING
            if update_status.reset:
                flags |= DRAFTER_RESET
        self._step += 1
        report = ReportPacket(
            self._step,
            batch_size,
            launch.kv_tokens or 0,
            choice.drafter_index,
            gamma,
            counts,
            seconds,
            flags,
            choice.epoch,
            choice.probe_id,
            choice.session,
            update_status.seconds,
            update_status.version,
            groups=apart.groups,
            proposals=apart.proposals,
            classes=classes_of(labels, accepted, cut, gamma) if labels else (),
            learnt_from=update_status.learnt_from,
            delivered_tokens=delivered,
        )
        self._link.report(report)

    def _timed(self, launch: Launch, batch_size: int) -> tuple[float, bool]:
        """Returns the seconds of a step, and whether they are not those of its shape."""
        iteration, last = launch.forward_iter, self._last_iter
        is_gap = iteration is None or last is None or iteration != last + 1
        seconds = launch.read_at - (launch.started if is_gap else self._last_end)
        self._last_iter, self._last_end = iteration, launch.read_at
        largest, padded = launch.largest_batch, self._arms_run.padded
        if largest > batch_size and padded(largest) > padded(batch_size):
            # Its seconds are those of another rank's batch.
            is_gap = True
        return seconds, is_gap

    def _count_apart(
        self, launch: Launch, result: Any, gamma: int, cut: Mapping[int, int]
    ) -> tuple[list[int], RowCounts]:
        """Returns accepted drafts, none where none count, and counts of rows that are not alike.

        cut: tokens that the answers took of rows that were cut at their end.
        """
        accepted: list[int] = result.num_correct_drafts_per_req_cpu
        ended, index = launch.ended, launch.choice.drafter_index
        undrafted = [row for row in launch.undrafted if row not in ended]
        left = {*undrafted, *ended}
        if left:
            accepted = accepted.copy()
            for row in left:
                accepted[row] = 0
        found, main = NOTHING_APART, index
        if self._rows is not None:
            found = self._rows.counts(result, accepted, left, cut, gamma, index)
            main = self._rows.verified_by(index)
        groups, proposals = found
        if left:
            groups = groups_with(undrafted, ended, groups, main if gamma else 0, accepted, gamma)
        # A lookup that drafts alone has its evidence among its proposals already.
        if cut and gamma and all(entry.drafter_index != index for entry in proposals):
            shows = Evidence(gamma)
            for row, length in enumerate(accepted):
                if row not in left:
                    shown = cut.get(row, gamma)
                    shows.add(min(length, shown), shown)
            proposals = (*proposals, ProposalsEntry(index, 0, shows.exact, shows.censored))
        return accepted, RowCounts(groups, proposals)

"""Reports each decode step.

vLLM drafts at the end of a step, and the next step verifies these drafts.  So a step runs under two
choices: it verifies drafts of an earlier choice, which the report is about, and drafts under its
own choice.  With async scheduling the next step is scheduled before the result of this one is read;
results come in the order of the schedules.

step_seconds runs from the end of the engine's previous step, of any kind, to the end of this one.
Two rows of a step may have been drafted under different choices, if the previous step omitted one
of them.  The report is then about the choice of most rows, and is flagged MIXED_CHOICE.

Drafts count as vLLM counts them: drafts that a grammar has removed, and drafts that a lookup did
not find, were not verified.  The evidence of a row is counted differently (`_compared_drafts`).

No step has the flag EAGER_FALLBACK: the batch and the draft length alone determine whether vLLM has
a graph for a step, so the cost of a step without a graph is a property of its shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple

from engine_shim.common.arm_history import ArmHistory
from engine_shim.common.row_groups import DraftEvidence, add_group
from engine_shim.common.waiting_prompts import WaitingPrompts
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source, StepChoice
from speculation.v1.engine_pb2 import StepReport

# The contract's limit; a step with more groups of rows is not reported.
MAX_GROUPS: Final = 16
# Limit of steps in flight; vLLM has at most two.
_MAX_LAUNCHED_STEPS: Final = 64


class LaunchedStep(NamedTuple):
    """A step that was scheduled.

    output: vLLM's `SchedulerOutput`.  verified_choices: for each request, in the order of `output`,
    the choice under which its verified drafts were made; None for a request's first step.
    context_lengths: context length of each request before the step.  draft_choice: the choice of
    this step; None if no row of it will decode next.  start_time: perf_counter seconds.
    """

    output: Any
    verified_choices: Sequence[StepChoice | None]
    context_lengths: Sequence[int]
    draft_choice: StepChoice | None
    start_time: float


class Row(NamedTuple):
    """A row that decoded and may be drafted for.

    choice: the choice under which it was drafted.  verified_drafts: number of verified drafts.
    accepted: number of accepted drafts.  is_cut: a grammar has removed further drafts.  tokens: the
    row's tokens in the result; vLLM shortens the list to the tokens that the answer takes.
    """

    choice: StepChoice
    verified_drafts: int
    accepted: int
    is_cut: bool
    tokens: list[int]


class StepRows(NamedTuple):
    """The rows of a step that decoded, at its end.

    undrafted_tokens: tokens of the rows that may not be drafted for.  discarded_rows: number of
    rows whose requests ended or were preempted while the step was in flight.  kv_tokens: sum of
    context lengths before the step.  prefill_tokens: of all other rows.
    """

    drafted_rows: Sequence[Row]
    undrafted_tokens: Sequence[list[int]]
    discarded_rows: int
    kv_tokens: int
    prefill_tokens: int


class StepReporter:
    """Turns schedules and results into reports.

    gammas: the draft lengths in the introduction.  may_draft_less: the drafter may propose fewer
    tokens than requested (a lookup without a match).
    is_async: results are read a step later.  waiting_prompts: counts waiting prompts.
    """

    def __init__(
        self,
        link: EngineLink,
        gammas: Collection[int],
        *,
        may_draft_less: bool,
        is_async: bool,
        waiting_prompts: WaitingPrompts | None = None,
    ) -> None:
        self._link = link
        # vLLM has one drafter.
        self._drafter = link.plan_follower.drafter_names[0]
        self._gammas = frozenset(gammas)
        self._may_draft_less = may_draft_less
        self._is_async = is_async
        self._waiting_prompts = waiting_prompts
        self._arm_history = ArmHistory()
        self._launched_steps: deque[LaunchedStep] = deque(maxlen=_MAX_LAUNCHED_STEPS)
        self._step_number = 0
        # Of the engine's last step; 0.0 after a pause.
        self._last_end_time = 0.0
        self._last_prefill_tokens = 0
        # Steps that the contract cannot describe.
        self.skipped_steps = 0

    def add_launched_step(self, launch: LaunchedStep) -> None:
        """Adds a step that waits for its result."""
        self._launched_steps.append(launch)

    def pop_launched_step(self, output: Any) -> LaunchedStep | None:
        """Removes and returns the launched step of a result; None if it is unknown."""
        while self._launched_steps:
            launch = self._launched_steps.popleft()
            if launch.output is output:
                return launch
        return None

    def count_rows(
        self, launch: LaunchedStep, result: Any, requests: Mapping[str, Any], undrafted: set[str]
    ) -> StepRows:
        """Counts the rows of a step, before vLLM processes its result (and cuts it at a stop)."""
        output = launch.output
        tokens, index = result.sampled_token_ids, result.req_id_to_index
        drafts = output.scheduled_spec_decode_tokens
        # Invalid drafts, with async scheduling; vLLM verifies padding in their place.
        forbidden_drafts = getattr(output, "num_invalid_spec_tokens", None) or {}
        drafted_rows: list[Row] = []
        undrafted_tokens: list[list[int]] = []
        discarded_rows = kv_tokens = prefill_tokens = 0
        for (name, scheduled), choice, context_length in zip(
            output.num_scheduled_tokens.items(),
            launch.verified_choices,
            launch.context_lengths,
            strict=True,
        ):
            request = requests.get(name)
            verified_drafts = len(drafts.get(name, ()))
            if request is None or request.is_finished() or _is_dropped(request):
                # Its tokens are discarded.
                if choice is not None and scheduled == verified_drafts + 1:
                    discarded_rows += 1
                    kv_tokens += context_length
                continue
            # A request's first token ends its prompt; one that was preempted reads it again.
            if request.num_output_tokens == 0 or scheduled != verified_drafts + 1 or choice is None:
                prefill_tokens += scheduled
                continue
            row_tokens: list[int] = tokens[index[name]] if tokens else []
            if not row_tokens:
                continue
            kv_tokens += request.num_tokens - 1
            if name in undrafted:
                undrafted_tokens.append(row_tokens)
                continue
            verified_drafts -= forbidden_drafts.get(name, 0)
            is_cut = request.use_structured_output and verified_drafts < choice.gamma
            drafted_rows.append(
                Row(choice, verified_drafts, len(row_tokens) - 1, is_cut, row_tokens)
            )
        return StepRows(drafted_rows, undrafted_tokens, discarded_rows, kv_tokens, prefill_tokens)

    def report_step(self, launch: LaunchedStep, rows: StepRows) -> None:
        """Reports a step whose result vLLM has processed."""
        now = perf_counter()
        last_end_time, self._last_end_time = self._last_end_time, now
        if _was_paused(launch, last_end_time, now):
            last_end_time = 0.0
        last_prefill_tokens, self._last_prefill_tokens = (
            self._last_prefill_tokens,
            rows.prefill_tokens,
        )
        if launch.output.total_num_scheduled_tokens == 0:
            self._last_end_time = 0.0  # no request could run, so the next interval is unknown
            return
        if not rows.drafted_rows and not rows.undrafted_tokens:
            return
        batch_size = len(rows.drafted_rows) + len(rows.undrafted_tokens) + rows.discarded_rows
        by_width = _counts_by_width(rows.drafted_rows)
        gamma = max((self._requested_gamma(row) for row in rows.drafted_rows), default=0)
        # At the longest sequence, all rows may have been cut to a length that is not an arm.
        group_count = len(by_width) + bool(rows.undrafted_tokens) + bool(rows.discarded_rows)
        if group_count > MAX_GROUPS or gamma not in self._gammas:
            self.skipped_steps += 1
            return
        # With async scheduling, the drafting after a long prompt is part of this step's time.
        is_gap = not last_end_time or (
            self._is_async and last_prefill_tokens and not rows.prefill_tokens
        )
        choices = [row.choice for row in rows.drafted_rows]
        choice = _most_common_choice(choices)
        if choice is None:  # no row may be drafted for
            choice = next(
                row_choice for row_choice in launch.verified_choices if row_choice is not None
            )
        draft_choice = launch.draft_choice
        verified_gammas = {gamma, choice.gamma, *(row_choice.gamma for row_choice in choices)}
        is_mixed = draft_choice is None or verified_gammas != {draft_choice.gamma}
        self._step_number += 1

        def fill(report: StepReport) -> None:
            report.step = self._step_number
            report.batch_size = batch_size
            report.kv_tokens = rows.kv_tokens
            report.drafter = self._drafter
            report.gamma = gamma
            report.step_seconds = now - (last_end_time or launch.start_time)
            report.delivered_tokens = sum(map(len, rows.undrafted_tokens)) + sum(
                len(row.tokens) for row in rows.drafted_rows
            )
            report.prefill_tokens = rows.prefill_tokens
            if self._waiting_prompts is not None:
                report.waiting_prompt_tokens = self._waiting_prompts.count()
            report.plan_epoch = choice.epoch
            report.plan_session = choice.session
            report.probe_id = choice.probe_id
            if is_gap:
                report.flags.after_gap = True
            if is_mixed:
                report.flags.mixed_choice = True
            if choice.source is not Source.PLAN:
                report.flags.unsteered = True
            executed_arm = (choice.drafter_index, gamma, False, batch_size)
            if executed_arm != self._arm_history.last_arm:
                self._arm_history.flag_change(executed_arm, report)
            self._add_counts(report, rows, by_width)

        self._link.report(fill)

    def _add_counts(
        self, report: StepReport, rows: StepRows, by_width: Mapping[int, list[int]]
    ) -> None:
        gamma = report.gamma
        counts = [0] * (gamma + 1)
        for width_counts in by_width.values():
            for accepted, row_count in enumerate(width_counts):
                counts[accepted] += row_count
        counts[0] += len(rows.undrafted_tokens) + rows.discarded_rows
        report.accepted_counts.extend(counts)
        # No groups if all rows have verified the step's draft length.
        if rows.undrafted_tokens or rows.discarded_rows or list(by_width) != [gamma]:
            for verified_drafts in sorted(by_width):
                add_group(report, self._drafter, verified_drafts, by_width[verified_drafts])
            if rows.undrafted_tokens:
                add_group(report, "", 0, (len(rows.undrafted_tokens),))
            if rows.discarded_rows:
                add_group(report, self._drafter, 0, (rows.discarded_rows,), ended=True)
        self._add_evidence(report, rows.drafted_rows)

    def _requested_gamma(self, row: Row) -> int:
        """Returns the draft length that a row ran.

        If a sequence is nearly too long, vLLM verifies fewer drafts than were requested.
        """
        return row.choice.gamma if self._may_draft_less or row.is_cut else row.verified_drafts

    def _add_evidence(self, report: StepReport, drafted: Sequence[Row]) -> None:
        """Adds the evidence of the rows, if it differs from the drafts that they verified."""
        gamma = report.gamma
        if not gamma or not (
            self._may_draft_less or any(len(row.tokens) <= row.accepted for row in drafted)
        ):
            return
        evidence = DraftEvidence(gamma)
        for row in drafted:
            compared_drafts = self._compared_drafts(row)
            evidence.add(min(row.accepted, compared_drafts), compared_drafts)
        if not evidence.is_empty:
            evidence.add_to_report(report, self._drafter)

    def _compared_drafts(self, row: Row) -> int:
        """Returns how many drafts of a row were compared with tokens of the answer.

        Drafts after the end of an answer, and drafts that a grammar has removed, are not compared.
        Drafts that a lookup did not find count as rejected.
        """
        if len(row.tokens) <= row.accepted:
            return len(row.tokens)
        return row.choice.gamma if self._may_draft_less and not row.is_cut else row.verified_drafts


def unread_prompt_tokens(request: Any) -> int:
    """Returns the length of a waiting request's prompt; 0 if it was read before a preemption."""
    return 0 if request.num_output_tokens else int(request.num_prompt_tokens)


def _was_paused(launch: LaunchedStep, last_end_time: float, now: float) -> bool:
    """Whether a step waited longer than it ran.

    An engine that pauses and keeps its requests schedules no steps; this is the only sign of it.
    """
    return launch.start_time - last_end_time > now - launch.start_time


def _is_dropped(request: Any) -> bool:
    """Whether vLLM drops a result, because all requests were preempted while it was in flight.

    vLLM 0.26 does not have these fields.
    """
    stale = getattr(request, "num_stale_output_tokens", 0)
    return bool(stale) and bool(getattr(request, "drop_stale_output", False))


def _counts_by_width(drafted: Sequence[Row]) -> dict[int, list[int]]:
    """Returns, for each number of verified drafts (width), width + 1 counts of accepted drafts."""
    counts_by_width: dict[int, list[int]] = {}
    for row in drafted:
        counts_by_width.setdefault(row.verified_drafts, [0] * (row.verified_drafts + 1))[
            row.accepted
        ] += 1
    return counts_by_width


def _most_common_choice(choices: Sequence[StepChoice]) -> StepChoice | None:
    if not choices:
        return None
    first = choices[0]
    if all(choice is first for choice in choices):
        return first
    count_by_choice: dict[StepChoice, int] = {}
    for choice in choices:
        count_by_choice[choice] = count_by_choice.get(choice, 0) + 1
    return max(count_by_choice, key=count_by_choice.__getitem__)

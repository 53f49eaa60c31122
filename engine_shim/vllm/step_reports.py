"""Reports each decode step.

vLLM drafts at the end of a step, and the next step verifies these drafts.  So a step runs under two
choices: it verifies drafts of an earlier choice, which the report is about, and drafts under its
own choice.  With async scheduling the next step is scheduled before the result of this one is read;
results come in the order of the schedules.

step_seconds runs from the end of the engine's previous step, of any kind, to the end of this one.
Two rows of a step may have been drafted under different choices, if the previous step omitted one
of them.  The report is then about the choice of most rows, and is flagged MIXED_CHOICE.

Drafts count as vLLM counts them: drafts that a grammar has removed, and drafts that a lookup did
not find, were not verified.  The evidence of a row is counted differently (`_shown`).

No step has the flag EAGER_FALLBACK: the batch and the draft length alone determine whether vLLM has
a graph for a step, so the cost of a step without a graph is a property of its shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple

from engine_shim.common.arms_run import ArmsRun
from engine_shim.common.row_groups import Evidence, add_group
from engine_shim.common.waiting_prompts import WaitingPrompts
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source, StepChoice
from speculation.v1.engine_pb2 import StepReport

# The contract's limit; a step with more groups of rows is not reported.
MOST_GROUPS: Final = 16
# Limit of steps in flight; vLLM has at most two.
_MOST_LAUNCHES: Final = 64


class Launch(NamedTuple):
    """A step that was scheduled.

    output: vLLM's `SchedulerOutput`.  drafted_under: for each request, in the order of `output`,
    the choice under which its verified drafts were made; None for a request's first step.
    computed: context length of each request before the step.  drafts_under: the choice of this
    step; None if no row of it will decode next.  started: perf_counter seconds.
    """

    output: Any
    drafted_under: Sequence[StepChoice | None]
    computed: Sequence[int]
    drafts_under: StepChoice | None
    started: float


class Row(NamedTuple):
    """A row that decoded and may be drafted for.

    under: the choice under which it was drafted.  width: number of verified drafts.  accepted:
    number of accepted drafts.  is_cut: a grammar has removed further drafts.  tokens: the row's
    tokens in the result; vLLM shortens the list to the tokens that the answer takes.
    """

    under: StepChoice
    width: int
    accepted: int
    is_cut: bool
    tokens: list[int]


class Rows(NamedTuple):
    """The rows of a step that decoded, at its end.

    undrafted: tokens of the rows that may not be drafted for.  ended: number of rows whose requests
    ended or were preempted while the step was in flight.  kv_tokens: sum of context lengths before
    the step.  prefill_tokens: of all other rows.
    """

    drafted: Sequence[Row]
    undrafted: Sequence[list[int]]
    ended: int
    kv_tokens: int
    prefill_tokens: int


class StepTap:
    """Turns schedules and results into reports.

    gammas: the draft lengths in the introduction.  may_draft_less: the drafter may propose fewer
    tokens than requested (a lookup without a match).
    is_async: results are read a step later.  waiting: counts waiting prompts.
    """

    def __init__(
        self,
        link: EngineLink,
        gammas: Collection[int],
        *,
        may_draft_less: bool,
        is_async: bool,
        waiting: WaitingPrompts | None = None,
    ) -> None:
        self._link = link
        # vLLM has one drafter.
        self._drafter = link.steering.names[0]
        self._gammas = frozenset(gammas)
        self._may_draft_less = may_draft_less
        self._is_async = is_async
        self._waiting = waiting
        self._arms_run = ArmsRun()
        self._launches: deque[Launch] = deque(maxlen=_MOST_LAUNCHES)
        self._step = 0
        # Of the engine's last step; 0.0 after a pause.
        self._last_end = 0.0
        self._last_prefill = 0
        # Steps that the contract cannot describe.
        self.skipped = 0

    def launched(self, launch: Launch) -> None:
        """Adds a step that waits for its result."""
        self._launches.append(launch)

    def launch_of(self, output: Any) -> Launch | None:
        """Removes and returns the launched step of a result; None if it is unknown."""
        while self._launches:
            launch = self._launches.popleft()
            if launch.output is output:
                return launch
        return None

    def rows(
        self, launch: Launch, result: Any, requests: Mapping[str, Any], undrafted: set[str]
    ) -> Rows:
        """Counts the rows of a step, before vLLM processes its result (and cuts it at a stop)."""
        output = launch.output
        tokens, index = result.sampled_token_ids, result.req_id_to_index
        drafts = output.scheduled_spec_decode_tokens
        # Invalid drafts, with async scheduling; vLLM verifies padding in their place.
        forbidden = getattr(output, "num_invalid_spec_tokens", None) or {}
        drafted: list[Row] = []
        left: list[list[int]] = []
        ended = kv_tokens = prefill = 0
        for (name, scheduled), under, computed in zip(
            output.num_scheduled_tokens.items(), launch.drafted_under, launch.computed, strict=True
        ):
            request = requests.get(name)
            width = len(drafts.get(name, ()))
            if request is None or request.is_finished() or _is_dropped(request):
                # Its tokens are discarded.
                if under is not None and scheduled == width + 1:
                    ended += 1
                    kv_tokens += computed
                continue
            # A request's first token ends its prompt; one that was preempted reads it again.
            if request.num_output_tokens == 0 or scheduled != width + 1 or under is None:
                prefill += scheduled
                continue
            got: list[int] = tokens[index[name]] if tokens else []
            if not got:
                continue
            kv_tokens += request.num_tokens - 1
            if name in undrafted:
                left.append(got)
                continue
            width -= forbidden.get(name, 0)
            is_cut = request.use_structured_output and width < under.gamma
            drafted.append(Row(under, width, len(got) - 1, is_cut, got))
        return Rows(drafted, left, ended, kv_tokens, prefill)

    def settle(self, launch: Launch, rows: Rows) -> None:
        """Reports a step whose result vLLM has processed."""
        now = perf_counter()
        last_end, self._last_end = self._last_end, now
        if _was_paused(launch, last_end, now):
            last_end = 0.0
        last_prefill, self._last_prefill = self._last_prefill, rows.prefill_tokens
        if launch.output.total_num_scheduled_tokens == 0:
            self._last_end = 0.0  # no request could run, so the next interval is unknown
            return
        if not rows.drafted and not rows.undrafted:
            return
        batch_size = len(rows.drafted) + len(rows.undrafted) + rows.ended
        by_width = _by_width(rows.drafted)
        gamma = max((self._asked(row) for row in rows.drafted), default=0)
        # At the longest sequence, all rows may have been cut to a length that is not an arm.
        groups = len(by_width) + bool(rows.undrafted) + bool(rows.ended)
        if groups > MOST_GROUPS or gamma not in self._gammas:
            self.skipped += 1
            return
        # With async scheduling, the drafting after a long prompt is part of this step's time.
        is_gap = not last_end or (self._is_async and last_prefill and not rows.prefill_tokens)
        choices = [row.under for row in rows.drafted]
        choice = _choice_of_most(choices)
        if choice is None:  # no row may be drafted for
            choice = next(under for under in launch.drafted_under if under is not None)
        drafts = launch.drafts_under
        verified = {gamma, choice.gamma, *(under.gamma for under in choices)}
        is_mixed = drafts is None or verified != {drafts.gamma}
        self._step += 1

        def fill(report: StepReport) -> None:
            report.step = self._step
            report.batch_size = batch_size
            report.kv_tokens = rows.kv_tokens
            report.drafter = self._drafter
            report.gamma = gamma
            report.step_seconds = now - (last_end or launch.started)
            report.delivered_tokens = sum(map(len, rows.undrafted)) + sum(
                len(row.tokens) for row in rows.drafted
            )
            report.prefill_tokens = rows.prefill_tokens
            if self._waiting is not None:
                report.waiting_prompt_tokens = self._waiting.count()
            report.plan_epoch = choice.epoch
            report.plan_session = choice.session
            report.probe_id = choice.probe_id
            if is_gap:
                report.flags.after_gap = True
            if is_mixed:
                report.flags.mixed_choice = True
            if choice.source is not Source.PLAN:
                report.flags.unsteered = True
            ran = (choice.drafter_index, gamma, False, batch_size)
            if ran != self._arms_run.last:
                self._arms_run.change(ran, report)
            self._add_counts(report, rows, by_width)

        self._link.report(fill)

    def _add_counts(
        self, report: StepReport, rows: Rows, by_width: Mapping[int, list[int]]
    ) -> None:
        gamma = report.gamma
        counts = [0] * (gamma + 1)
        for of_width in by_width.values():
            for accepted, number in enumerate(of_width):
                counts[accepted] += number
        counts[0] += len(rows.undrafted) + rows.ended
        report.accepted_counts.extend(counts)
        # No groups if all rows have verified the step's draft length.
        if rows.undrafted or rows.ended or list(by_width) != [gamma]:
            for width in sorted(by_width):
                add_group(report, self._drafter, width, by_width[width])
            if rows.undrafted:
                add_group(report, "", 0, (len(rows.undrafted),))
            if rows.ended:
                add_group(report, self._drafter, 0, (rows.ended,), ended=True)
        self._add_evidence(report, rows.drafted)

    def _asked(self, row: Row) -> int:
        """Returns the draft length that a row ran.

        If a sequence is nearly too long, vLLM verifies fewer drafts than were requested.
        """
        return row.under.gamma if self._may_draft_less or row.is_cut else row.width

    def _add_evidence(self, report: StepReport, drafted: Sequence[Row]) -> None:
        """Adds the evidence of the rows, if it differs from the drafts that they verified."""
        gamma = report.gamma
        if not gamma or not (
            self._may_draft_less or any(len(row.tokens) <= row.accepted for row in drafted)
        ):
            return
        shows = Evidence(gamma)
        for row in drafted:
            shown = self._shown(row)
            shows.add(min(row.accepted, shown), shown)
        if not shows.is_empty:
            shows.add_to(report, self._drafter)

    def _shown(self, row: Row) -> int:
        """Returns how many drafts of a row were compared with tokens of the answer.

        Drafts after the end of an answer, and drafts that a grammar has removed, are not compared.
        Drafts that a lookup did not find count as rejected.
        """
        if len(row.tokens) <= row.accepted:
            return len(row.tokens)
        return row.under.gamma if self._may_draft_less and not row.is_cut else row.width


def prompt_tokens(request: Any) -> int:
    """Returns the length of a waiting request's prompt; 0 if it was read before a preemption."""
    return 0 if request.num_output_tokens else int(request.num_prompt_tokens)


def _was_paused(launch: Launch, last_end: float, now: float) -> bool:
    """Whether a step waited longer than it ran.

    An engine that pauses and keeps its requests schedules no steps; this is the only sign of it.
    """
    return launch.started - last_end > now - launch.started


def _is_dropped(request: Any) -> bool:
    """Whether vLLM drops a result, because all requests were preempted while it was in flight.

    vLLM 0.26 does not have these fields.
    """
    stale = getattr(request, "num_stale_output_tokens", 0)
    return bool(stale) and bool(getattr(request, "drop_stale_output", False))


def _by_width(drafted: Sequence[Row]) -> dict[int, list[int]]:
    """Returns, for each number of verified drafts (width), width + 1 counts of accepted drafts."""
    found: dict[int, list[int]] = {}
    for row in drafted:
        found.setdefault(row.width, [0] * (row.width + 1))[row.accepted] += 1
    return found


def _choice_of_most(choices: Sequence[StepChoice]) -> StepChoice | None:
    if not choices:
        return None
    first = choices[0]
    if all(choice is first for choice in choices):
        return first
    number: dict[StepChoice, int] = {}
    for choice in choices:
        number[choice] = number.get(choice, 0) + 1
    return max(number, key=number.__getitem__)

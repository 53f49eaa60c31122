"""Reports each decode step.

vLLM drafts at the end of a step what the next one verifies, so a step runs two choices: it verifies
what was drafted under an earlier one, which the report is about, and drafts under its own.  With
async scheduling the next step is scheduled before this one's result is read; results come in the
order of the schedules.

step_seconds runs from the end of the engine's step before, whatever that was, to the end of this
one.  Two rows of a step may have been drafted under different choices, where one of them was left
out of the step before; the report is then about that of most rows, and flagged MIXED_CHOICE.

No step has the flag EAGER_FALLBACK: whether vLLM has a graph for it follows from the batch and the
draft length alone, so a step without one costs what its shape always does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine_shim.link.packets import (
    AFTER_GAP,
    MIXED_CHOICE,
    NO_DRAFTER,
    UNSTEERED,
    GroupEntry,
    ReportPacket,
)
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.steering.arms_run import ArmsRun

if TYPE_CHECKING:
    from engine_shim.link.engine_link import EngineLink

# The contract's limit; a step of more different rows is not reported.
MOST_GROUPS: Final = 16
# Results that may be on their way; vLLM has two at most.
_MOST_LAUNCHES: Final = 64


class Launch(NamedTuple):
    """A step that was scheduled.

    output: vLLM's own description of it.  drafted_under: for each of its requests, in its order,
    the choice that what it verifies was drafted under; None for a request's first step.
    drafts_under: the choice of this step; None if no row of it will decode next.  started:
    perf_counter seconds.
    """

    output: Any
    drafted_under: Sequence[StepChoice | None]
    drafts_under: StepChoice | None
    started: float


class Rows(NamedTuple):
    """The rows of a step that decoded, as it ends.

    drafted: verified width and accepted drafts of each row that may be drafted for.  undrafted:
    how many may not.  choices: those that the drafted rows were drafted under.  kv_tokens: sum of
    context lengths before the step.  prefill_tokens: of all other rows.
    """

    drafted: Sequence[tuple[int, int]]
    undrafted: int
    choices: Sequence[StepChoice]
    kv_tokens: int
    prefill_tokens: int


class StepTap:
    """Turns schedules and results into reports.

    gammas: the draft lengths that were introduced.  may_draft_less: the drafter proposes fewer
    tokens than it was asked for where it finds none, and what is missing counts as refused.
    is_async: results are read a step later.
    """

    def __init__(
        self,
        link: EngineLink,
        gammas: Collection[int],
        *,
        may_draft_less: bool,
        is_async: bool,
    ) -> None:
        self._link = link
        self._gammas = frozenset(gammas)
        self._may_draft_less = may_draft_less
        self._is_async = is_async
        self._arms_run = ArmsRun()
        self._launches: deque[Launch] = deque(maxlen=_MOST_LAUNCHES)
        self._step = 0
        # Of the engine's last step; 0.0 after a pause.
        self._last_end = 0.0
        self._last_prefill = 0
        # Steps that the contract has no report for.
        self.skipped = 0

    def launched(self, launch: Launch) -> None:
        """Keeps a step until its result comes."""
        self._launches.append(launch)

    def launch_of(self, output: Any) -> Launch | None:
        """Returns the launch that belongs to a result; None if it is not known."""
        while self._launches:
            launch = self._launches.popleft()
            if launch.output is output:
                return launch
        return None

    def rows(
        self, launch: Launch, result: Any, requests: Mapping[str, Any], undrafted: set[str]
    ) -> Rows:
        """Counts the rows of a step, before vLLM works its result in (and cuts it at a stop)."""
        output = launch.output
        tokens, index = result.sampled_token_ids, result.req_id_to_index
        drafts = output.scheduled_spec_decode_tokens
        drafted: list[tuple[int, int]] = []
        choices: list[StepChoice] = []
        left = kv_tokens = prefill = 0
        for (name, scheduled), under in zip(
            output.num_scheduled_tokens.items(), launch.drafted_under, strict=True
        ):
            request = requests.get(name)
            if request is None or request.is_finished() or _is_dropped(request):
                continue  # its tokens are thrown away
            width = len(drafts.get(name, ()))
            # A request's first token ends its prompt; one that was preempted reads it again.
            if request.num_output_tokens == 0 or scheduled != width + 1 or under is None:
                prefill += scheduled
                continue
            got = len(tokens[index[name]]) if tokens else 0
            if got == 0:
                continue
            kv_tokens += request.num_tokens - 1
            if name in undrafted:
                left += 1
                continue
            if width < under.gamma and (self._may_draft_less or request.use_structured_output):
                width = under.gamma
            drafted.append((width, got - 1))
            choices.append(under)
        return Rows(drafted, left, choices, kv_tokens, prefill)

    def settle(self, launch: Launch, rows: Rows) -> None:
        """Reports a step whose result vLLM has worked in."""
        now = perf_counter()
        last_end, self._last_end = self._last_end, now
        if _was_paused(launch, last_end, now):
            last_end = 0.0
        last_prefill, self._last_prefill = self._last_prefill, rows.prefill_tokens
        if launch.output.total_num_scheduled_tokens == 0:
            self._last_end = 0.0  # nothing could run, for as long as it took
            return
        batch_size = len(rows.drafted) + rows.undrafted
        if batch_size == 0:
            return
        groups = _groups(rows)
        gamma = max(group.gamma for group in groups)
        # All rows may have been cut, at the longest sequence, to a length that is no arm.
        if len(groups) > MOST_GROUPS or gamma not in self._gammas:
            self.skipped += 1
            return
        flags = 0
        if not last_end or (self._is_async and last_prefill and not rows.prefill_tokens):
            # With async scheduling, drafting after a long prompt falls into this step.
            flags |= AFTER_GAP
        choice = _choice_of_most(rows.choices)
        if choice is None:  # all rows may not be drafted for
            choice = next(under for under in launch.drafted_under if under is not None)
        drafts = launch.drafts_under
        verified = {gamma, choice.gamma, *(under.gamma for under in rows.choices)}
        if drafts is None or verified != {drafts.gamma}:
            flags |= MIXED_CHOICE
        if choice.source is not Source.PLAN:
            flags |= UNSTEERED
        ran = (choice.drafter_index, gamma, False, batch_size)
        if ran != self._arms_run.last:
            flags |= self._arms_run.change(ran)
        self._step += 1
        self._link.report(
            ReportPacket(
                self._step,
                batch_size,
                rows.kv_tokens,
                choice.drafter_index,
                gamma,
                _sum(groups, gamma),
                now - (last_end or launch.started),
                flags,
                choice.epoch,
                choice.probe_id,
                choice.session,
                prefill_tokens=rows.prefill_tokens,
                groups=groups if len(groups) > 1 or rows.undrafted else (),
            )
        )


def _sum(groups: Sequence[GroupEntry], gamma: int) -> list[int]:
    counts = [0] * (gamma + 1)
    for group in groups:
        for accepted, number in enumerate(group.accepted_counts):
            counts[accepted] += number
    return counts


def _was_paused(launch: Launch, last_end: float, now: float) -> bool:
    """Whether a step waited for longer than it ran.

    An engine that pauses and keeps its requests schedules nothing, and leaves no other
    trace of it.
    """
    return launch.started - last_end > now - launch.started


def _is_dropped(request: Any) -> bool:
    """Whether vLLM drops a result, because all requests were preempted while it was on its way.

    vLLM 0.26 has no such fields.
    """
    stale = getattr(request, "num_stale_output_tokens", 0)
    return bool(stale) and bool(getattr(request, "drop_stale_output", False))


def _groups(rows: Rows) -> tuple[GroupEntry, ...]:
    by_width: dict[int, list[int]] = {}
    for width, accepted in rows.drafted:
        by_width.setdefault(width, [0] * (width + 1))[accepted] += 1
    groups = [GroupEntry(0, width, by_width[width]) for width in sorted(by_width)]
    if rows.undrafted:
        groups.append(GroupEntry(NO_DRAFTER, 0, (rows.undrafted,)))
    return tuple(groups)


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

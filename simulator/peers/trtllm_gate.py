"""TensorRT-LLM's speculation gate beside its batch schedule: bad acceptance ends speculation.

Restated from TensorRT-LLM's speculation config as pull request 12905 changed it, and from its tests
and documentation; no code was taken over.  Two mechanisms work together:

    draft_len_schedule             {largest batch: draft length}; past the last key nothing is
                                   drafted, which is also how `max_concurrency` is carried out
    acceptance_rate_window_size,   after every step that drafted, one sample of the whole batch:
    acceptance_rate_threshold      accepted / drafted tokens.  Once the window is full and the mean
                                   of its samples is below the threshold, speculation is off until
                                   the server restarts

The rate is of drafted tokens, not a length, so that samples of different draft lengths can share a
window.  (Before, the gate averaged accepted drafts a step over completed requests, at one length.)

It ships without a schedule, a window and a threshold.  Given to it here: the best schedule in
hindsight, and from the profile `break_even_rate`, the lowest rate at which any of the schedule's
draft lengths pays.  Without a profile the threshold is the lowest one of its own tests.  Their
windows are 3 steps long, so that at a small batch luck alone closes the gate; here it is 500.  Left
out: the floor of one draft that pull request 16888 proposes for batches past the schedule.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.peers.common import (
    RelativeCosts,
    accepted_tokens,
    first_drafter,
    off_arm,
    speculating_arm,
)
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

THRESHOLD = 0.3
WINDOW_STEPS = 500
_SOURCE = "speculation gate"

# (largest batch size, draft length)
Schedule = Sequence[tuple[int, int]]


class SpeculationGate:
    """A draft length by batch size until the gate closes; plain decoding from then on.

    schedule: ranges of the batch size by their last one; 0 drafts nothing.  A draft length that
    `drafter` (default: the first one) does not have is the nearest one that it has.  threshold:
    accepted over drafted tokens, in 0..1.  window: steps that drafted.

    Raises InvalidInputError for a schedule that contradicts itself, and for values out of range.
    """

    origin = PolicyOrigin.RESTATED

    def __init__(
        self,
        arms: Sequence[Arm],
        schedule: Schedule,
        *,
        drafter: str | None = None,
        threshold: float = THRESHOLD,
        window: int = WINDOW_STEPS,
    ) -> None:
        _require_valid(schedule, threshold, window)
        ranges, plain = _arm_ranges(arms, schedule, drafter or first_drafter(arms))
        self._ends = [last for last, _ in ranges]
        # Past the last range, and once the gate is closed, the last choice serves.
        self._choices = [ArmChoice(arm) for arm in (*(arm for _, arm in ranges), plain)]
        self._threshold = threshold
        self._window_steps = window
        self._rates: deque[float] = deque()
        self._sum = 0.0
        self.is_closed = False

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Drafts what the schedule says, unless the gate is closed."""
        return self._choices[-1 if self.is_closed else bisect_left(self._ends, batch_size)]

    def observe(self, record: StepRecord, _: float) -> None:
        """Moves the window by a step that drafted, and closes the gate if its mean is too low."""
        gamma = len(record.counts) - 1
        if self.is_closed or gamma == 0:
            return
        rate = accepted_tokens(record.counts) / (record.batch_size * gamma)
        self._rates.append(rate)
        self._sum += rate
        if len(self._rates) > self._window_steps:
            self._sum -= self._rates.popleft()
        if len(self._rates) == self._window_steps:
            self.is_closed = self._sum < self._threshold * self._window_steps


def break_even_rate(
    arms: Sequence[Arm], schedule: Schedule, profile: Profile, drafter: str | None = None
) -> float:
    """The acceptance rate below which no range of the schedule pays, in 0..1.

    The least (C(gamma, b) / C(0, b) - 1) / gamma over the batch sizes of the profile at which the
    schedule drafts: accepted tokens a draft token that make up for the longer step.  0 if it never
    drafts, or if there is no plain decoding to compare with.

    Raises InvalidInputError as well if the profile lacks one of the arms.
    """
    _require_valid(schedule, THRESHOLD, WINDOW_STEPS)
    drafter = drafter or first_drafter(arms)
    off = off_arm(arms, drafter)
    if off is None:
        return 0.0
    ranges, _ = _arm_ranges(arms, schedule, drafter)
    sizes = {cell.batch_size for cell in profile.cells}
    rates = []
    first = 1
    for last, arm in ranges:
        gamma = arms[arm].gamma
        if gamma > 0:
            costs = RelativeCosts(profile, [arms[arm]], arms[off])
            sizes_in_range = {first, last, *(size for size in sizes if first <= size <= last)}
            rates += [(costs.ratios_at(size)[0] - 1) / gamma for size in sizes_in_range]
        first = last + 1
    return min(max(min(rates, default=0.0), 0.0), 1.0)


def _arm_ranges(
    arms: Sequence[Arm], schedule: Schedule, drafter: str
) -> tuple[list[tuple[int, int]], int]:
    """Returns (largest batch size, index in `arms`) of each range, ascending, and the arm for off.

    An engine that cannot decode plainly drafts as little as it can.
    """
    off = off_arm(arms, drafter)
    plain = speculating_arm(arms, drafter, 1) if off is None else off
    return [
        (last, speculating_arm(arms, drafter, gamma) if gamma > 0 else plain)
        for last, gamma in sorted(schedule)
    ], plain


def _require_valid(schedule: Schedule, threshold: float, window: int) -> None:
    fault = "" if schedule else "the schedule lists no batch size"
    for last, gamma in schedule:
        if last < 1 or gamma < 0:
            fault = f"up to batch size {last} draft {gamma}: the minima are 1 and 0"
    if len({last for last, _ in schedule}) < len(schedule):
        fault = "a batch size is listed twice"
    if not 0 <= threshold <= 1:
        fault = f"the threshold {threshold} must be in [0, 1]"
    if window < 1:
        fault = f"the window is {window} steps, at least 1 is needed"
    if fault:
        raise InvalidInputError(_SOURCE, 0, fault)

"""The two ways in which vLLM changes the draft length: by the batch size, and adaptively.

`BatchSchedule` is its dynamic speculative decoding: a table from the batch size to the draft
length.

Restated from `num_speculative_tokens_per_batch_size` (vLLM 0.33, vllm/v1/spec_decode/dynamic): the
operator lists (first, last, K) ranges of the batch size and every step runs K.  A gap between two
ranges, and what lies past the last one, keeps the K of the range below; ranges must start
at 1 and not overlap.  It knows neither acceptance nor cost.

Made as strong as a table can be: `best_table` fills it in hindsight from every arm's own run
through the same workload, and its entries are arms, so that it may also switch drafters, which
vLLM cannot.  Left out: vLLM counts requests in prefill as part of the batch.  At K = 0 the drafter
sleeps; vLLM still runs it there and was measured to pay 5 to 8 % of a step for that.

`AdaptiveK` is the adaptive K of its scheduler: acceptance by position, a cost model, and their best
quotient.

Restated from the description and the documentation of vLLM pull request 47111 (open, 2026; an
earlier form is 44336); its code was not seen.  Every step drafts the K with the highest goodput:

    E(K) = 1 + sum over i <= K of a_1 ... a_i        goodput = E(K) / C(K),  C(0) = 1

a_j is the conditional acceptance of position j: of the sequences that reached it, the share that
accepted it, counted over windows of 10 steps and averaged with weight 0.3 a window.  A position
that was never reached has 0.85.  After a change, K stays for 2 steps.  One estimate serves all
batch sizes.  It cannot switch drafters.

The proposal's C(K) is 1 + 0.1144 K + 0.002 B: one profiled ratio of draft to target time, and a
penalty on the batch.  Without a profile that is what runs here.  Ours, and generous: with a
profile, C(K) is the measured step over the plain one at this batch size.  Also ours: in the last 10
of every 500 steps it drafts the next longer length, because what it does not draft, 0 above all, it
could not leave again; 44336 explored in a tenth of all steps.  Left out: changes of K by 1 are
refused by 44336, which would keep it at 1 where 0 is best; the batch schedule that may cap K, which
could only shorten it; drafting at K = 0, where the drafter sleeps here and runs in vLLM.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.peers.common import (
    RelativeCosts,
    arms_by_gamma,
    first_drafter,
    octave_range,
    off_arm,
)
from simulator.policy import ArmChoice, NonLearningPolicy, StepRecord
from simulator.results import PolicyOrigin

# (first batch size, last batch size, index of the arm)
Table = tuple[tuple[int, int, int], ...]

_SOURCE = "batch schedule"


class BatchSchedule(NonLearningPolicy):
    """arms[K] by batch size.  Raises InvalidInputError for a table that contradicts itself."""

    origin = PolicyOrigin.RESTATED

    def __init__(self, arms: Sequence[Arm], arm_by_batch: Sequence[tuple[int, int, int]]) -> None:
        self.table = _check_table(arm_by_batch, len(arms))
        # Up to where each range serves: a gap belongs to the range below it.
        self._ends = [first - 1 for first, _, _ in self.table[1:]]
        self._choices = [ArmChoice(arm) for _, _, arm in self.table]

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Looks the arm up."""
        return self._choices[bisect_left(self._ends, batch_size)]


def _check_table(entries: Sequence[tuple[int, int, int]], arms: int) -> Table:
    table = tuple(sorted(entries))
    fault = "" if table else "no range is listed"
    if table and table[0][0] != 1:
        fault = f"the first range starts at {table[0][0]}, batch size 1 has no entry"
    previous_last = 0
    for first, last, arm in table:
        if first > last:
            fault = fault or f"range {first}..{last} ends before it starts"
        if first <= previous_last:
            fault = fault or f"range {first}..{last} overlaps the one below it"
        if not 0 <= arm < arms:
            fault = fault or f"range {first}..{last}: arm {arm} does not exist, there are {arms}"
        previous_last = last
    if fault:
        raise InvalidInputError(_SOURCE, 0, fault)
    return table


def best_table(sums: Sequence[Mapping[int, Sequence[float]]]) -> Table:
    """Returns the best table in hindsight: per octave the arm with the most tokens/second.

    sums: [arms], each octave -> (tokens, seconds) of that arm's own run over the workload (octave o
    has batch sizes 2^(o-1)+1 .. 2^o, as in `RunResult.octaves`).  An octave without a measurement
    takes the entry of the nearest measured one, the lower of two.  Ties go to the earlier arm.
    Raises InvalidInputError if nothing was measured.
    """
    best: dict[int, tuple[float, int]] = {}
    for arm, by_octave in enumerate(sums):
        for index, (tokens, seconds) in by_octave.items():
            if seconds > 0 and tokens / seconds > best.get(index, (0.0, 0))[0]:
                best[index] = (tokens / seconds, arm)
    if not best:
        raise InvalidInputError(_SOURCE, 0, "no arm was measured at any batch size")
    table = []
    for index in range(max(best) + 1):
        nearest_octave = min(best, key=lambda candidate: (abs(candidate - index), candidate))
        table.append((*octave_range(index), best[nearest_octave][1]))
    return tuple(table)


WINDOW_STEPS = 10
EMA_WEIGHT = 0.3
UNSEEN_ACCEPTANCE = 0.85
DRAFT_COST = 0.1144
BATCH_PENALTY = 0.002
COOLDOWN_STEPS = 2
RECHECK_STEPS = 500


class AdaptiveK:
    """The K with the most expected tokens a second, for one drafter (default: the first one).

    profile: costs of its arms and of plain decoding; None: the proposal's own cost model.
    recheck_steps: one window in this many steps drafts the next longer length.
    Raises InvalidInputError if the profile lacks one of the arms.
    """

    origin = PolicyOrigin.RESTATED

    def __init__(
        self,
        arms: Sequence[Arm],
        profile: Profile | None = None,
        *,
        drafter: str | None = None,
        recheck_steps: int = RECHECK_STEPS,
    ) -> None:
        drafter = drafter or first_drafter(arms)
        index = arms_by_gamma(arms, drafter)
        if (off := off_arm(arms, drafter)) is not None:
            index = {0: off, **{gamma: arm for gamma, arm in index.items() if gamma > 0}}
        self._gammas = list(index)
        self._choices = [ArmChoice(arm) for arm in index.values()]
        chosen = [arms[arm] for arm in index.values()]
        self._costs = None if profile is None else RelativeCosts(profile, chosen, chosen[0])
        self._recheck_steps = recheck_steps
        depth = self._gammas[-1]
        self.acceptance = [None] * depth
        self._reached = [0] * depth
        self._accepted = [0] * depth
        self._window = 0
        self._current = -1
        self._cooldown = 0
        self._choice_count = 0

    @property
    def acceptance(self) -> list[float | None]:
        """Returns the conditional acceptance by position, 1 first; None: never reached."""
        return list(self._acceptance)

    @acceptance.setter
    def acceptance(self, acceptance: Sequence[float | None]) -> None:
        self._acceptance = list(acceptance)
        # E(K) of every K.
        self._expected_tokens: list[float] = []
        expected, survival, position = 1.0, 1.0, 0
        for gamma in self._gammas:
            for rate in self._acceptance[position:gamma]:
                survival *= UNSEEN_ACCEPTANCE if rate is None else rate
                expected += survival
            position = gamma
            self._expected_tokens.append(expected)

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the best K for this batch, or the present one shortly after a change."""
        self._choice_count += 1
        if self._cooldown > 0:
            self._cooldown -= 1
        elif (best := self._best_index(batch_size)) != self._current:
            self._cooldown = COOLDOWN_STEPS if self._current >= 0 else 0
            self._current = best
        recheck = -self._choice_count % self._recheck_steps < WINDOW_STEPS
        longest = len(self._choices) - 1
        return self._choices[min(self._current + recheck, longest)]

    def _best_index(self, batch_size: int) -> int:
        """Returns the index of the K with the highest goodput, the shorter one of two."""
        costs = self._step_costs(batch_size)
        goodputs = [e / cost for e, cost in zip(self._expected_tokens, costs, strict=True)]
        return goodputs.index(max(goodputs))

    def _step_costs(self, batch_size: int) -> Sequence[float]:
        if self._costs is not None:
            return self._costs.ratios_at(batch_size)
        penalty = BATCH_PENALTY * batch_size
        return [1 + gamma * DRAFT_COST + penalty if gamma else 1.0 for gamma in self._gammas]

    def observe(self, record: StepRecord, _: float) -> None:
        """Counts a step that drafted; a full window moves the averages."""
        if len(record.counts) < 2:
            return
        reached = record.batch_size
        for k, stopped in enumerate(record.counts[:-1]):
            self._reached[k] += reached
            reached -= stopped
            self._accepted[k] += reached
        self._window += 1
        if self._window == WINDOW_STEPS:
            self._finish_window()

    def _finish_window(self) -> None:
        acceptance = self.acceptance
        for k, reached in enumerate(self._reached):
            if reached:
                rate = self._accepted[k] / reached
                previous_rate = acceptance[k]
                weight = EMA_WEIGHT if previous_rate is not None else 1.0
                acceptance[k] = (previous_rate or 0.0) + weight * (rate - (previous_rate or 0.0))
        self.acceptance = acceptance
        self._reached = [0] * len(self._reached)
        self._accepted = [0] * len(self._accepted)
        self._window = 0

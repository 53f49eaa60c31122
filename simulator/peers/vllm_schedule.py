"""vLLM's dynamic speculative decoding: a table from the batch size to the draft length.

Restated from `num_speculative_tokens_per_batch_size` (vLLM 0.33, vllm/v1/spec_decode/dynamic): the
operator lists (first, last, K) ranges of the batch size and every step runs K.  A gap between two
ranges, and what lies past the last one, keeps the K of the range below; ranges must start
at 1 and not overlap.  It knows neither acceptance nor cost.

Made as strong as a table can be: `best_table` fills it in hindsight from every arm's own run
through the same workload, and its entries are arms, so that it may also switch drafters, which
vLLM cannot.  Left out: vLLM counts requests in prefill as part of the batch.  At K = 0 the drafter
sleeps; vLLM still runs it there and was measured to pay 5 to 8 % of a step for that.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.peers.common import octave_range
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

# (first batch size, last batch size, index of an arm)
Table = tuple[tuple[int, int, int], ...]

_SOURCE = "batch schedule"


class BatchSchedule:
    """arms[K] by batch size.  Raises InvalidInputError for a table that contradicts itself."""

    origin = PolicyOrigin.RESTATED

    def __init__(self, arms: Sequence[Arm], arm_by_batch: Sequence[tuple[int, int, int]]) -> None:
        self.table = _checked(arm_by_batch, len(arms))
        # Up to where each range serves: a gap belongs to the range below it.
        self._ends = [first - 1 for first, _, _ in self.table[1:]]
        self._choices = [ArmChoice(arm) for _, _, arm in self.table]

    def choose(self, batch_size: int, now: float) -> ArmChoice:
        """Looks the arm up."""
        del now
        return self._choices[bisect_left(self._ends, batch_size)]

    def observe(self, record: StepRecord, now: float) -> None:
        """Does nothing with it, since there is nothing to learn."""


def _checked(entries: Sequence[tuple[int, int, int]], arms: int) -> Table:
    table = tuple(sorted(entries))
    fault = "" if table else "no range is listed"
    if table and table[0][0] != 1:
        fault = f"the first range starts at {table[0][0]}, batch size 1 has no entry"
    below = 0
    for first, last, arm in table:
        if first > last:
            fault = fault or f"range {first}..{last} ends before it starts"
        if first <= below:
            fault = fault or f"range {first}..{last} overlaps the one below it"
        if not 0 <= arm < arms:
            fault = fault or f"range {first}..{last}: arm {arm} does not exist, there are {arms}"
        below = last
    if fault:
        raise InvalidInputError(_SOURCE, 0, fault)
    return table


def best_table(sums: Sequence[Mapping[int, Sequence[float]]]) -> Table:
    """The best table in hindsight: per octave of the batch size the arm with most tokens/second.

    sums: [arms], each octave -> (tokens, seconds) of that arm's own run over the workload (octave o
    holds batch sizes 2^(o-1)+1 .. 2^o, as `RunResult.octaves`).  An octave that no arm met takes
    the entry of the nearest one that was, the lower of two.  Ties go to the earlier arm.
    Raises InvalidInputError when nothing was measured.
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
        met = min(best, key=lambda other: (abs(other - index), other))
        table.append((*octave_range(index), best[met][1]))
    return tuple(table)

"""Takes the machine's drift out of step times that were measured in rounds.

At one batch size every arm is visited in every round.  A machine that is slower in one round than
in another slows all arms alike, so with m[a, r] the median of arm a in round r

    log m[a, r] = level[a] + drift[r] + noise

and the drift is found by median polish (Tukey): the median over arms of what their levels leave,
then the median over rounds of what the drifts leave, in turn.  Medians, because a disturbance that
hits one visit must touch neither.  Dividing by exp(drift) leaves the arms' ratios as they were
within the rounds, at the machine's usual speed.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.profiling.samples import without_outliers

_POLISH_TIMES = 8

Key = TypeVar("Key")
Floats = NDArray[np.float64]


def without_drift(
    seconds: Mapping[Key, Floats], rounds: Mapping[Key, Sequence[int]]
) -> dict[Key, Floats]:
    """Step times of one batch size, as if the machine had kept its usual speed.

    seconds[arm][i] was measured in round rounds[arm][i].  Arms without steps are left out.
    """
    arms = [arm for arm in seconds if len(seconds[arm])]
    numbers = sorted({number for arm in arms for number in rounds[arm]})
    column = {number: r for r, number in enumerate(numbers)}
    columns = {arm: np.array([column[n] for n in rounds[arm]], dtype=np.intp) for arm in arms}
    medians = np.full((len(arms), len(numbers)), np.nan)
    for a, arm in enumerate(arms):
        for r in range(len(numbers)):
            values = seconds[arm][columns[arm] == r]
            if len(values):
                medians[a, r] = np.log(np.median(without_outliers(values)))
    drift = _polish(medians) if arms else np.zeros(0)
    return {arm: seconds[arm] * np.exp(-drift[columns[arm]]) for arm in arms}


def _polish(medians: Floats) -> Floats:
    """Drift of each round, from [arms, rounds] logarithms; nan where an arm was not visited."""
    drift = np.zeros(medians.shape[1])
    for _ in range(_POLISH_TIMES):
        level = np.nanmedian(medians - drift, axis=1, keepdims=True)
        drift = np.nanmedian(medians - level, axis=0)
        drift -= np.median(drift)
    return drift

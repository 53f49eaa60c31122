"""Defines the features of the cost model: the causes of cost that arms share, and their doubt."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm

# Standard deviations of the log-coefficients before any live step: the machine, its growth with
# log B; per drafter: drafting at all, passes, width times log B.  Then that of a single cell.
_DOUBT = {
    "profile": ((1.0, 0.3, 0.25, 0.15, 0.15), 0.03),
    "roofline": ((1.0, 0.3, 0.25, 0.25, 0.2), 0.08),
    "generic": ((3.0, 0.6, 0.3, 0.5, 0.4), 0.1),
}
# Process noise: standard deviations by which they may move in one step.
_PROCESS_NOISE = (0.005, 0.001, 0.0003, 0.0003, 0.0003)


def features(arms: Sequence[Arm], buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the features, [2 + 3 * drafters, arms, buckets].

    They are 1 and log B, and for each drafter: whether it drafts, passes, and width * log B.
    """
    drafters = list(dict.fromkeys(arm.drafter for arm in arms))
    log_batch = np.log2(buckets) / max(1.0, math.log2(buckets[-1]))
    found = np.zeros((2 + 3 * len(drafters), len(arms), len(buckets)))
    found[0] = 1.0
    found[1] = log_batch
    for d, drafter in enumerate(drafters):
        deepest = max(1, *(arm.gamma for arm in arms if arm.drafter == drafter), 1)
        for i, arm in enumerate(arms):
            if arm.drafter == drafter and arm.gamma > 0:
                found[2 + 3 * d, i] = 1.0
                found[3 + 3 * d, i] = arm.gamma / deepest
                width = math.log2(arm.gamma + 1) / math.log2(deepest + 1)
                found[4 + 3 * d, i] = width * log_batch
    return found


def doubt_before(source: str, coefficients: int) -> tuple[NDArray[np.float64], float]:
    """Returns the standard deviations before any live step: [coefficients], and a single cell's.

    source: "profile", or the prior's name.
    """
    shared, cell = _DOUBT[source]
    return _by_coefficient(shared, coefficients), cell


def process_noise(coefficients: int) -> NDArray[np.float64]:
    """Returns [coefficients, coefficients], the variance that a step adds."""
    return np.diag(np.square(_by_coefficient(_PROCESS_NOISE, coefficients)))


def _by_coefficient(values: Sequence[float], coefficients: int) -> NDArray[np.float64]:
    drafters = (coefficients - 2) // 3
    return np.array([*values[:2], *([*values[2:]] * drafters)])


def drafting_alike(arms: Sequence[Arm]) -> list[list[int]]:
    """Returns, by arm, the arms that draft with its drafter; none for gamma = 0."""
    return [
        [k for k, other in enumerate(arms) if other.gamma and other.drafter == arm.drafter]
        if arm.gamma
        else []
        for arm in arms
    ]

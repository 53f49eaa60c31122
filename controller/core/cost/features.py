"""Defines the features of the cost model: the causes of cost that arms share."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm


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

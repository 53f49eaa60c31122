"""Is cautious about costs that were not measured: a longer draft must pay even in a bad case.

    V'(arm, B) = V(arm, B) exp(-z sd(log V(arm, B) / V(now, B)))   for arms that draft more than now

`now` is the newest choice for the batch that has run in any batch.  Before any has run (at first,
or when an override chose an arm and was cleared before a step ran) it is gamma = 0.  A choice that
has not run yet does not take its place: measured from there the last choice would look doubtful,
and the two would alternate until a step runs.  The doubt is that about costs and acceptance
together.  It is large before the first steps and shrinks with what is seen, so that speculation is
extended from what has run.  Drafting less than now is never held back.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.planning.doubt import AcceptanceDoubt
from controller.core.planning.planner import Values

# Standard deviations by which things may turn out worse than expected: to begin with speculation,
# and to draft more than has paid already.
_DEVIATIONS_TO_BEGIN = 2.5
_DEVIATIONS_TO_EXTEND = 1.0


def discounts(
    values: Values,
    doubts: CostUncertainty,
    arms: Sequence[Arm],
    buckets: NDArray[np.int64],
    proven: Sequence[int | None],
) -> NDArray[np.float64] | None:
    """Returns [arms, rows] factors in (0, 1] on the values; None if costs were measured.

    buckets: [rows], the cost table's.  proven: [rows] newest choice that has run, by arm index,
    or None.
    """
    if not doubts.guessed:
        return None
    gammas = np.array([arm.gamma for arm in arms])
    least = int(gammas.argmin())
    now = np.array([least if arm is None else arm for arm in proven])
    acceptance = AcceptanceDoubt(values.traffic, arms)
    by_arm = {arm: acceptance.variance(arm) for arm in set(now.tolist())}
    doubt = doubts.relatives(buckets, now) + np.array([by_arm[arm] for arm in now.tolist()]).T
    names = list(dict.fromkeys(arm.drafter for arm in arms))
    drafter = np.array([names.index(arm.drafter) for arm in arms])
    others = (gammas[:, None] > 0) & (drafter[:, None] != drafter[now])
    more = others | (gammas[:, None] > gammas[now])
    z = np.where(gammas[now] > 0, _DEVIATIONS_TO_EXTEND, _DEVIATIONS_TO_BEGIN)
    return np.where(more, np.exp(-z * np.sqrt(doubt)), 1.0)

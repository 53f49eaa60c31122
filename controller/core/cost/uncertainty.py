"""Describes how uncertain the costs were at one moment, and which arms had run.

The cost model's features are causes of cost that arms share, each with its own uncertainty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.table import CostOrder
from controller.core.engine_spec import Arm
from controller.core.settings import PlannerSettings

# Standard deviations of the log-coefficients before any live step: the machine, its growth with
# log B; per drafter: drafting at all, passes, width times log B.  Then that of a single cell's
# correction.
_PRIOR_DEVIATIONS = {
    "profile": ((1.0, 0.3, 0.25, 0.15, 0.15), 0.03),
    "roofline": ((1.0, 0.3, 0.25, 0.25, 0.2), 0.08),
    "generic": ((3.0, 0.6, 0.3, 0.5, 0.4), 0.1),
}
# Process noise: standard deviations of the coefficients' change in one step.
_PROCESS_NOISE = (0.005, 0.001, 0.0003, 0.0003, 0.0003)
_Number = TypeVar("_Number", float, NDArray[np.float64])


def cost_features(arms: Sequence[Arm], buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the features, [2 + 3 * drafters, arms, buckets].

    They are 1 and log B, and for each drafter: whether it drafts, passes, and width * log B.
    """
    drafters = list(dict.fromkeys(arm.drafter for arm in arms))
    log_batch = np.log2(buckets) / max(1.0, math.log2(buckets[-1]))
    feature_values = np.zeros((2 + 3 * len(drafters), len(arms), len(buckets)))
    feature_values[0] = 1.0
    feature_values[1] = log_batch
    for d, drafter in enumerate(drafters):
        longest_gamma = max(1, *(arm.gamma for arm in arms if arm.drafter == drafter), 1)
        for i, arm in enumerate(arms):
            if arm.drafter == drafter and arm.gamma > 0:
                feature_values[2 + 3 * d, i] = 1.0
                feature_values[3 + 3 * d, i] = arm.gamma / longest_gamma
                width = math.log2(arm.gamma + 1) / math.log2(longest_gamma + 1)
                feature_values[4 + 3 * d, i] = width * log_batch
    return feature_values


def prior_deviations(source: str, coefficients: int) -> tuple[NDArray[np.float64], float]:
    """Returns the standard deviations before any live step: [coefficients], and a single cell's.

    source: "profile", or the prior's name.
    """
    shared_deviations, cell_deviation = _PRIOR_DEVIATIONS[source]
    return _by_coefficient(shared_deviations, coefficients), cell_deviation


def process_noise_covariance(coefficients: int) -> NDArray[np.float64]:
    """Returns [coefficients, coefficients], the variance that a step adds."""
    return np.diag(np.square(_by_coefficient(_PROCESS_NOISE, coefficients)))


def _by_coefficient(values: Sequence[float], coefficients: int) -> NDArray[np.float64]:
    drafters = (coefficients - 2) // 3
    return np.array([*values[:2], *([*values[2:]] * drafters)])


def arms_of_same_drafter(arms: Sequence[Arm]) -> list[list[int]]:
    """Returns for each arm the drafting arms of the same drafter; an empty list for gamma = 0."""
    return [
        [
            k
            for k, candidate in enumerate(arms)
            if candidate.gamma and candidate.drafter == arm.drafter
        ]
        if arm.gamma
        else []
        for arm in arms
    ]


@dataclass(frozen=True, slots=True)
class CostUncertainty:
    """Holds how uncertain the costs were at one moment.

    features: [coefficients, arms, buckets].  covariance: [coefficients, coefficients].  evidence:
    [arms, buckets], steps of each cell when it was updated last; last_steps: the step of that
    update, 0: never; current_step: the present step.  cell_prior_variance: prior variance of a
    single cell's correction; step_variance: variance of one step.  disagreement: [buckets] error of
    the estimates (log seconds) found since gamma = 0 ran.  is_near: [buckets, buckets], which are
    at similar batch sizes.  settings: those of the moment.  is_unprofiled: there is no profile.
    drift: [arms, buckets], factors by which live steps changed the table.
    """

    features: NDArray[np.float64]
    covariance: NDArray[np.float64]
    evidence: NDArray[np.float64]
    last_steps: NDArray[np.int64]
    current_step: int
    cell_prior_variance: float
    step_variance: float
    disagreement: NDArray[np.float64]
    is_near: NDArray[np.bool_]
    order: CostOrder
    settings: PlannerSettings
    is_unprofiled: bool
    drift: NDArray[np.float64]

    def has_run(self, arm: int, bucket: int) -> bool:
        """Returns whether an arm has run in a bucket."""
        return self.last_steps.item(arm, bucket) > 0

    def arms_that_ran(self) -> NDArray[np.bool_]:
        """Returns [arms], which have run in any bucket."""
        has_run_anywhere: NDArray[np.bool_] = self.last_steps.max(axis=1) > 0
        return has_run_anywhere

    def relative_variance(self, bucket: int, current: int) -> NDArray[np.float64]:
        """Returns [arms], the variance of log(C_arm / C_current) at a bucket."""
        return self.relative_variances(np.array([bucket]), np.array([current]))[:, 0]

    def relative_variances(
        self, buckets: NDArray[np.int64], current: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Returns [arms, rows], the variance of log(C_arm / C_current).

        buckets, current: [rows], the bucket and the arm (by index) of each.
        """
        rows = np.arange(len(buckets))
        phi = self.features.take(buckets, axis=2)
        feature_difference = phi - phi[:, None, current, rows]
        # `tensordot` is this product, and takes three times as long for tables of this size.
        propagated = np.dot(
            self.covariance, feature_difference.reshape(len(feature_difference), -1)
        ).reshape(feature_difference.shape)
        shared_variance = np.einsum("pab,pab->ab", feature_difference, propagated)
        cells = cell_variance(
            self.cell_prior_variance, self.step_variance, self._decayed_evidence(buckets)
        )
        variances: NDArray[np.float64] = (
            np.maximum(shared_variance, 0.0) + cells + cells[current, rows]
        )
        variances[current, rows] = 0.0
        return variances

    def is_off_due(self, bucket: int, gain: float) -> bool:
        """Returns whether gamma = 0 must run in a bucket, as a check on the estimates.

        It must run if the estimates disagree, and if it never ran in the bucket.  In a bucket with
        few steps or with a large gain, a run at a similar batch size is enough.

        gain: estimated value of the current arm over that of gamma = 0, as a ratio.
        """
        if self.disagreement.item(bucket) > self.settings.disagreement_max:
            return True
        last_steps, off_arms = self.last_steps, self.order.off_arms
        if any(last_steps.item(arm, bucket) for arm in off_arms):
            return False
        if (
            gain < self.settings.clear_gain
            and self.evidence[:, bucket].sum() >= self.settings.settled_steps
        ):
            return True
        near_steps = last_steps[:, self.is_near[bucket]]
        return not any(np.count_nonzero(near_steps[arm]) for arm in off_arms)

    def stale_arms(self, bucket: int) -> NDArray[np.bool_]:
        """Marks [arms] whose cost was last measured at least `stale_steps` ago.

        The last step at a similar batch size counts; if there is none, the last step at any batch
        size; for an arm that never ran, the last step of any arm that drafts.
        """
        nearby = self.last_steps[:, self.is_near[bucket]].max(axis=1)
        last_step = np.where(nearby > 0, nearby, self.last_steps.max(axis=1))
        last_drafting_step = self.last_steps[self.order.drafting_arms].max(initial=0)
        last_step = np.where(last_step > 0, last_step, last_drafting_step)
        is_stale: NDArray[np.bool_] = self.current_step - last_step >= self.settings.stale_steps
        return is_stale

    def reachable_arms(self, bucket: int) -> NDArray[np.bool_]:
        """Marks [arms] of each drafter up to the longest that has run at a bucket, and one more.

        The next longer one is marked only if the longest has run for at least
        `steps_before_longer` steps.
        """
        is_sure = (
            self._decayed_evidence(np.array([bucket]))[:, 0] >= self.settings.steps_before_longer
        )
        return self.order.reachable_arms(self.last_steps[:, bucket] > 0, is_sure)

    def _decayed_evidence(self, buckets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [arms, rows] of these buckets, the evidence faded by the steps since then."""
        idle_steps = self.current_step - self.last_steps.take(buckets, axis=1)
        evidence: NDArray[np.float64] = self.evidence.take(buckets, axis=1) * np.exp(
            idle_steps / -self.settings.cell_idle_steps
        )
        return evidence


def near_buckets(sizes: NDArray[np.float64], near_octaves: float) -> NDArray[np.bool_]:
    """Returns [buckets, buckets], whether two batch sizes are within this number of octaves."""
    octaves = np.log2(sizes)
    is_near: NDArray[np.bool_] = np.abs(octaves[:, None] - octaves[None, :]) <= near_octaves
    return is_near


def cell_variance(prior_variance: float, step_variance: float, steps: _Number) -> _Number:
    """Returns the variance of a single cell's correction after this many steps in it.

    prior_variance: the variance before any step.  step_variance: the variance of one step.
    """
    variance: _Number = prior_variance / (1 + steps * (prior_variance / step_variance))
    return variance

"""Compares predictions with outcomes, and with the estimated cost of other choices; for operators.

    predicted   for every plain step, the cost model's prediction of its seconds
    expected    for every drafted sequence, the accepted draft tokens assumed by the last plan
    instead     for every plain step, the seconds that another choice would need for its tokens

The last is an estimate and not a measurement, since a choice that did not run cannot be timed: the
step's seconds, times C_other / C_ran of the cost model, times (1 + accepted) / (1 + E_other) steps.
A slow machine would have been slow for the other choice too.  As C_off never exceeds C_ran, the
gain over off never exceeds the acceptance length.  The other choices are no speculation ("off": the
cheapest arm with gamma = 0), and the engine's choice without a plan ("static":
`EngineSpec.safe_gamma`).

A plain step is not part of a measurement, wakes no drafter, and has nothing else running beside it.
No decision uses these numbers.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from controller.core.engine_spec import Arm, EngineSpec
from controller.core.planning.planner import Values
from controller.core.step_report import StepReport


class PredictionAudit:
    """Keeps one engine's sums, which never decrease.

    plain_seconds, predicted_seconds: of the plain steps, as reported and as predicted.
    error_seconds: sum of the absolute differences of the two.  expected_tokens: expected accepted
    draft tokens.  alternative_seconds: of "off" and "static", if the engine has them.
    """

    def __init__(self, spec: EngineSpec, arms: Sequence[Arm]) -> None:
        self.plain_seconds = self.predicted_seconds = self.error_seconds = 0.0
        self.expected_tokens = 0.0
        alternatives = {
            "off": [i for i, arm in enumerate(arms) if arm.gamma == 0],
            "static": [i for i, arm in enumerate(arms) if arm == static_arm(spec)],
        }
        self._alternative_arms = {
            name: arm_indices for name, arm_indices in alternatives.items() if arm_indices
        }
        self.alternative_seconds = dict.fromkeys(self._alternative_arms, 0.0)
        # Of the last plan: expected draft tokens by arm and row, and the row of a batch size.
        self._expected_accepted = np.zeros((len(arms), 1))
        self._row_of: Callable[[int], int] = lambda _: 0
        # Seconds times tokens per sequence, by arm and batch size, since the last plan.
        self._pending: dict[tuple[int, int], float] = {}

    def observe(self, arm: int, report: StepReport, predicted_seconds: float | None) -> None:
        """Counts a step.  predicted_seconds: None for a step that is not plain."""
        size, rows = report.batch_size, report.decoded_rows
        self.expected_tokens += rows * self._expected_accepted.item(arm, self._row_of(size))
        if predicted_seconds is None:
            return
        seconds = report.step_seconds
        self.plain_seconds += seconds
        self.predicted_seconds += predicted_seconds
        self.error_seconds += abs(seconds - predicted_seconds)
        # Without a decoded row no choice would have generated tokens.
        tokens = rows + report.accepted_tokens
        cell, pending = (arm, size), self._pending
        pending[cell] = pending.get(cell, 0.0) + tokens / (rows or 1) * seconds

    def commit(self, values: Values, row_of: Callable[[int], int]) -> None:
        """Prices the observed steps with the values of a new plan.

        row_of: returns the row of the values for a batch size.
        """
        seconds, expected = values.costs.seconds.item, values.expected_accepted.item
        for (arm, size), weight in self._pending.items():
            row = row_of(size)
            for name, arm_indices in self._alternative_arms.items():
                seconds_per_token = min(
                    seconds(i, row) / (1 + expected(i, row)) for i in arm_indices
                )
                self.alternative_seconds[name] += weight * seconds_per_token / seconds(arm, row)
        self._pending.clear()
        self._expected_accepted, self._row_of = values.expected_accepted, row_of


def static_arm(spec: EngineSpec) -> Arm | None:
    """Returns the arm that the engine runs without a plan; None if it is unknown."""
    return None if spec.safe_gamma is None else Arm(spec.drafters[0].name, spec.safe_gamma)


def estimate_gains(values: Mapping[Arm, float], spec: EngineSpec, chosen: Arm) -> dict[str, float]:
    """Estimates the tokens per second of the chosen arm over "off" and "static", if they exist.

    Over "off" it is (1 + E) C_off / C_chosen, and so at most the expected acceptance length.

    values: tokens per second, by arm.
    """
    baseline_arm = static_arm(spec)
    alternatives = {
        "off": [value for arm, value in values.items() if arm.gamma == 0],
        "static": [] if baseline_arm is None else [values[baseline_arm]],
    }
    return {name: values[chosen] / max(rates) for name, rates in alternatives.items() if rates}

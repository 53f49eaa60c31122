"""Estimates the cost of a step, C(d, B, gamma, kv): measured once and refined by live steps.

    log C = log(grid[arm, B] + k_kv * (kv - B * kv_ref)) + phi(arm, B) . w + cell[arm, B]

`grid` comes from a profile or, without one, from a prior, which `explain` shows.

Live steps update w, a few coefficients, with a Kalman filter: the machine's present pace (it adapts
quickly and affects all arms alike, so a slow minute is no reason to switch), its growth with B,
and for each drafter the cost of drafting at all, of each further pass, and of the verified width.
So one arm that is more expensive than its table raises all arms that share the cause.  The residual
is added to the single cell, and half of it to its neighbours in B, but not from a cell that the
profile did not measure to one that it did.  The uncertainty of cells that have not run grows with
the errors found on first visits to other cells.

Two rules keep a slow minute from being charged to the arms that ran in it.  If the same cell runs
again and its time changes, only the machine can have changed; if the time of a known cell changes
abruptly, that is by far the most likely cause.  w then treats the change as pace, whatever the
other uncertainties.  And more work never costs less (`CostOrder`): where the estimates break that
order, older ones are moved and become uncertain.  In both cases gamma = 0 is due for a check.

A step far outside the usual scatter, or six times as fast as predicted, changes nothing until
another step of its cell confirms it, and then by the smaller error; a known cell needs six.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import Profile
from controller.core.cost.table import CostOrder, Costs, CostTable, Prior
from controller.core.cost.uncertainty import (
    DISAGREEMENT_MAX,
    IDLE_STEPS,
    STALE_STEPS,
    CostUncertainty,
    cell_variance,
    doubt_before,
    drafting_alike,
    features,
    near,
    process_noise,
)
from controller.core.engine_spec import Arm
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings

# Learning rate per update of the machine's pace variation, and its maximum (log seconds).
_PACE_RATE = 0.1
_PACE_MAX = 0.3
_KV_RATE = 0.05
_NEIGHBOUR_SHARE = 0.5
# Standard deviation (log seconds) of a cell that the profile did not measure.
_EXTRAPOLATED_DOUBT = 0.3
# An error above this many standard deviations, and this many log seconds, is a change, not noise.
_DEVIATIONS = 3.0
_CHANGE_MIN = 0.1
# After a change of cell, an error is taken for pace only above this minimum (log seconds), and only
# if the cell is known by this many steps; the cell itself may have changed by this share.
_LEAP_MIN = 0.3
_LEAP_SHARE = 0.2
_STEPS_SURE = 4
# A bucket with fewer steps than this is new.
_STEPS_NEW = 2
_STEPS_AN_UPDATE = 8
_STEPS_KNOWN = 32
_CELL_RATE_MIN = 0.01
_SCATTER_START = 0.05
_SCATTER_MIN = 0.01
_SCATTER_RATE = 0.02
_OUTLIER_SCALES = 6.0
_OUTLIER_FLOOR = 0.4
_OUTLIERS_THAT_ARE_NEWS = 6
# A step more than six times as fast as predicted (log seconds) is an outlier.  A smaller speedup
# counts at once, so that a better arm is used soon.
_FASTER_MAX = 1.8
_SURPRISE_RATE = 0.2
_SURPRISE_MAX = 100.0
_SURPRISE_USUAL = 4.0
# Maximum growth of the coefficients' variance because of surprising steps, as a factor.
_DOUBT_GROWTH_MAX = 9.0


@recorded("pending_errors")
@dataclass(slots=True)
class _Pending:
    """Sum of the errors of one cell since the last update."""

    total: float = 0.0
    steps: int = 0


@recorded(
    "cost_model",
    "rejected steps _cell _cell_seen _cell_steps _correction _covariance _disagreed _factors "
    "_kv_per_sequence _last_cell _last_error _now_cell _outliers_in_a_row _pace _pending "
    "_scatter _surprise _weights",
    derived="_new",
    added="_held",
)
class CostModel:
    """Estimates the costs of `arms` at the batch sizes `buckets` (ascending), for one engine.

    padded: a batch runs as large as its bucket (captured graphs); else at its own size.
    prior: for an engine without a profile; by default the generic one.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        buckets: Sequence[int],
        profile: Profile | None,
        settings: PlannerSettings,
        *,
        padded: bool = False,
        prior: Prior | None = None,
    ) -> None:
        self._order = CostOrder(arms)
        self._table = CostTable(arms, buckets, profile, self._order, padded=padded, prior=prior)
        self._extrapolated = self._table.extrapolated
        self.profile_id, self.prior = self._table.profile_id, self._table.prior
        shape = self._table.grid.shape
        self._off = np.array([arm.gamma == 0 for arm in arms])
        self._kin = drafting_alike(arms)
        self._near = near(self._table.sizes)
        self.use_settings(settings)
        self._features = features(arms, self._table.sizes)
        self._flat_features = self._features.reshape(len(self._features), -1)
        # [arms, buckets, coefficients]: contiguous by cell.
        self._causes = np.ascontiguousarray(np.moveaxis(self._features, 0, -1))
        sigma, self._cell_sigma = doubt_before(self.prior or "profile", len(self._features))
        self._process_noise = process_noise(len(sigma))
        self._weights = np.zeros(len(sigma))
        self._covariance = np.diag(sigma**2)
        self._covariance_start = float(np.trace(self._covariance))
        self._cell = np.zeros(shape)
        self._cell_steps = np.zeros(shape)
        # The step at which each cell was updated last; 0: never.
        self._cell_seen = np.zeros(shape, dtype=np.int64)
        # [buckets] error of the estimates (log seconds) found since gamma = 0 last ran there.
        self._disagreed = np.zeros(len(buckets))
        self._kv_per_sequence = self._table.kv_reference
        self._surprise = 1.0
        self._pace = 0.0
        # The cell that was updated last, and the cell of the last step.
        self._last_cell = self._now_cell = (-1, -1)
        self._last_error = 0.0
        self._scatter = _SCATTER_START
        self._outliers_in_a_row = 0
        # By cell, the error of an outlier that no other step has confirmed, relative to the table.
        self._held: dict[tuple[int, int], float] = {}
        self._pending: dict[tuple[int, int], _Pending] = {}
        self.rejected = self.steps = 0
        self._refresh()

    def use_settings(self, settings: PlannerSettings) -> None:
        """Updates the bound on how far live steps may move the costs."""
        profiled, prior = settings.cost_drift_max_profiled, settings.cost_drift_max_prior
        self._drift_max = math.log(profiled if self.profile_id else prior)

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Returns the buckets' batch sizes."""
        return self._table.sizes

    def bucket_of(self, batch_size: int) -> int:
        """Returns the index of the bucket that serves a batch size."""
        return self._table.bucket_of(batch_size)

    def predict(self, arm: int, batch_size: int, kv_tokens: int) -> float:
        """Predicts the seconds of a plain step of this arm (by index) at this batch and context."""
        factor = self._factors.item(arm, self.bucket_of(batch_size))
        return self._table.seconds_of(arm, batch_size, kv_tokens) * factor

    def observe(
        self,
        arm: int,
        batch_size: int,
        kv_tokens: int,
        expected_seconds: float,
        step_seconds: float,
    ) -> bool:
        """Adds one plain step (the caller omits distorted ones); False if it is rejected for now.

        expected_seconds: the result of `predict` for it.
        """
        self._kv_per_sequence += _KV_RATE * (kv_tokens / batch_size - self._kv_per_sequence)
        error = math.log(step_seconds / expected_seconds)
        cell = (arm, self.bucket_of(batch_size))
        error, steps = self._shown(cell, error)
        if steps == 0:
            return False
        self.steps += steps
        if self.steps > steps:
            # Differences between successive steps: the machine's pace cancels out.
            apart = min(abs(error - self._last_error) / math.sqrt(2), 0.5)
            excess = apart - self._scatter
            self._scatter = max(_SCATTER_MIN, self._scatter + _SCATTER_RATE * excess)
        self._last_error = error
        self._now_cell = cell
        pending = self._pending.setdefault(cell, _Pending())
        # Relative to the table: the correction may have moved before this is learnt.
        pending.total += steps * (error + self._correction.item(cell))
        pending.steps += steps
        return True

    def _shown(self, cell: tuple[int, int], error: float) -> tuple[float, int]:
        """Returns the error to learn from, and its number of steps; 0 steps if there is none yet.

        error: of this step.  A single outlier is not used; two outliers of a cell give the smaller
        error.  A known cell needs more, unless it is faster and was not measured for long.
        """
        held = self._held.pop(cell, None)
        limit = max(_OUTLIER_FLOOR, _OUTLIER_SCALES * self._scatter)
        nothing_known = self.steps == 0 and self.prior == "generic"
        if -_FASTER_MAX <= error <= limit or nothing_known:
            self._outliers_in_a_row = 0
            self.rejected += held is not None
            return error, 1
        self._outliers_in_a_row += 1
        if self._outliers_in_a_row >= _OUTLIERS_THAT_ARE_NEWS:
            return error, 1
        is_recent = error > 0 or self._idle(cell) < STALE_STEPS
        if is_recent and self._evidence(cell) >= _STEPS_SURE:
            self.rejected += 1
            return 0.0, 0
        if held is not None and (before := held - self._correction.item(cell)) * error > 0:
            return min(before, error, key=abs), 2
        self.rejected += held is not None
        self._held[cell] = error + self._correction.item(cell)
        return 0.0, 0

    def learn(self) -> None:
        """Updates the coefficients and cells from the steps observed since the last call."""
        # An update of many steps costs no more than of one, so a well-known cell waits for more of
        # them, but only while it keeps running: later steps would belong to another pace.
        ready = [
            cell for cell, pending in self._pending.items()
            if cell != self._now_cell or pending.steps >= _STEPS_AN_UPDATE
            or self._cell_steps.item(cell) < _STEPS_KNOWN
        ]  # fmt: skip
        for i, j in ready:
            pending = self._pending.pop((i, j))
            found = pending.total / pending.steps
            believed = float(self._causes[i, j] @ self._weights) + self._cell.item(i, j)
            self._learn_cell(i, j, found - believed, pending.steps)
        if ready:
            self._refresh()
            self._keep_order()

    def _learn_cell(self, i: int, j: int, error: float, steps: int) -> None:
        phi, covariance = self._causes[i, j], self._covariance
        prior, noise = self._variances()
        outside = self._extrapolated.item(i, j)
        if outside:
            # The error there is due to the extrapolation or the machine's pace, not to the arm.
            phi = np.eye(1, len(phi))[0]
            prior = max(prior, _EXTRAPOLATED_DOUBT**2)
        evidence = self._evidence((i, j))
        is_new = evidence == 0
        if is_old := error < -_LEAP_MIN and self._idle((i, j)) >= STALE_STEPS:
            # A new measurement shows that it is not as slow as it once was.
            evidence = 0.0
        cell_doubt = cell_variance(prior, noise, evidence)
        noise /= steps
        runs_on = (i, j) == self._last_cell
        if runs_on:
            # Only the time has changed: an error beyond scatter is the machine's pace.
            jump = min(max(error * error - cell_doubt - noise, 0.0), _PACE_MAX**2)
            self._pace += _PACE_RATE * (jump - self._pace)
        self._last_cell = (i, j)
        covariance += steps * self._process_noise
        covariance[0, 0] += self._pace
        spread = covariance @ phi
        total = float(phi @ spread) + cell_doubt + noise
        least = _CHANGE_MIN if runs_on else _LEAP_MIN
        known = runs_on or evidence >= _STEPS_SURE
        forgotten = is_old and not outside and self._is_forgotten(i)
        if (known or forgotten) and abs(error) > max(_DEVIATIONS * math.sqrt(total), least):
            # The machine's coefficient, or that of a drafter that has not run for long.
            cause = 2 + int(phi[2:].argmax()) if forgotten else 0
            covariance[cause, cause] += error * error
            if known and not runs_on:
                # If this repeats whenever the arm runs, the arm is the cause.
                cell_doubt += (_LEAP_SHARE * error) ** 2
                evidence /= 2
            spread = covariance @ phi
            total = float(phi @ spread) + cell_doubt + noise
        if self._off[i]:
            self._disagreed[j] = 0.0
        elif abs(error) > max(_DEVIATIONS * math.sqrt(cell_doubt + noise), _CHANGE_MIN):
            # Either the machine has changed or the estimates are wrong: gamma = 0 shows which.
            self._disagreed[j] += abs(error)
        if is_new and self.steps > steps and not outside:
            covariance *= self._growth_of_doubt(error * error / total)
            spread = covariance @ phi
            total = float(phi @ spread) + cell_doubt + noise
        gain = spread / total
        self._weights += gain * error
        # Exactly symmetric: growth of the covariance would amplify any asymmetry to negative
        # variances.
        covariance -= spread[:, None] * spread / total
        left = error * (1 - float(phi @ gain))
        rate = max(cell_doubt / (cell_doubt + noise), min(1.0, _CELL_RATE_MIN * steps))
        self._cell_steps[i, j] = evidence + steps
        self._cell_seen[i, j] = self.steps
        for k, share in ((j - 1, _NEIGHBOUR_SHARE), (j, 1.0), (j + 1, _NEIGHBOUR_SHARE)):
            if 0 <= k < len(self._disagreed) and self._extrapolated.item(i, k) >= outside:
                moved = self._cell.item(i, k) + rate * share * left
                self._cell[i, k] = min(self._drift_max, max(-self._drift_max, moved))

    def _evidence(self, cell: tuple[int, int]) -> float:
        """Returns a cell's evidence in steps, faded by the steps since it was updated."""
        return self._cell_steps.item(cell) * math.exp(-self._idle(cell) / IDLE_STEPS)

    def _idle(self, cell: tuple[int, int]) -> int:
        """Returns the steps since a cell was updated."""
        return self.steps - self._cell_seen.item(cell)

    def _is_forgotten(self, arm: int) -> bool:
        """Returns whether the arm's drafter has drafted, but not for STALE_STEPS."""
        last = self._cell_seen[self._kin[arm]].max(initial=0)
        return bool(0 < last <= self.steps - STALE_STEPS)

    def _growth_of_doubt(self, surprise: float) -> float:
        """Returns the factor on the covariance after the first steps of a cell.

        surprise: their squared error, over the variance that was expected.
        """
        found = min(max(surprise, 0.0), _SURPRISE_MAX)
        self._surprise += _SURPRISE_RATE * (found - self._surprise)
        if found <= _SURPRISE_USUAL:
            return 1.0
        # The table's error exceeds its uncertainty: trust it less.
        room = _DOUBT_GROWTH_MAX * self._covariance_start / float(np.trace(self._covariance))
        return max(1.0, min(found / 2, room))

    def _variances(self) -> tuple[float, float]:
        """Returns the prior variance of a single cell's correction, and the variance of a step."""
        return self._cell_sigma**2 * max(1.0, self._surprise), (1.25 * self._scatter) ** 2

    def _keep_order(self) -> None:
        """Moves cells so that more work costs no less, at the present context."""
        seconds = self._table.seconds(self._kv_per_sequence) * self._factors
        if self._order.is_ordered(seconds):
            return
        before, moved = self._cell, np.log(self._order.settled(seconds, self._cell_seen) / seconds)
        # Without the bound the next step nearby would reverse the change, and coefficients diverge.
        self._cell = np.clip(before + moved, -self._drift_max, self._drift_max)
        moved = self._cell - before
        self._cell_steps[np.abs(moved) > DISAGREEMENT_MAX] = 0.0
        if self._off.any():
            self._disagreed += np.abs(moved[self._off]).max(axis=0)
        self._refresh()

    def _refresh(self) -> None:
        shared = (self._weights @ self._flat_features).reshape(self._cell.shape)
        # Only the drift between arms affects a choice.  It is bounded; the machine's drift is not.
        machine = shared.min(axis=0)
        bounded = np.minimum(shared - machine, 2 * self._drift_max) + machine
        self._correction = bounded + self._cell
        self._factors: NDArray[np.float64] = np.exp(self._correction)
        # [buckets], see `is_new`.
        self._new: list[bool] | None = None

    def is_new(self, batch_size: int) -> bool:
        """Returns whether fewer than two plain steps of any arm were observed in its bucket."""
        if self._new is None:
            self._new = (self._cell_steps.sum(axis=0) < _STEPS_NEW).tolist()
        return self._new[self.bucket_of(batch_size)]

    def is_known(self, arm: int, batch_size: int) -> bool:
        """Returns whether enough plain steps of this arm (by index) were observed there."""
        return bool(self._cell_steps[arm, self.bucket_of(batch_size)] >= _STEPS_SURE)

    def drift(self) -> NDArray[np.float64]:
        """Returns [arms, buckets], the factors of live steps on the table; 1 = unchanged."""
        return self._factors

    def costs(self, kv_tokens_per_sequence: float | NDArray[np.float64]) -> Costs:
        """Returns the costs at the buckets' batch sizes.

        kv_tokens_per_sequence: mean context length, of all batches or [buckets].
        """
        # The costs must be in order at this context, not only at the context of past steps.
        seconds = self._table.seconds(kv_tokens_per_sequence) * self._factors
        alike = np.ndim(kv_tokens_per_sequence) == 0
        return Costs(self._order.lowered(seconds, over_batches=alike), self._extrapolated)

    def uncertainty(self) -> CostUncertainty:
        """Returns the present uncertainty of the costs, as a copy."""
        return CostUncertainty(
            self._features,
            self._covariance.copy(),
            self._cell_steps.copy(),
            self._cell_seen.copy(),
            self.steps,
            *self._variances(),
            self._disagreed.copy(),
            self._off,
            self._near,
            self._order,
            bool(self.prior),
            self._factors,
        )

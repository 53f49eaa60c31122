"""Estimates what a step costs: C(d, B, gamma, kv), measured once and refined by live steps.

    log C = log(grid[arm, B] + k_kv * (kv - B * kv_ref)) + phi(arm, B) . w + cell[arm, B]

`grid` comes from a profile or, without one, from a prior, which `explain` shows.

Live steps move w, a handful of coefficients with a Kalman filter: how slow the machine is right
now (quick: it moves every arm alike, so a slow minute is no reason to switch), how that grows with
B, and per drafter what drafting at all, each further pass, and the verified width add.  So one arm
that turns out more expensive than its table moves all arms that share the cause.  The rest of the
error goes to the single cell and half of it to its neighbours in B, but not from a cell that the
profile did not measure to one that it did.  A table that surprises is trusted less: the doubt about
cells never run grows with the errors found on first visits.

Two rules keep a slow minute from being charged to the arms that ran in it.  When a cell runs on and
its time changes, only the machine can have changed, and when the time of a known cell leaps, that
is by far the likeliest cause: w takes the change as pace, whatever the doubt about the rest.  And
more work never costs less (`CostOrder`): where what was learnt breaks that order, the older
knowledge gives way to the newer and is doubted.  After either, gamma = 0 is due for a check.

A step that is far outside the usual scatter, or six times as fast as believed, moves nothing before
another one of its cell confirms it, and then as far as the two agree; a known cell takes six.
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

# How quickly the variation of the machine's pace is learnt, an update; its maximum (log seconds).
_PACE_RATE = 0.1
_PACE_MAX = 0.3
_KV_RATE = 0.05
_NEIGHBOUR_SHARE = 0.5
# Standard deviation (log seconds) of a cell that the profile did not measure.
_EXTRAPOLATED_DOUBT = 0.3
# An error of so many standard deviations, and of so much (log seconds), is a change and not noise.
_DEVIATIONS = 3.0
_CHANGE_MIN = 0.1
# After a change of cell only so much is taken for pace, and only if the cell was known by so many
# steps; the cell itself may have changed by this share.
_LEAP_MIN = 0.3
_LEAP_SHARE = 0.2
_STEPS_SURE = 4
# A bucket with fewer steps is new.
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
# A step six times as fast as believed (log seconds) is far; less counts at once: a better arm's.
_FASTER_MAX = 1.8
_SURPRISE_RATE = 0.2
_SURPRISE_MAX = 100.0
_SURPRISE_USUAL = 4.0
# How far surprise may widen the doubt about the coefficients, as a factor of their variance.
_DOUBT_GROWTH_MAX = 9.0


@recorded("pending_errors")
@dataclass(slots=True)
class _Pending:
    """Sums the errors of one cell since the last update."""

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
        # [arms, buckets, coefficients]: those of a cell lie together.
        self._causes = np.ascontiguousarray(np.moveaxis(self._features, 0, -1))
        sigma, self._cell_sigma = doubt_before(self.prior or "profile", len(self._features))
        self._process_noise = process_noise(len(sigma))
        self._weights = np.zeros(len(sigma))
        self._covariance = np.diag(sigma**2)
        self._covariance_start = float(np.trace(self._covariance))
        self._cell = np.zeros(shape)
        self._cell_steps = np.zeros(shape)
        # The step after which a cell was learnt last; 0: never.
        self._cell_seen = np.zeros(shape, dtype=np.int64)
        # [buckets] error of the estimates (log seconds) that was found since gamma = 0 ran there.
        self._disagreed = np.zeros(len(buckets))
        self._kv_per_sequence = self._table.kv_reference
        self._surprise = 1.0
        self._pace = 0.0
        # The cell that was learnt last, and the one that was seen last.
        self._last_cell = self._now_cell = (-1, -1)
        self._last_error = 0.0
        self._scatter = _SCATTER_START
        self._outliers_in_a_row = 0
        # By cell, the error of a far step that no other step has confirmed, relative to the table.
        self._held: dict[tuple[int, int], float] = {}
        self._pending: dict[tuple[int, int], _Pending] = {}
        self.rejected = self.steps = 0
        self._refresh()

    def use_settings(self, settings: PlannerSettings) -> None:
        """Sets how far live steps may move the costs from now on."""
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
        """Takes one plain step (the caller leaves out distorted ones); False if it is not believed.

        expected_seconds: what `predict` gave for it.
        """
        self._kv_per_sequence += _KV_RATE * (kv_tokens / batch_size - self._kv_per_sequence)
        error = math.log(step_seconds / expected_seconds)
        cell = (arm, self.bucket_of(batch_size))
        error, steps = self._shown(cell, error)
        if steps == 0:
            return False
        self.steps += steps
        if self.steps > steps:
            # From step to step: what both share is the machine's pace and not scatter.
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
        """Returns the error that can be believed, and of how many steps; of none while it cannot.

        error: of this step.  One far step shows nothing: what two of a cell show, it does,
        as far as they agree; a known cell takes more, unless it proves faster after a long time.
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
        """Moves the coefficients and cells by what was observed since the last call."""
        # One update takes as long for many steps, so a well-known cell waits for more of them, but
        # only while it runs on: mixed with later ones they would belong to another pace.
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
            # What is wrong there is the extrapolation or the machine's pace, and not the arm.
            phi = np.eye(1, len(phi))[0]
            prior = max(prior, _EXTRAPOLATED_DOUBT**2)
        evidence = self._evidence((i, j))
        is_new = evidence == 0
        if is_old := error < -_LEAP_MIN and self._idle((i, j)) >= STALE_STEPS:
            # It was measured again, and is not as slow as it was once seen to be.
            evidence = 0.0
        cell_doubt = cell_variance(prior, noise, evidence)
        noise /= steps
        runs_on = (i, j) == self._last_cell
        if runs_on:
            # Nothing changed but the time: what exceeds scatter is the machine's pace.
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
            # The machine's, or that of a drafter that nothing was seen of for long.
            cause = 2 + int(phi[2:].argmax()) if forgotten else 0
            covariance[cause, cause] += error * error
            if known and not runs_on:
                # If it keeps happening whenever this arm runs, the arm is the cause.
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
        # Symmetric to the last bit: growth of doubt enlarges what is not, to negative variances.
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
        """Returns the steps behind a cell, without what they have lost while others ran."""
        return self._cell_steps.item(cell) * math.exp(-self._idle(cell) / IDLE_STEPS)

    def _idle(self, cell: tuple[int, int]) -> int:
        """Returns the steps since a cell was learnt."""
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
        # The table is wrong by more than its doubt allows: trust it less.
        room = _DOUBT_GROWTH_MAX * self._covariance_start / float(np.trace(self._covariance))
        return max(1.0, min(found / 2, room))

    def _variances(self) -> tuple[float, float]:
        """Returns the variance of what a single cell adds before any step, and of one step."""
        return self._cell_sigma**2 * max(1.0, self._surprise), (1.25 * self._scatter) ** 2

    def _keep_order(self) -> None:
        """Moves cells so that more work costs no less, at the present context."""
        seconds = self._table.seconds(self._kv_per_sequence) * self._factors
        if self._order.is_ordered(seconds):
            return
        before, moved = self._cell, np.log(self._order.settled(seconds, self._cell_seen) / seconds)
        # Beyond the bound the next step nearby throws cells back, and coefficients diverge.
        self._cell = np.clip(before + moved, -self._drift_max, self._drift_max)
        moved = self._cell - before
        self._cell_steps[np.abs(moved) > DISAGREEMENT_MAX] = 0.0
        if self._off.any():
            self._disagreed += np.abs(moved[self._off]).max(axis=0)
        self._refresh()

    def _refresh(self) -> None:
        shared = (self._weights @ self._flat_features).reshape(self._cell.shape)
        # Only the drift between arms matters to a choice: it is bounded, the machine's is not.
        machine = shared.min(axis=0)
        bounded = np.minimum(shared - machine, 2 * self._drift_max) + machine
        self._correction = bounded + self._cell
        self._factors: NDArray[np.float64] = np.exp(self._correction)
        # [buckets], whether each is new, see `is_new`.
        self._new: list[bool] | None = None

    def is_new(self, batch_size: int) -> bool:
        """Returns whether hardly a plain step of any arm has shown what steps cost there."""
        if self._new is None:
            self._new = (self._cell_steps.sum(axis=0) < _STEPS_NEW).tolist()
        return self._new[self.bucket_of(batch_size)]

    def is_known(self, arm: int, batch_size: int) -> bool:
        """Returns whether plain steps of this arm (by index) have shown what it costs there."""
        return bool(self._cell_steps[arm, self.bucket_of(batch_size)] >= _STEPS_SURE)

    def drift(self) -> NDArray[np.float64]:
        """Returns the factors by which live steps moved the table: [arms, buckets], 1 = unmoved."""
        return self._factors

    def costs(self, kv_tokens_per_sequence: float | NDArray[np.float64]) -> Costs:
        """Returns the costs at the buckets' batch sizes.

        kv_tokens_per_sequence: mean context length, of all batches or [buckets].
        """
        # They must be in order at this context, not only at the one at which they were learnt.
        seconds = self._table.seconds(kv_tokens_per_sequence) * self._factors
        alike = np.ndim(kv_tokens_per_sequence) == 0
        return Costs(self._order.lowered(seconds, over_batches=alike), self._extrapolated)

    def uncertainty(self) -> CostUncertainty:
        """Returns how uncertain the costs are now, as a copy that later steps do not change."""
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

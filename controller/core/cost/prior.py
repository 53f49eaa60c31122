"""Estimates costs before anything was measured: by a roofline for known shapes, else by a guess.

Both are marked (`prior` in `explain`, `profile-missing` on every plan), and live steps correct
both; the roofline needs less correction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.devices import device
from controller.core.cost.roofline import prior_grid
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.model_shapes import InvalidShapeError
from controller.core.step_report import MAX_STEP_SECONDS

# Shape of the guess: tokens per step at which compute starts to show, cost of one draft pass
# relative to a target pass, and the seconds that the first live steps correct.
_SATURATION_TOKENS = 256.0
_DRAFT_SHARE = 0.12
_STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Prior:
    """Holds the costs of an engine without a profile.

    name: "roofline", or "generic" when a shape or the GPU's numbers are not known.  grid: [arms,
    buckets] seconds at kv = 0.  kv_rate: seconds per KV token.
    """

    name: str
    grid: NDArray[np.float64]
    kv_rate: float


def prior_for(spec: EngineSpec, arms: Sequence[Arm], buckets: Sequence[int]) -> Prior:
    """Returns the best prior for an engine that was not profiled."""
    shapes = {d.name: d.shape for d in spec.drafters if d.shape is not None}
    for drafter in spec.drafters:
        # Its free drafter costs next to nothing.
        if drafter.mixture is not None and (main := shapes.get(drafter.mixture.main)) is not None:
            shapes[drafter.name] = main
    if spec.shape is None or len(shapes) < len(spec.drafters):
        return generic_prior(arms, buckets)
    try:
        gpus = max(1, spec.fingerprint.tensor_parallel_size)
        gpu = device(spec.fingerprint.device).with_typical_overheads().tensor_parallel(gpus)
        grid, rate = prior_grid(arms, shapes, buckets, spec.shape, gpu)
    except InvalidShapeError:
        # Not a GPU of the table, or a draft longer than its block.
        return generic_prior(arms, buckets)
    if grid.max() <= MAX_STEP_SECONDS and rate <= MAX_STEP_SECONDS:
        return Prior("roofline", grid, rate)
    # Each number is possible, and their combination is not.
    return generic_prior(arms, buckets)


def generic_prior(arms: Sequence[Arm], buckets: Sequence[int]) -> Prior:
    """Guesses t0 * (1 + B (gamma + 1) / B_sat + gamma * d)."""
    gammas = np.array([[float(arm.gamma)] for arm in arms])
    tokens = np.asarray(buckets, dtype=np.float64) * (gammas + 1)
    relative: NDArray[np.float64] = 1 + tokens / _SATURATION_TOKENS + _DRAFT_SHARE * gammas
    return Prior("generic", _STEP_SECONDS * relative, 0.0)

"""A small engine with known costs and acceptance."""

from dataclasses import replace

import numpy as np

from controller.core.engine_spec import DrafterSpec
from controller.core.model_shapes import DrafterKind
from simulator.controller_policy import FINGERPRINT
from simulator.curves import IndependentCurves
from simulator.scenarios.scenario_file import Scenario
from simulator.sources import ClosedSource, OpenSource, PhaseSpec, draw_lengths
from simulator.surface import CostSurface
from simulator.workload import PhaseStart

GAMMAS = (0, 1, 3, 7)


def surface(drafters=("mtp",), max_batch_size=32, catch_up=0.0):
    sizes = np.maximum(np.arange(max_batch_size + 1, dtype=float), 1.0)
    specs = tuple(DrafterSpec(name, DrafterKind.MTP, GAMMAS) for name in drafters)
    rows = [
        0.005 + (0.001 + 0.0004 * g if g else 0.0) + 2e-5 * sizes * (g + 1)
        for _ in specs
        for g in GAMMAS
    ]
    return CostSurface(
        "small", specs, np.vstack(rows), np.full(len(rows), 1e-8), 256.0, 2e-5, catch_up
    )


def pool(acceptance=0.7, requests=64, output=40, seed=0, drafters=("mtp",)):
    rng = np.random.default_rng(seed)
    lengths = np.full(requests, output, dtype=np.int64)
    curves = IndependentCurves("small", {name: [acceptance] * 8 for name in drafters})
    return curves.pool(rng, requests, lengths, lengths * 3)


def scenario(acceptance=(0.9, 0.1), batch=4, tokens=300, seeds=2, **changes):
    costs = surface()
    phases = tuple(
        PhaseSpec(
            f"{i}",
            IndependentCurves(f"a{a}", {"mtp": [a] * 8}),
            batch,
            batch * tokens,
            PhaseStart.CHANGED,
        )
        for i, a in enumerate(acceptance)
    )
    profile = costs.make_profile(FINGERPRINT, [1, 2, 4, 8, 16, 32])
    base = Scenario(
        "small", "test", "a test", costs, ClosedSource(phases, 40.0, 64.0), profile, 32,
        shifting=len(acceptance) > 1, seeds=seeds,
    )  # fmt: skip
    return replace(base, **changes)


def arrivals(per_second=6.0, requests=120, acceptance=0.4, **changes):
    """Requests that come one by one, at random, and are drafted for with this acceptance."""
    rng = np.random.default_rng(11)
    times = np.cumsum(rng.exponential(1 / per_second, requests))
    source = OpenSource(
        IndependentCurves("a", {"mtp": [acceptance] * 8}), times - times[0],
        draw_lengths(rng, requests, 200.0),
        draw_lengths(rng, requests, 60.0), 32, 5.0,
    )  # fmt: skip
    return scenario(workload=source, shifting=False, name="arrivals", **changes)

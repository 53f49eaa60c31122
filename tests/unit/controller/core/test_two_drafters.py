"""Two drafters whose fields are different traffic: each is found again where it is good."""

import math
import random
import statistics

import pytest

from controller.core.clock import VirtualClock
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Capabilities, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from tests.support.accepted_counts import accepted_counts

GAMMAS = (0, 1, 2, 3, 5, 7)
# Acceptance by position of a chain and of a block, as the small models show it.
TRAFFIC = {
    "json": ([0.9, 0.9, 0.88, 0.87, 0.86, 0.85, 0.85], [0.89, 0.96, 0.95, 0.95, 0.94, 0.93, 0.93]),
    "code": ([0.5, 0.48, 0.45, 0.45, 0.4, 0.4, 0.4], [0.16] + [0.2] * 6),
    "prose": ([0.34, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2], [0.14] + [0.2] * 6),
    "csv": ([0.78, 0.75, 0.72, 0.7, 0.7, 0.7, 0.7], [0.79, 0.8, 0.85, 0.85, 0.85, 0.9, 0.85]),
}


def seconds(drafter: str, gamma: int, batch_size: int) -> float:
    """A chain pays for every token that it drafts, a block once."""
    draft = {"eagle3": 1.7e-3 * gamma, "dflash": 4e-3}[drafter] if gamma else 0.0
    return 0.02 + draft + 1.5e-4 * batch_size * (gamma + 1)


def value(kind: str, drafter: str, gamma: int, batch_size: int) -> float:
    acceptance = TRAFFIC[kind][drafter == "dflash"]
    expected = sum(math.prod(acceptance[:k]) for k in range(1, gamma + 1))
    return batch_size * (1 + expected) / seconds(drafter, gamma, batch_size)


ARMS = [("eagle3", gamma) for gamma in GAMMAS] + [("dflash", gamma) for gamma in GAMMAS[1:]]


def engine() -> tuple[EngineController, VirtualClock]:
    drafters = (
        DrafterSpec("eagle3", DrafterKind.MTP, GAMMAS),
        DrafterSpec("dflash", DrafterKind.DFLASH, GAMMAS[1:]),
    )
    spec = EngineSpec(
        "e", Fingerprint("target"), drafters, 16,
        Capabilities(can_sleep=True, can_switch_drafter=True, drafters_follow=True),
    )  # fmt: skip
    cells = tuple(
        ProfileCell(drafter, gamma, size, seconds(drafter, gamma, size), 0.0, 20)
        for drafter, gamma in ARMS
        for size in (1, 4, 16)
    )
    identities = (DrafterIdentity("eagle3"), DrafterIdentity("dflash"))
    profile = Profile(spec.fingerprint, identities, 0.0, 0.0, cells)
    clock = VirtualClock()
    return EngineController(spec, PlannerSettings(), profile, clock), clock


def of_the_best(steps: int, batch_size: int, seed: int) -> float:
    """Time that the best arm of every phase would take, over the time that it took."""
    rng = random.Random(seed)
    core, clock = engine()
    probe, left, step, best_seconds = 0, 0, 0, 0.0
    for kind in [*TRAFFIC] * 3:
        best = max(value(kind, drafter, gamma, batch_size) for drafter, gamma in ARMS)
        for _ in range(steps):
            step += 1
            row = (core.next_plan() or core.current_plan()).row_for(batch_size)
            arm, probe_id = row.arm, 0
            if row.probe is not None and row.probe.probe_id != probe:
                probe, left = row.probe.probe_id, row.probe.steps
            if row.probe is not None and left:
                arm, probe_id, left = row.probe.arm, probe, left - 1
            acceptance = TRAFFIC[kind][arm.drafter == "dflash"]
            counts = accepted_counts(rng, batch_size, arm.gamma, acceptance)
            took = seconds(arm.drafter, arm.gamma, batch_size) * rng.gauss(1, 0.03)
            clock.advance(took)
            best_seconds += sum((1 + k) * n for k, n in enumerate(counts)) / best
            report = StepReport(
                step, batch_size, batch_size * 150, arm.drafter, arm.gamma, tuple(counts), took,
                probe_id=probe_id,
            )  # fmt: skip
            core.observe(report)
    return best_seconds / clock.now()


@pytest.mark.parametrize(
    ("steps", "least", "seeds"), [(100, 0.87, 4), (400, 0.92, 3), (1500, 0.95, 1)]
)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_each_is_found_again_where_it_is_good(
    steps: int, least: float, seeds: int, batch_size: int
):
    shares = [of_the_best(steps, batch_size, seed) for seed in range(seeds)]
    assert statistics.mean(shares) > least

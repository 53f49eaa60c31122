"""A decode loop in virtual time that drives the production core: sequences accept drafts position
by position with known probabilities, steps cost what a known function says."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from controller.core.clock import VirtualClock
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from tests.support.accepted_counts import accepted_counts

GAMMAS = (0, 1, 2, 3, 5, 7)
StepSeconds = Callable[[int, int], float]


def gpu_like(gamma: int, batch_size: int) -> float:
    """Seconds of a step: flat, then compute-bound past a couple of hundred tokens."""
    draft = 0.0009 * gamma + (0.0006 if gamma else 0.0004)
    return 0.008 + draft + 0.00003 * max(0, batch_size * (gamma + 1) - 48)


def engine_spec(gammas: Sequence[int] = GAMMAS, max_batch_size: int = 64) -> EngineSpec:
    """An engine with one MTP drafter called "mtp"."""
    return EngineSpec(
        "engine-0",
        Fingerprint("target", engine="virtual"),
        (DrafterSpec("mtp", DrafterKind.MTP, tuple(gammas)),),
        max_batch_size,
    )


def profile_of(spec: EngineSpec, seconds: StepSeconds, error: float = 1.0) -> Profile:
    """The profile that measuring `seconds` would give; `error` multiplies every gamma > 0."""
    sizes = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b <= spec.max_batch_size]
    cells = tuple(
        ProfileCell("mtp", g, b, seconds(g, b) * (error if g else 1.0), 0.0, 20)
        for g in spec.drafters[0].gammas
        for b in sizes
    )
    return Profile(spec.fingerprint, (DrafterIdentity("mtp"),), 512.0, 0.0, cells)


def best_arm_rate(seconds: StepSeconds, acceptance: Sequence[float], batch_size: int) -> float:
    """Tokens per second of the best draft length when everything is known."""
    rates = []
    for gamma in GAMMAS:
        survival, expected = 1.0, 0.0
        for k in range(gamma):
            survival *= acceptance[k]
            expected += survival
        rates.append(batch_size * (1 + expected) / seconds(gamma, batch_size))
    return max(rates)


@dataclass
class VirtualEngine:
    """Runs decode steps under the controller's plan, one step of lag, like the shim does."""

    controller: EngineController
    clock: VirtualClock
    seconds: StepSeconds
    rng: random.Random
    noise: float = 0.03
    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    arms_run: list[Arm] = field(default_factory=list)
    reports: list[tuple[float, StepReport]] = field(default_factory=list)
    _plan_epoch: int = 0
    _probe: tuple[int, int] = (0, 0)

    def run(self, steps: int, batch_size: int, acceptance: Sequence[float]) -> None:
        """`steps` decode steps of a constant batch; acceptance[k] = P(k + 1 accepted | k were)."""
        for _ in range(steps):
            self._one(batch_size, acceptance)

    def _one(self, batch_size: int, acceptance: Sequence[float]) -> None:
        plan = self.controller.current_plan()
        row = plan.row_for(batch_size)
        arm, probe_id = row.arm, 0
        if row.probe is not None:
            last, left = self._probe
            if row.probe.probe_id != last:
                left = row.probe.steps
            if left > 0:
                arm, probe_id = row.probe.arm, row.probe.probe_id
                self._probe = (row.probe.probe_id, left - 1)
        counts = accepted_counts(self.rng, batch_size, arm.gamma, acceptance)
        seconds = self.seconds(arm.gamma, batch_size) * self.rng.lognormvariate(0, self.noise)
        self.clock.advance(seconds)
        self.step += 1
        self.elapsed += seconds
        self.tokens += batch_size + sum(k * n for k, n in enumerate(counts))
        self.arms_run.append(arm)
        report = StepReport(
            self.step, batch_size, batch_size * 512, arm.drafter, arm.gamma, tuple(counts),
            seconds, plan_epoch=plan.epoch, probe_id=probe_id,
        )  # fmt: skip
        self.reports.append((self.clock.now(), report))
        self.controller.observe(report)
        self.controller.next_plan()


def make(
    profile_error: float | None = 1.0,
    seconds: StepSeconds = gpu_like,
    seed: int = 0,
    settings: PlannerSettings | None = None,
) -> VirtualEngine:
    """A fresh engine under a fresh controller; profile_error None = no profile at all."""
    clock = VirtualClock()
    spec = engine_spec()
    profile = None if profile_error is None else profile_of(spec, seconds, profile_error)
    controller = EngineController(spec, settings or PlannerSettings(), profile, clock)
    return VirtualEngine(controller, clock, seconds, random.Random(seed))

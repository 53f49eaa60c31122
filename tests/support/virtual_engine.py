"""A decode loop in virtual time that drives the production core: sequences accept drafts position
by position with known probabilities, steps cost what a known function says."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.core.clock import VirtualClock
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.plan import Plan, PlanRow, Probe
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from tests.support.accepted_counts import accepted_counts

GAMMAS = (0, 1, 2, 3, 5, 7)
StepSeconds = Callable[[int, int], float]
Acceptance = float | Sequence[float]


def gpu_step_seconds(gamma: int, batch_size: int) -> float:
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
    """Runs decode steps under the core's plan, one step of lag, like the shim does.

    Whoever wants other steps overrides `decode`.  seconds: of a step, by gamma and batch size.
    noise: relative, of the seconds.  context: tokens of a sequence.
    """

    core: EngineController
    clock: VirtualClock
    seconds: StepSeconds = gpu_step_seconds
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    noise: float = 0.03
    context: int = 512
    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    probe_id: int = 0
    arms_run: list[Arm] = field(default_factory=list)
    reports: list[tuple[float, StepReport]] = field(default_factory=list)
    _probe: tuple[int, int] = (0, 0)

    @property
    def plan(self) -> Plan:
        return self.core.current_plan()

    def run(self, steps: int, batch_size: int = 4, acceptance: Acceptance = 0.7) -> None:
        """`steps` decode steps of a constant batch; acceptance[k] = P(k + 1 accepted | k were)."""
        for _ in range(steps):
            row = self.plan.row_for(batch_size)
            probe = self.next_probe(row)
            arm, self.probe_id = (probe.arm, probe.probe_id) if probe else (row.arm, 0)
            report = self.decode(arm, batch_size, acceptance)
            self.elapsed += report.step_seconds
            self.tokens += batch_size + sum(k * n for k, n in enumerate(report.accepted_counts))
            self.arms_run.append(arm)
            self.reports.append((self.clock.now(), report))
            self.core.observe(report)
            self.core.next_plan()

    def next_probe(self, row: PlanRow) -> Probe | None:
        """The probe that the next step runs: each for its number of steps."""
        if row.probe is None:
            return None
        last, steps_left = self._probe
        if row.probe.probe_id != last:
            steps_left = row.probe.steps
        if steps_left <= 0:
            return None
        self._probe = (row.probe.probe_id, steps_left - 1)
        return row.probe

    def decode(self, arm: Arm, batch_size: int, acceptance: Acceptance) -> StepReport:
        """Runs a step, which takes time, and gives its report."""
        counts = accepted_counts(self.rng, batch_size, arm.gamma, acceptance)
        seconds = self.seconds(arm.gamma, batch_size)
        if self.noise:
            seconds *= self.rng.lognormvariate(0, self.noise)
        self.clock.advance(seconds)
        return self.report(arm, counts, seconds)

    def report(self, arm: Arm, counts: Sequence[int], seconds: float, **changes: Any) -> StepReport:
        """The next step's report."""
        self.step += 1
        size = sum(counts)
        defaults = {
            "kv_tokens": size * self.context,
            "plan_epoch": self.plan.epoch,
            "probe_id": self.probe_id,
        }
        return StepReport(
            self.step, size, drafter=arm.drafter, gamma=arm.gamma, accepted_counts=tuple(counts),
            step_seconds=seconds, **(defaults | changes),
        )  # fmt: skip


def make_engine(
    profile_error: float | None = 1.0,
    seconds: StepSeconds = gpu_step_seconds,
    seed: int = 0,
    settings: PlannerSettings | None = None,
) -> VirtualEngine:
    """A fresh engine under a fresh controller; profile_error None = no profile at all."""
    clock = VirtualClock()
    spec = engine_spec()
    profile = None if profile_error is None else profile_of(spec, seconds, profile_error)
    core = EngineController(spec, settings or PlannerSettings(), profile, clock)
    return VirtualEngine(core, clock, seconds, random.Random(seed))

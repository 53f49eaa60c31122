"""The production core as a policy, with the objects, calls and plans of the gRPC service."""

from bisect import bisect_left

from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Capabilities, EngineSpec, Fingerprint
from controller.core.plan import Plan
from controller.core.settings import PlannerSettings
from controller.core.step_report import ClassCounts, StepReport
from simulator.policy import ArmChoice, RowEvidence, StepRecord
from simulator.results import PolicyOrigin
from simulator.surface import CostSurface

FINGERPRINT = Fingerprint("simulated", engine="simulation")
_NO_ROWS = RowEvidence((), ())


class VirtualClock:
    """The core's clock, which returns the engine's virtual time."""

    seconds = 0.0

    def now(self) -> float:
        """Returns the virtual time in seconds."""
        return self.seconds


class ControllerPolicy:
    """Steers the simulated engine with `EngineController`; follows its plans as the shim does.

    profile: measured costs (None: the core uses its prior).  max_batch_size: the engine's limit.
    """

    origin = PolicyOrigin.OURS

    def __init__(
        self,
        surface: CostSurface,
        profile: Profile | None,
        max_batch_size: int,
        settings: PlannerSettings | None = None,
        overlap_steps: int = 0,
    ) -> None:
        spec = EngineSpec(
            "simulated",
            FINGERPRINT,
            surface.drafters,
            max_batch_size,
            Capabilities(
                can_sleep=True,
                can_switch_drafter=len(surface.drafters) > 1,
                overlap_steps=overlap_steps,
            ),
        )
        self._clock = VirtualClock()
        self.controller = EngineController(
            spec, settings or PlannerSettings(), profile, self._clock
        )
        self._arms = surface.arms
        self._arm_indices = {arm: i for i, arm in enumerate(surface.arms)}
        self._probe_id = 0
        self._probe_steps_left = 0
        self._use_plan(self.controller.current_plan())

    def _use_plan(self, plan: Plan) -> None:
        self._plan_rows = plan.rows
        self._rules = plan.rules
        self._limits = [row.max_batch_size for row in plan.rows]

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Looks the arm up in the current plan; a probe runs once, for its number of steps."""
        row = self._plan_rows[min(bisect_left(self._limits, batch_size), len(self._plan_rows) - 1)]
        arm, probe_id = row.arm, 0
        probe = row.probe
        if probe is not None:
            if probe.probe_id != self._probe_id:
                self._probe_id, self._probe_steps_left = probe.probe_id, probe.steps
            if self._probe_steps_left > 0:
                self._probe_steps_left -= 1
                arm, probe_id = probe.arm, probe.probe_id
        return ArmChoice(self._arm_indices[arm], probe_id, row.drafter_asleep, self._rules)

    def observe(self, record: StepRecord, now: float) -> None:
        """Passes one report to the core, and uses its plan if that is new."""
        arm, rows = self._arms[record.arm], record.row_evidence or _NO_ROWS
        self._clock.seconds = now
        self.controller.observe(
            StepReport(
                record.step,
                record.batch_size,
                record.kv_tokens,
                arm.drafter,
                arm.gamma,
                tuple(record.counts),
                record.step_seconds,
                record.flags,
                probe_id=record.probe_id,
                classes=tuple(ClassCounts(name, tuple(row)) for name, row in record.classes),
                groups=rows.groups,
                proposals=rows.proposals,
            )
        )
        plan = self.controller.next_plan()
        if plan is not None:
            self._use_plan(plan)

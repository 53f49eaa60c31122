"""Decides how a drafter is trained while it serves: by online updates, or by a trainer.

The two never run together, since both write the same weights: while a trainer is connected, its
algorithm determines the regime (COLLECT or OFF), and there are no online updates.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm, Capabilities, EngineSpec
from controller.core.plan import Regime, RegimeMode
from controller.core.planning.planner import Values
from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport
from controller.core.training.selective_training import (
    SelectiveTraining,
    TrainingSettings,
    TrainingState,
    TrainingView,
)
from controller.core.training.stride_planner import StridePlanner, StridePlannerState


@recorded("drafter_updates", "training", online="_stride_planner")
class DrafterUpdates:
    """Owns the training of one engine's drafter.

    trained: the state of earlier training, None to start again.  training: None for an engine that
    cannot collect signals and accept versions.
    """

    def __init__(
        self,
        spec: EngineSpec,
        arms: Sequence[Arm],
        settings: TrainingSettings,
        training_state: TrainingState | None = None,
    ) -> None:
        capabilities = spec.capabilities
        self._capabilities = spec.remaining_capabilities
        self._stride_planner: StridePlanner | None = None
        if capabilities.can_update_online:
            self._stride_planner = StridePlanner(arms, spec.learner.name)
        self.training: SelectiveTraining | None = None
        if capabilities.can_collect and capabilities.can_take_versions:
            state = training_state or TrainingState()
            self.training = SelectiveTraining(spec.learner.name, settings, state)

    def use_settings(self, settings: TrainingSettings) -> None:
        """Replaces the settings; averages and rounds are kept."""
        if self.training is not None:
            self.training.settings = settings

    def use_capabilities(self, capabilities: Capabilities) -> None:
        """Updates the engine's capabilities; averages, rounds and versions are kept."""
        self._capabilities = capabilities

    @property
    def is_trainer_connected(self) -> bool:
        """Whether a trainer is connected."""
        return self.training is not None and self.training.is_trainer_connected

    @property
    def version(self) -> int:
        """The version of the drafter that must serve; 0: as loaded."""
        return 0 if self.training is None else self.training.state.version

    @property
    def regime(self) -> Regime:
        """The chosen regime."""
        if self.is_trainer_connected and self.training is not None:
            can_train = self._capabilities.can_collect and self._capabilities.can_take_versions
            return (
                Regime(RegimeMode.COLLECT)
                if can_train and self.training.is_collecting
                else Regime()
            )
        return (
            Regime() if self._active_stride_planner is None else self._active_stride_planner.regime
        )

    @property
    def stride_state(self) -> StridePlannerState | None:
        """The numbers behind the last choice of the stride of online updates."""
        return (
            None
            if self._active_stride_planner is None or self.is_trainer_connected
            else self._active_stride_planner.state
        )

    @property
    def view(self) -> TrainingView | None:
        """The state of the training, for display."""
        return None if self.training is None else self.training.view

    def observe(self, report: StepReport, expected_seconds: float) -> None:
        """Adds a step that was not part of a measurement."""
        if self._stride_planner is not None:
            self._stride_planner.observe(report, expected_seconds)
        if self.training is not None:
            self.training.observe(report)

    def update(
        self, values: Values, row: int, batch_size: int, feasible: NDArray[np.bool_] | None
    ) -> None:
        """Chooses the stride of online updates again."""
        if self._active_stride_planner is not None and not self.is_trainer_connected:
            self._active_stride_planner.update(values, row, batch_size, feasible)

    @property
    def _active_stride_planner(self) -> StridePlanner | None:
        """The planner of the stride, if the engine can update its drafter."""
        return self._stride_planner if self._capabilities.can_update_online else None

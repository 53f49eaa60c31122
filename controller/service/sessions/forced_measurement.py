"""Holds a measurement of an engine: the forced choice, and reports on their way to the client."""

from collections import deque

from controller.core.engine_spec import Arm
from controller.core.errors import SpeculationError
from controller.core.step_report import StepReport
from controller.service.net.errors import SlowClientError

# Reports that may wait for the client: half a minute of a fast engine.
_MEASURED_MAX = 10_000


class ForcedMeasurement:
    """Holds the forced choice, and the reports that wait for the client."""

    def __init__(self) -> None:
        self.forced_epoch = 0
        self.arm: Arm | None = None
        self.failed: SpeculationError | None = None
        self.reports: deque[StepReport] = deque()
        self.overflowed = False

    def take(self) -> list[StepReport]:
        """The reports since the last call.

        Raises SlowClientError once some had to be dropped, and InvalidMeasurementError once the
        engine has lost what is being measured.
        """
        if self.failed is not None:
            raise self.failed
        if self.overflowed:
            raise SlowClientError(
                f"more than {_MEASURED_MAX} reports wait for this client: a measurement with "
                "gaps cannot be used: start again and read faster"
            )
        taken = list(self.reports)
        self.reports.clear()
        return taken

    def put(self, report: StepReport) -> None:
        """Keeps one report for the client, up to a bound."""
        if len(self.reports) < _MEASURED_MAX:
            self.reports.append(report)
        else:
            self.overflowed = True

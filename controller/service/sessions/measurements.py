"""Holds what runs in place of the plan: a forced measurement, a probe of a client of `Decide`."""

from collections import deque
from dataclasses import replace

from controller.core.engine_spec import Arm
from controller.core.errors import SpeculationError
from controller.core.plan import Probe
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


class UnaryProbes:
    """Remembers which probe the last answer of `Decide` asked for, and how many steps are left.

    A plan's probe runs for a bounded number of steps, is never run twice, and its steps carry its
    id.  A shim sees to that on the engine's side; for a client that only asks for one choice at a
    time it is seen to here.
    """

    def __init__(self) -> None:
        self._probe_id = 0
        self._left = 0
        self._answered: Probe | None = None

    def identify(self, report: StepReport) -> StepReport:
        """The report, with the probe's id if it ran what the last answer asked for."""
        probe, self._answered = self._answered, None
        if probe is None or report.probe_id or report.arm != probe.arm:
            return report
        return replace(report, probe_id=probe.probe_id)

    def take(self, probe: Probe) -> bool:
        """True when the next step is to run this probe: one of its steps is used up then."""
        if probe.probe_id != self._probe_id:
            self._probe_id, self._left = probe.probe_id, probe.steps
        if self._left == 0:
            return False
        self._left -= 1
        self._answered = probe
        return True

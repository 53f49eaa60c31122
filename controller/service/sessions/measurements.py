"""Holds what replaces the plan: forced measurements, and probes of clients of `Decide`."""

from collections import deque
from dataclasses import replace

from controller.core.engine_spec import Arm
from controller.core.errors import SpeculationError
from controller.core.plan import Probe
from controller.core.step_report import StepReport
from controller.service.net.errors import SlowClientError

# Reports that may wait for the client: half a minute of a fast engine.
_WAITING_REPORTS_MAX = 10_000


class ForcedMeasurement:
    """Holds the forced arm, and the reports that wait for the client."""

    def __init__(self) -> None:
        self.forced_epoch = 0
        self.arm: Arm | None = None
        self.error: SpeculationError | None = None
        self.reports: deque[StepReport] = deque()
        self.has_overflowed = False

    def take_reports(self) -> list[StepReport]:
        """Returns the reports since the last call.

        Raises SlowClientError if reports had to be dropped, and InvalidMeasurementError if the
        engine has lost the arm that is measured.
        """
        if self.error is not None:
            raise self.error
        if self.has_overflowed:
            raise SlowClientError(
                f"more than {_WAITING_REPORTS_MAX} reports wait for this client, and a measurement "
                "with "
                "gaps cannot be used: start again and read faster"
            )
        reports = list(self.reports)
        self.reports.clear()
        return reports

    def add_report(self, report: StepReport) -> None:
        """Keeps one report for the client, up to a bound."""
        if len(self.reports) < _WAITING_REPORTS_MAX:
            self.reports.append(report)
        else:
            self.has_overflowed = True


class UnaryProbes:
    """Remembers the probe of the last answer of `Decide`, and how many of its steps are left.

    A plan's probe runs once, for a bounded number of steps, whose reports carry its id.  In an
    engine the shim ensures this.  For a client that asks for one choice at a time, this class does.
    """

    def __init__(self) -> None:
        self._probe_id = 0
        self._steps_left = 0
        self._answered_probe: Probe | None = None

    def add_probe_id(self, report: StepReport) -> StepReport:
        """Returns the report, with the probe's id if it ran the probe of the last answer."""
        probe, self._answered_probe = self._answered_probe, None
        if probe is None or report.probe_id or report.arm != probe.arm:
            return report
        return replace(report, probe_id=probe.probe_id)

    def take_step(self, probe: Probe) -> bool:
        """Uses up one step of a probe; returns False if none is left."""
        if probe.probe_id != self._probe_id:
            self._probe_id, self._steps_left = probe.probe_id, probe.steps
        if self._steps_left == 0:
            return False
        self._steps_left -= 1
        self._answered_probe = probe
        return True

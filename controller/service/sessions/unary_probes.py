"""Probes for a client of `Decide`, which has no shim to run them.

A plan's probe runs for a bounded number of steps, is never run twice, and its steps carry its id.
A shim sees to that on the engine's side; for a client that only asks for one choice at a time it
is seen to here.
"""

from dataclasses import replace

from controller.core.plan import Probe
from controller.core.step_report import StepReport


class UnaryProbes:
    """Remembers which probe the last answer asked for, and how many of its steps are left."""

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

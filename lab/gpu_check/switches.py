"""Measures what changing the arm costs, against other steps of the same arm."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from lab.harness.background_thread import BackgroundThread
from lab.harness.sidecar import Pin
from speculation.v1 import engine_pb2

_TURN_SECONDS = 0.1


class ArmRotation(BackgroundThread):
    """Moves a pin from arm to arm, a tenth of a second each, while the context is open."""

    def __init__(self, pin: Pin, arms: Sequence[tuple[str, int]]) -> None:
        super().__init__("arm-rotation")
        self._pin = pin
        self._arms = arms

    def _run(self) -> None:
        turn = 0
        while not self._stop.wait(_TURN_SECONDS):
            turn += 1
            drafter, gamma = self._arms[turn % len(self._arms)]
            self._pin.move(gamma, drafter)


def cost(reports: Sequence[engine_pb2.StepReport], batch_size: int) -> dict[str, Any]:
    """Computes how many microseconds longer a step takes when it changed the arm (median).

    switches: how many steps that was.  share: of a plain step.  All 0 without any.
    """
    plain: dict[tuple[str, int], list[float]] = defaultdict(list)
    changed: list[tuple[tuple[str, int], float]] = []
    for report in reports:
        flags = report.flags
        if report.batch_size != batch_size or flags.after_gap or flags.first_use:
            continue
        arm = (report.drafter, report.gamma)
        if flags.switched:
            changed.append((arm, report.step_seconds))
        else:
            plain[arm].append(report.step_seconds)
    usual = {arm: median(seconds) for arm, seconds in plain.items()}
    more = [(seconds - usual[arm], usual[arm]) for arm, seconds in changed if arm in usual]
    if not more:
        return {"switches": 0, "microseconds": 0.0, "share": 0.0}
    return {
        "switches": len(more),
        "microseconds": round(1e6 * median(excess for excess, _ in more), 1),
        "share": round(median(excess / step for excess, step in more), 4),
    }

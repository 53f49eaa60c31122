"""Measures how much longer a step takes that runs another arm, or wakes a drafter."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Arm, Check
from lab.gpu_check.engines import STEERED
from lab.gpu_check.load import build_stream, steady_load
from lab.gpu_check.parts.part import Document, Part, table
from lab.gpu_check.shapes import Load, Shape
from lab.harness.background_thread import BackgroundThread
from lab.harness.sidecar import Pin
from speculation.v1 import engine_pb2

_SEED = 8
# Length of an answer, relative to the moving load: enough for hundreds of changes of the arm.
_ANSWER_SHARE = 4.0
_TURN_SECONDS = 0.1
# An arm also runs at least this many steps; the first one is the switch.  On a CPU a step is longer
# than a turn.
_TURN_STEPS = 4


class SwitchesPart(Part):
    """Measures a change of the arm, and a drafter's waking."""

    KEY = "switches"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        work = planner.count_starts(STEERED)
        loads = [_load(planner.shape)]
        for arms in (switch_arms(planner.shape), wake_up_arms(planner.shape)):
            gain = sum(map(planner.tokens_a_step, arms)) / len(arms)
            work += planner.play(loads, tokens_a_step=gain).multiply(planner.scale.repeats)
        return work

    def run(self, check: Check) -> None:
        """Plays a steady load while the arm changes; once among drafts, once from and to sleep."""
        check.terminal.heading("Changing the arm, and waking the drafter, under a steady load")
        check.run_only(STEERED)
        load = _load(check.shape)
        stream, size = build_stream(check.shape, [load], _SEED), load.concurrency
        results: dict[str, Any] = check.document.setdefault(self.KEY, {"batch_size": size})
        for name, arms in (
            ("change", switch_arms(check.shape)), ("wake", wake_up_arms(check.shape)),
        ):  # fmt: skip
            with check.sidecar(STEERED).pinned(arms[0][1], arms[0][0]) as pin:
                with ArmRotation(pin, arms):
                    for _ in range(check.scale.repeats):
                        check.play(STEERED, stream, f"×{size}, {len(arms)} arms in turn")
                results[name] = switch_cost(pin.reports, size, into_drafting=name == "wake")
            check.save()

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the prices."""
        return "measured", "; ".join(": ".join(pair) for pair in _price_rows(document[self.KEY]))

    def sections(self, document: Document) -> list[str]:
        """Makes a table of the prices."""
        return [
            table(["price of", "more than a step of the same arm"], _price_rows(document[self.KEY]))
        ]


def switch_arms(shape: Shape) -> list[Arm]:
    """Lists arms that differ in drafter and in length, none asleep."""
    gammas = [gamma for gamma in shape.gammas if gamma]
    corners = (("eagle3", gammas[0]), ("dflash", gammas[-1]), ("eagle3", gammas[-1]))
    return [arm for arm in corners if arm in shape.arms()]


def wake_up_arms(shape: Shape) -> list[Arm]:
    """Lists gamma 0, at which drafters sleep, and a draft length that wakes one."""
    return [("eagle3", 0), ("eagle3", shape.static_gamma)]


def _load(shape: Shape) -> Load:
    size = sorted(shape.batch_sizes)[len(shape.batch_sizes) // 2]
    return steady_load(shape, size, _ANSWER_SHARE)


class ArmRotation(BackgroundThread):
    """Moves a pin from arm to arm, after 0.1 s and four steps each, while the context is open."""

    def __init__(self, pin: Pin, arms: Sequence[Arm]) -> None:
        super().__init__("arm-rotation")
        self._pin = pin
        self._arms = arms

    def _run(self) -> None:
        turn = moved_at = 0
        while not self._stop.wait(_TURN_SECONDS):
            if len(self._pin.reports) < moved_at + _TURN_STEPS:
                continue
            turn, moved_at = turn + 1, len(self._pin.reports)
            drafter, gamma = self._arms[turn % len(self._arms)]
            self._pin.move(gamma, drafter)


def switch_cost(
    reports: Sequence[engine_pb2.StepReport], batch_size: int, *, into_drafting: bool = False
) -> dict[str, Any]:
    """Computes how many microseconds longer a step takes when it changed the arm (median).

    into_drafting: only changes to a gamma above 0 count.  switches: number of such steps.  share:
    of a plain step.  All are 0 if there was none.
    """
    plain: dict[Arm, list[float]] = defaultdict(list)
    changed: list[tuple[Arm, float]] = []
    for report in reports:
        flags = report.flags
        if report.batch_size != batch_size or flags.after_gap or flags.first_use:
            continue
        arm = (report.drafter, report.gamma)
        if not flags.switched:
            plain[arm].append(report.step_seconds)
        elif report.gamma or not into_drafting:
            changed.append((arm, report.step_seconds))
    median_seconds = {arm: median(seconds) for arm, seconds in plain.items()}
    excesses = [
        (seconds - median_seconds[arm], median_seconds[arm])
        for arm, seconds in changed
        if arm in median_seconds
    ]
    if not excesses:
        return {"switches": 0, "microseconds": 0.0, "share": 0.0}
    return {
        "switches": len(excesses),
        "microseconds": round(1e6 * median(excess for excess, _ in excesses), 1),
        "share": round(median(excess / step for excess, step in excesses), 4),
    }


def _price_rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {"change": "changing the arm", "wake": "waking the drafter after 0.1 s of sleep"}
    return [
        (
            f"{words} at B = {results['batch_size']}, {results[name]['switches']} times",
            f"{results[name]['microseconds']:.0f} µs, {results[name]['share']:.1%} of a step",
        )
        for name, words in names.items()
        if name in results
    ]

"""What changing the arm costs: steps that did it, against the same arm's other steps."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from lab.harness.sidecar import Pin
from speculation.v1 import engine_pb2

_TURN_SECONDS = 0.1


@contextmanager
def taking_turns(pin: Pin, arms: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Inside the block the pin goes from arm to arm, a tenth of a second each."""
    over = threading.Event()

    def move() -> None:
        turn = 0
        while not over.wait(_TURN_SECONDS):
            turn += 1
            drafter, gamma = arms[turn % len(arms)]
            pin.move(gamma, drafter)

    thread = threading.Thread(target=move, name="turns", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cost(reports: Sequence[engine_pb2.StepReport], batch_size: int) -> dict[str, Any]:
    """Microseconds that a step takes more when it changed the arm: median over all of them.

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

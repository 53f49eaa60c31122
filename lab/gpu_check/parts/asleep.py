"""asleep: the steered engine at gamma 0, its drafters asleep, against one without speculation."""

from collections.abc import Mapping
from typing import Any

from lab.gpu_check.budget import Work
from lab.gpu_check.check import Check
from lab.gpu_check.engines import OFF, STEERED
from lab.gpu_check.load import steady_stream
from lab.gpu_check.plan import Planner
from lab.gpu_check.tables import spread, table

KEY = "asleep"
_ARM = ("eagle3", 0)
_SEED = 9
# Answers so many times as long as in the moving load: little but decoding.
_TIMES_AS_LONG = 2.0


def plan(planner: Planner) -> Work:
    """Counts the work."""
    work = planner.only(STEERED, OFF)
    for size in _batch_sizes(planner.shape.loads):
        loads = steady_stream(
            planner.shape, size, _SEED, _TIMES_AS_LONG * planner.scale.answer_share
        )
        work += planner.play(loads).times(2 * (planner.scale.repeats + 1))
    return work


def run(check: Check) -> None:
    """Plays a steady load of each concurrency on both engines in turns."""
    check.terminal.heading("Not speculating: against an engine without speculation")
    check.only(STEERED, OFF)
    found = check.document.setdefault(KEY, {})
    for size in _batch_sizes(check.shape.loads):
        stream = steady_stream(check.shape, size, _SEED, _TIMES_AS_LONG * check.scale.answer_share)
        found[str(size)] = check.ratio((STEERED, _ARM), (OFF, None), stream)
        check.save()


def _batch_sizes(loads: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(load.concurrency for load in loads))


def summary(document: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the ratios."""
    ratios = (f"B = {size}: {spread(ratio)}" for size, ratio in document[KEY].items())
    return "measured", "tokens/s over an engine without speculation, " + "; ".join(ratios)


def problems(document: Mapping[str, Any]) -> list[str]:
    """Finds no problem: ratios are figures."""
    return []


def sections(document: Mapping[str, Any]) -> list[str]:
    """Makes a table of the ratios."""
    rows = [[f"B = {size}", spread(ratio)] for size, ratio in document[KEY].items()]
    title = "γ = 0 with sleeping drafters, tokens/s over an engine without speculation:"
    return [f"{title}\n\n" + table(["load", "ratio"], rows)]

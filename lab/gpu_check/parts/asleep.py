"""Compares the steered engine at gamma 0, its drafters asleep, with one without speculation."""

from typing import Any

from lab.gpu_check.budget import Work
from lab.gpu_check.check import Check
from lab.gpu_check.engines import OFF, STEERED
from lab.gpu_check.load import steady_stream
from lab.gpu_check.parts.part import Document, Part
from lab.gpu_check.plan import Planner
from lab.gpu_check.tables import spread, table

_ARM = ("eagle3", 0)
_SEED = 9
# Answers so many times as long as in the moving load: little but decoding.
_TIMES_AS_LONG = 2.0


class AsleepPart(Part):
    """Compares sleeping drafters with an engine that has none."""

    KEY = "asleep"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        work = planner.only(STEERED, OFF)
        for size in _batch_sizes(planner.shape.loads):
            loads = steady_stream(
                planner.shape, size, _SEED, _TIMES_AS_LONG * planner.scale.answer_share
            )
            work += planner.play(loads).times(2 * (planner.scale.repeats + 1))
        return work

    def run(self, check: Check) -> None:
        """Plays a steady load of each concurrency on both engines in turns."""
        check.terminal.heading("Not speculating: against an engine without speculation")
        check.only(STEERED, OFF)
        found = check.document.setdefault(self.KEY, {})
        for size in _batch_sizes(check.shape.loads):
            stream = steady_stream(
                check.shape, size, _SEED, _TIMES_AS_LONG * check.scale.answer_share
            )
            found[str(size)] = check.ratio((STEERED, _ARM), (OFF, None), stream)
            check.save()

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the ratios."""
        ratios = (f"B = {size}: {spread(ratio)}" for size, ratio in document[self.KEY].items())
        return "measured", "tokens/s over an engine without speculation, " + "; ".join(ratios)

    def sections(self, document: Document) -> list[str]:
        """Makes a table of the ratios."""
        rows = [[f"B = {size}", spread(ratio)] for size, ratio in document[self.KEY].items()]
        title = "γ = 0 with sleeping drafters, tokens/s over an engine without speculation:"
        return [f"{title}\n\n" + table(["load", "ratio"], rows)]


def _batch_sizes(loads: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(load.concurrency for load in loads))

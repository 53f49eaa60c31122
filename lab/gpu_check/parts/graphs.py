"""Has every arm replay its graphs at every batch size, and counts what synchronises.

A step is eager if it ran without its graph although one was captured for its batch size.  Also what
the graphs of each draft length take, beside what `engine_shim.preflight.memory` predicts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.gpu_check import syncs
from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Check
from lab.gpu_check.engines import STEERED, graphs_expected
from lab.gpu_check.load import steady_load, steady_stream
from lab.gpu_check.parts.part import Document, Part, table
from speculation.v1 import engine_pb2

_SEED = 11
# Length of an answer, relative to the moving load: a few dozen steps show if an arm runs eagerly.
_ANSWER_SHARE = 0.15
_PLACES_SHOWN = 8


class EagerSteps:
    """Counts steps by arm.

    captured: ascending batch sizes with graphs.  prepared: what the engine says of each draft
    length; its largest_batch is None for all of `captured`.
    """

    def __init__(self, captured: Sequence[int], prepared: Mapping[str, Mapping[str, Any]]) -> None:
        self._largest = max(captured, default=0)
        self._prepared = prepared
        self._steps: Counter[tuple[str, int]] = Counter()
        self._eager: Counter[tuple[str, int]] = Counter()
        self._uncaptured: Counter[tuple[str, int]] = Counter()

    def add(self, reports: Iterable[engine_pb2.StepReport]) -> None:
        """Counts the steps of a play."""
        for report in reports:
            arm = (report.drafter if report.gamma else "eagle3", report.gamma)
            self._steps[arm] += 1
            if report.flags.eager_fallback:
                has_graph = report.batch_size <= self._limit(report.gamma)
                (self._eager if has_graph else self._uncaptured)[arm] += 1

    def document(self) -> dict[str, Any]:
        """Returns the counts as plain values; beyond: eager where nothing was captured."""
        return {
            "largest_batch": self._largest,
            "arms": [
                {
                    "drafter": arm[0],
                    "gamma": arm[1],
                    "steps": steps,
                    "eager_steps": self._eager[arm],
                    "beyond": self._uncaptured[arm],
                }
                for arm, steps in self._steps.items()
            ],
        }

    def _limit(self, gamma: int) -> int:
        limit = self._prepared.get(str(gamma), {}).get("largest_batch")
        return self._largest if limit is None else min(self._largest, int(limit))


class GraphsPart(Part):
    """Counts eager steps and synchronisations of every arm."""

    KEY = "graphs"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        work = planner.count_starts(STEERED)
        for arm in planner.shape.arms():
            for size in planner.graph_sizes:
                work += planner.play([steady_load(planner.shape, size, _ANSWER_SHARE)], arm)
        return work + planner.play([steady_load(planner.shape, 1)])

    def run(self, check: Check) -> None:
        """Plays a short full batch for each arm and batch size, largest batches first."""
        check.terminal.heading("Graphs and synchronisations, every arm at every batch size")
        check.run_only(STEERED)
        captured = check.sidecar(STEERED).status().engine.fingerprint.graph_batch_sizes
        status = check.status()
        eager_steps = EagerSteps(tuple(captured), status["prepared"])
        check.document[self.KEY] = {
            "expected": graphs_expected(check.options.engine_options, check.options.device),
            "without_graphs": status["eager"]["without_graphs"],
            "prepared": status["prepared"],
        }
        switch = syncs.switch_path(check.ledger)
        switch.touch()
        try:
            for size in reversed(check.setting.graph_sizes):
                for arm in check.shape.arms():
                    stream = steady_stream(check.shape, size, _SEED, _ANSWER_SHARE)
                    eager_steps.add(check.play_pinned(STEERED, arm, stream)[1].reports)
                check.document[self.KEY] |= _document(eager_steps, check)
                check.save()
        finally:
            switch.unlink()
        # The engine writes its ledger at the next step.
        check.play(STEERED, steady_stream(check.shape, 1, _SEED), "the last step")
        check.document[self.KEY] |= _document(eager_steps, check)

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict and the counts."""
        graphs = document[self.KEY]
        arms = graphs.get("arms", [])
        eager, uncaptured, steps = (
            sum(arm[name] for arm in arms) for name in ("eager_steps", "beyond", "steps")
        )
        details = (
            f"{eager} of {steps} steps eager ({uncaptured} more beyond the captured batch sizes); "
        )
        passes = ", ".join(f"{name} {count}" for name, count in graphs.get("passes", {}).items())
        details += f"steps with an eager pass: {passes or 'not counted (no graphs)'}; "
        if never := graphs["without_graphs"]:
            details += f"no graphs at all for {', '.join(never)}; "
        details += syncs.summary_text(graphs.get("syncs"))
        if not graphs["expected"]:
            return "no graphs", details
        return "FAILED" if eager or never else "passed", details

    def problems(self, document: Document) -> list[str]:
        """Lists eager steps and passes without graphs, where graphs are expected."""
        graphs = document[self.KEY]
        if not graphs["expected"]:
            return []
        never = [
            f"SGLang captured no graphs for {name}: it runs eagerly in every step"
            for name in graphs["without_graphs"]
        ]
        return never + [
            f"{arm['drafter']} gamma {arm['gamma']}: {arm['eager_steps']} of {arm['steps']} steps "
            "ran without a graph"
            for arm in graphs.get("arms", [])
            if arm["eager_steps"]
        ]

    def sections(self, document: Document) -> list[str]:
        """Makes the tables of memory and of places that synchronise."""
        graphs = document[self.KEY]
        rows = [
            [
                gamma,
                f"{state['seconds']:.1f}",
                f"{state['device_bytes'] / 2**20:.0f}",
                f"{state['predicted_bytes'] / 2**20:.0f}",
                str(state["largest_batch"] or "all"),
            ]
            for gamma, state in graphs["prepared"].items()
        ]
        columns = ["γ prepared", "seconds", "MiB", "MiB predicted", "largest batch"]
        texts = ["What each further draft length takes at the start:\n\n" + table(columns, rows)]
        if ledger := graphs.get("syncs"):
            places = [
                [location.rsplit("site-packages/", 1)[-1], origin, str(count)]
                for origin in ("shim", "others")
                for location, count in list(ledger[origin].items())[:_PLACES_SHOWN]
            ]
            if places:
                title = f"Calls that synchronise with the device, in {ledger['steps']} steps:"
                texts.append(f"{title}\n\n" + table(["line", "whose", "calls"], places))
        return texts


def _document(eager_steps: EagerSteps, check: Check) -> dict[str, Any]:
    passes = check.status()["eager"]["steps"]
    return {**eager_steps.document(), "passes": passes, "syncs": syncs.read_ledger(check.ledger)}

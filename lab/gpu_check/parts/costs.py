"""Measures C(drafter, B, gamma, context) with `controller profile`, through the engine.

Two tables: one at a short context, with which the sidecar plans from then on, and one at a long
context for the batches that fit.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Arm, Check
from lab.gpu_check.engines import STEERED
from lab.gpu_check.parts.part import Document, Part, arm_name, table
from lab.gpu_check.shapes import Shape
from lab.harness.engines import measure_profile

# Time for the second table, as a share of that for the first.
_LONG_SHARE = 0.5
# `controller profile` needs this much besides its budget.
_SPARE_SECONDS = 5.0
_MIN_SECONDS = 10.0
# Share of the pool that `controller profile` fills, and tokens that a sequence grows by meanwhile.
_POOL_SHARE, _GROWTH_TOKENS = 0.8, 96
# Steps of a cell, below which its median is not shown.
_MIN_STEPS = 3


class CostsPart(Part):
    """Measures both cost tables."""

    KEY = "costs"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        planner.has_profile = True
        seconds = planner.scale.profile_seconds + _SPARE_SECONDS
        if planner.shape.long_context_tokens:
            seconds += _LONG_SHARE * planner.scale.profile_seconds + _SPARE_SECONDS
        return planner.count_starts(STEERED) + Work(wait_seconds=seconds)

    def run(self, check: Check) -> None:
        """Measures both tables; every few seconds the cells so far are written down."""
        check.terminal.heading("Measuring step costs: controller profile")
        check.run_only(STEERED)
        tables = check.document.setdefault(self.KEY, {})
        shape, pool = check.shape, check.setting.pool_tokens
        tokens = short_context(shape, pool)
        seconds = min(
            check.scale.profile_seconds, check.deadline.remaining_seconds - _SPARE_SECONDS
        )
        text = _measure(check, "short", tokens, check.setting.graph_sizes, seconds)
        for folder in filter(None, (check.options.output, check.options.keep_profile)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / profile_name(check)).write_text(text)
        tables["short"] = {"context_tokens": tokens, "profile": json.loads(text)}
        check.save()
        sizes = [
            s for s in check.setting.graph_sizes if fits_pool(s, shape.long_context_tokens, pool)
        ]
        seconds = min(seconds * _LONG_SHARE, check.deadline.remaining_seconds - _SPARE_SECONDS)
        if not shape.long_context_tokens or not sizes or seconds < _MIN_SECONDS:
            return
        text = _measure(check, "long", shape.long_context_tokens, sizes, seconds)
        tables["long"] = {"context_tokens": shape.long_context_tokens, "profile": json.loads(text)}
        # The sidecar has the newest table; this puts the first one back, which is on disk.
        _measure(check, "short", tokens, check.setting.graph_sizes, _MIN_SECONDS)

    def summary(self, document: Document) -> tuple[str, str]:
        """Counts the cells."""
        tables = document[self.KEY]
        counts = [
            f"{len(table_cells(table_entry))} step costs at contexts of "
            f"{table_entry['context_tokens']} tokens"
            for table_entry in tables.values()
        ]
        is_complete = bool(tables) and all(
            "profile" in table_entry for table_entry in tables.values()
        )
        return "measured" if is_complete else "unfinished", "; ".join(counts)

    def sections(self, document: Document) -> list[str]:
        """Makes the tables of milliseconds a step."""
        return [
            f"Milliseconds of a decode step, contexts of {table_entry['context_tokens']} tokens"
            f"{'' if 'profile' in table_entry else ' (unfinished)'}:\n\n"
            f"{cost_table(table_cells(table_entry))}"
            for table_entry in document[self.KEY].values()
        ]


def short_context(shape: Shape, pool_tokens: int) -> int:
    """Returns the prompt length of the first table: the shape's, or what the largest batch fits."""
    return min(
        shape.context_tokens, int(_POOL_SHARE * pool_tokens / shape.max_batch) - _GROWTH_TOKENS
    )


def fits_pool(batch_size: int, context_tokens: int, pool_tokens: int) -> bool:
    """Whether a pool has room for such a batch."""
    return batch_size * (context_tokens + _GROWTH_TOKENS) <= _POOL_SHARE * pool_tokens


def profile_name(check: Check) -> str:
    """Names the profile's file: the shape and the device."""
    device = next(iter(check.options.device.names()), check.options.device.value)
    name = re.sub(r"[^a-z0-9]+", "-", device.split(",")[0].lower()).strip("-")
    return f"{check.shape.name}-{name}.json"


def _measure(
    check: Check, name: str, context_tokens: int, sizes: Sequence[int], seconds: float
) -> str:
    """Runs `controller profile`; its output stays in scratch under the table's name."""
    check.deadline.require(_MIN_SECONDS, "the cost table")
    output = check.place.scratch / f"profile-{name}.json"
    partial = PartialTable(output.with_name(f"profile-{name}.partial.json"))
    tables = check.document[CostsPart.KEY]

    def save_progress(line: str) -> None:
        work.update(line)
        if cells := partial.new_cells():
            tables.setdefault(name, {"context_tokens": context_tokens})["cells_so_far"] = cells
            check.save()

    with check.terminal.show_progress(f"contexts of {context_tokens} tokens") as work:
        return measure_profile(
            check.place, check.engine(STEERED), check.sidecar(STEERED), max(seconds, 1.0),
            "--batch-sizes", ",".join(map(str, sizes)),
            "--context-tokens", str(context_tokens),
            output=output, update=save_progress,
        )  # fmt: skip


class PartialTable:
    """Reads what `controller profile` keeps of an unfinished measurement."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_mtime_ns = 0

    def new_cells(self) -> list[dict[str, Any]]:
        """Returns the medians so far, or [] when nothing was added since the last call."""
        try:
            changed = self._path.stat().st_mtime_ns
            if changed == self._last_mtime_ns:
                return []
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        self._last_mtime_ns = changed
        return [
            {
                "drafter": cell["drafter"],
                "gamma": cell["gamma"],
                "batch_size": cell["batch_size"],
                "step_seconds": median(cell["seconds"]),
                "steps": len(cell["seconds"]),
            }
            for cell in document["cells"]
            if cell["context"] == "grid" and len(cell["seconds"]) >= _MIN_STEPS
        ]


def table_cells(table_entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a table's cells, or those so far."""
    if "profile" in table_entry:
        return list(table_entry["profile"]["cells"])
    return list(table_entry.get("cells_so_far", []))


def _sort_key(arm: Arm) -> tuple[bool, bool, str, int]:
    """Returns an arm's place in the table: no draft, the engine's own drafter, then others."""
    drafter, gamma = arm
    return gamma > 0, drafter != "eagle3", drafter, gamma


def cost_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Makes the table of C(arm, B) in milliseconds."""
    arms = sorted({(cell["drafter"], cell["gamma"]) for cell in cells}, key=_sort_key)
    sizes = sorted({cell["batch_size"] for cell in cells})
    seconds = {(c["drafter"], c["gamma"], c["batch_size"]): c["step_seconds"] for c in cells}
    rows = []
    for arm in arms:
        values = [seconds.get((*arm, size)) for size in sizes]
        row = ["" if value is None else f"{1e3 * value:.2f}" for value in values]
        rows.append([arm_name(*arm), *row])
    return table(["arm", *(f"B={size}" for size in sizes)], rows)

"""Measures what the plugin adds to a step at a pinned draft length.

Twice: the time by which a whole step is longer than in SGLang alone, and the time that the shim
keeps the engine's thread.  The second may hide behind the device, with the overlap schedule.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lab.gpu_check import shim_time
from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Check, decode_steps
from lab.gpu_check.engines import PINNED, PINNED_NO_OVERLAP, STATIC, STATIC_NO_OVERLAP
from lab.gpu_check.load import steady_load, steady_stream
from lab.gpu_check.parts.part import Document, Part, spread, table
from lab.gpu_check.shapes import Shape
from lab.harness.load_generator import Play
from lab.harness.measured import Spread

_BATCH_SIZES = (1, 8, 64)
_SEED = 12
# The file is written when the engine has become idle.
_IDLE_SECONDS = 10.0
_PAIRS = {
    "overlap": (PINNED, STATIC),
    "no overlap": (PINNED_NO_OVERLAP, STATIC_NO_OVERLAP),
}


class OverheadPart(Part):
    """Measures what the plugin adds to a step."""

    KEY = "overhead"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        work = Work()
        arm = ("eagle3", planner.shape.static_gamma)
        for pair in _schedule_pairs(planner.scale.both_schedules).values():
            work += planner.count_starts(*pair)
            for size in batch_sizes(planner.shape):
                play = planner.play([steady_load(planner.shape, size)], arm)
                work += play.multiply(2 * (planner.scale.repeats + 1))
        return work

    def run(self, check: Check) -> None:
        """Plays steady loads with and without the plugin in turns (A B B A), with equal pools."""
        check.terminal.heading("The same draft length with and without the plugin")
        arm = ("eagle3", check.shape.static_gamma)
        results = check.document.setdefault(self.KEY, {"gamma": arm[1]})
        both_schedules = check.scale.both_schedules and check.options.device.overlaps
        for schedule, (steered_policy, plain_policy) in _schedule_pairs(both_schedules).items():
            check.run_only(steered_policy, plain_policy)
            for size in batch_sizes(check.shape):
                stream = steady_stream(check.shape, size, _SEED)
                check.shim_times.unlink(missing_ok=True)
                plays = check.play_pairs((steered_policy, arm), (plain_policy, None), stream)
                # One more play, since the file holds the newest one alone.
                check.shim_times.unlink(missing_ok=True)
                check.play_pinned(steered_policy, arm, stream)
                row = _comparison_row(*plays, _shim_microseconds(check, size))
                results.setdefault(schedule, {})[str(size)] = row
                check.save()

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns what is added to a step."""
        results = document[self.KEY]
        parts = [f"{row[0]}: {row[2]} µs of {row[1]}" for row in _rows(results)]
        return "measured", f"added to a step at γ = {results['gamma']}, " + "; ".join(parts)

    def sections(self, document: Document) -> list[str]:
        """Makes the table."""
        results = document[self.KEY]
        columns = [
            "load", "µs a step in SGLang alone", "µs more with the plugin",
            "speed over SGLang alone", "µs on the engine's thread (p50 / p99)",
        ]  # fmt: skip
        return [f"The plugin at γ = {results['gamma']}:\n\n" + table(columns, _rows(results))]


def _schedule_pairs(both_schedules: bool) -> dict[str, tuple[str, str]]:
    return _PAIRS if both_schedules else {"overlap": _PAIRS["overlap"]}


def batch_sizes(shape: Shape) -> tuple[int, ...]:
    """Returns the batch sizes that the shape runs; its largest where that is smaller."""
    return tuple(dict.fromkeys(min(size, shape.max_batch) for size in _BATCH_SIZES))


def step_microseconds(plays: Sequence[Play]) -> Spread:
    """Returns microseconds a decode step in each play; reading the prompts is part of it."""
    return Spread(tuple(1e6 * play.seconds / sum(map(decode_steps, play.phases)) for play in plays))


def _comparison_row(
    steered_plays: Sequence[Play], plain_plays: Sequence[Play], shim: Mapping[str, float]
) -> dict[str, Any]:
    with_plugin, without_plugin = step_microseconds(steered_plays), step_microseconds(plain_plays)
    pairs = zip(with_plugin.values, without_plugin.values, strict=True)
    return {
        "step_microseconds": with_plugin.as_json(),
        "step_microseconds_without": without_plugin.as_json(),
        "added_microseconds": Spread(tuple(a - b for a, b in pairs)).as_json(),
        "speed": without_plugin.ratio_to(with_plugin).as_json(),
        "shim_microseconds": dict(shim),
    }


def _shim_microseconds(check: Check, batch_size: int) -> dict[str, float]:
    """Returns median and 99th percentile of the shim's time in steps of a full batch."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while not check.shim_times.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    values = shim_time.read_times(check.shim_times).get(batch_size, [])
    if not values:
        return {}
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 99)}


def _rows(results: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for schedule in _PAIRS:
        for size, row in results.get(schedule, {}).items():
            added, shim = row["added_microseconds"], row["shim_microseconds"]
            rows.append(
                [
                    f"B = {size}, {schedule}",
                    f"{row['step_microseconds_without']['median']:.0f}",
                    f"{added['median']:.0f} ({added['low']:.0f} to {added['high']:.0f})",
                    spread(row["speed"]),
                    " / ".join(f"{value:.0f}" for value in shim.values()) or "not seen",
                ]
            )
    return rows

"""Figures with their bars, and the command line that every benchmark shares."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.harness.measured import Spread

RATIO = "ratio"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A figure that is the median of its repeats, with its bar if it has one."""

    name: str
    unit: str
    repeats: Sequence[float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def spread(self) -> Spread:
        """Returns the spread of the repeats."""
        return Spread(tuple(self.repeats))

    @property
    def holds(self) -> bool | None:
        """Whether the median keeps to its bar; None without one."""
        value = self.spread.median
        if self.at_most is not None:
            return value <= self.at_most
        return None if self.at_least is None else value >= self.at_least

    @property
    def bar(self) -> str:
        """Returns the bar in words."""
        if self.at_most is not None:
            return f"at most {self.at_most:,g}"
        return "" if self.at_least is None else f"at least {self.at_least:,g}"

    def as_json(self, command: str) -> dict[str, Any]:
        """One object of a result file; `command` makes it again."""
        return {
            "name": self.name,
            "value": _short(self.spread.median),
            "unit": self.unit,
            "bar": self.bar or None,
            "holds": self.holds,
            "spread": [_short(self.spread.low), _short(self.spread.high)],
            "repeats": len(self.repeats),
            "command": command,
        }


def percentiles(
    name: str, unit: str, runs: Sequence[Sequence[float]], bars: dict[float, float] | None = None
) -> list[Measurement]:
    """p50, p99 and p99.9 of each run's values; bars: the most that a percentile may be."""
    cuts = [quantiles(run, n=1000, method="inclusive") for run in runs]
    return [
        Measurement(
            f"{name}, p{share:g}",
            unit,
            [cut[round(share * 10) - 1] for cut in cuts],
            at_most=(bars or {}).get(share),
        )
        for share in (50.0, 99.0, 99.9)
    ]


def show(figures: Iterable[dict[str, Any]]) -> None:
    """A table of a result file's objects."""
    table = Table("measured", "value", "low - high", "unit", "bar", "holds")
    for figure in figures:
        low, high = figure["spread"]
        holds = {None: "", True: "yes", False: "NO"}[figure["holds"]]
        table.add_row(
            figure["name"], f"{figure['value']:,g}", f"{low:,g} - {high:,g}", figure["unit"],
            figure["bar"] or "", holds,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def command_line(
    doc: str | None, repeats: int | None = None, repeats_help: str | None = None
) -> argparse.ArgumentParser:
    """The options of every benchmark; its own ones are added to them.

    doc: the benchmark's docstring.  repeats: how many by default; None for a benchmark that repeats
    nothing.  repeats_help: what is repeated.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=repeats_help)
    return parser


def run(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Iterable[Measurement]]
) -> None:
    """Measures, prints a table, and writes `--json FILE` if asked to: the program's whole work."""
    options = parser.parse_args()
    arguments = sys.orig_argv[1:]
    if options.json is not None:
        position = arguments.index("--json") if "--json" in arguments else len(arguments)
        del arguments[position : position + 2]
    command = " ".join(["python", *arguments])
    figures = []
    for measurement in measure(options):
        figures.append(measurement.as_json(command))
        print(f"{measurement.name}: {figures[-1]['value']:,g} {measurement.unit}", flush=True)
    show(figures)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _short(value: float) -> float:
    return float(f"{value:.4g}")

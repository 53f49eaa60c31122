"""What the injections showed, for people and for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.harness.measured import machine
from tools.faults.fault import COMMAND, Outcome

_WORDS = {True: "yes", False: "NO", None: "–"}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table fault × expected × observed."""
    table = Table(show_lines=True)
    for title, ratio in (("fault", 2), ("expected", 4), ("observed", 6)):
        table.add_column(title, ratio=ratio, overflow="fold")
    table.add_column("holds")
    for outcome in outcomes:
        fault = outcome.fault
        table.add_row(
            f"{fault.name}\n{outcome.seconds:.0f} s",
            fault.expected,
            "\n".join(filter(None, (outcome.observed, _in_words(outcome.figures)))),
            _WORDS[outcome.holds],
        )
    console.print(table)


def write(outcomes: Sequence[Outcome], folder: Path) -> None:
    """`result.json` and `findings.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "faults": [outcome.as_json() for outcome in outcomes]}
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (folder / "result.json").write_text(text + "\n", encoding="utf-8")
    (folder / "findings.md").write_text("\n".join(_page(outcomes)), encoding="utf-8")


def _page(outcomes: Sequence[Outcome]) -> list[str]:
    holding = sum(outcome.holds is True for outcome in outcomes)
    skipped = sum(outcome.holds is None for outcome in outcomes)
    lines = [
        "# Faults",
        "",
        f"{len(outcomes)} faults: {holding} as expected, {skipped} not injected here.",
        "",
        f"`{COMMAND} FAULT` injects one again.",
        "",
        "| fault | injected | expected | observed | figures | holds |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        fault = outcome.fault
        cells = (
            fault.name,
            fault.injected,
            fault.expected,
            outcome.observed,
            _in_words(outcome.figures),
            _WORDS[outcome.holds],
        )
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _in_words(figures: Mapping[str, Any]) -> str:
    """`steered_again_seconds` is read as "steered again seconds"."""
    return ", ".join(f"{name.replace('_', ' ')} {_value(v)}" for name, v in figures.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['median']:g} ({value['low']:g}–{value['high']:g})"
    return f"{value:g}" if isinstance(value, float) else str(value)

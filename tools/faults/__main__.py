"""Injects every fault and says what was seen: `python -m tools.faults`.

The table is printed; `build/faults/` gets `result.json` and `findings.md`.  The exit code is 1 when
something was otherwise than expected.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lab.harness.measured import machine
from tools.faults.catalogue import linked_faults
from tools.faults.engine_faults import engine_faults, lazy_stage
from tools.faults.fault import COMMAND, Fault, Outcome, run_fault

EXIT_OTHERWISE = 1
EXIT_UNKNOWN = 2
_HOLDS = {True: "as expected", False: "OTHERWISE", None: "not injected"}
_WORDS = {True: "yes", False: "NO", None: "–"}


def faults(
    only: Annotated[list[str] | None, typer.Option(help="This fault; may be repeated.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="At random instants.")] = 200,
    damages: Annotated[int, typer.Option(min=1, help="To the database of overrides.")] = 1000,
    full_disks: Annotated[int, typer.Option(min=1, help="Under a store that writes.")] = 100,
    engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Those at a real SGLang, too.")
    ] = True,
    output: Annotated[Path, typer.Option(help="Where the findings go.")] = Path("build/faults"),
) -> None:
    """Injects faults for real, and shows fault × expected × observed."""
    output.mkdir(parents=True, exist_ok=True)
    log = (output / "stderr.log").open("wb")
    # What agents and servers say of connections that break, which is what is wanted here.
    os.dup2(log.fileno(), sys.stderr.fileno())
    console = Console()
    with lazy_stage() as stage:
        every = [
            *linked_faults(kills, damages, full_disks),
            *(engine_faults(stage) if engine else ()),
        ]
        known_names = [fault.name for fault in every]
        if only is not None and (unknown := sorted(set(only) - set(known_names))):
            console.print(f"no fault {', '.join(unknown)}; there are {', '.join(known_names)}")
            raise typer.Exit(EXIT_UNKNOWN)
        selected = [fault for fault in every if only is None or fault.name in only]
        outcomes = list(_inject_all(selected, console))
    _show(outcomes, console)
    _write(outcomes, output)
    console.print(f"{output}/findings.md, {output}/result.json")
    if any(outcome.holds is False for outcome in outcomes):
        raise typer.Exit(EXIT_OTHERWISE)


def _inject_all(selected: list[Fault], console: Console) -> Iterable[Outcome]:
    for number, fault in enumerate(selected, 1):
        console.print(f"[{number}/{len(selected)}] {fault.name}: {fault.injected}", markup=False)
        outcome = run_fault(fault)
        console.print(f"    {outcome.seconds:.1f} s, {_HOLDS[outcome.holds]}", markup=False)
        if not outcome.holds:
            console.print(f"    {outcome.observed}", markup=False)
        yield outcome


def _show(outcomes: Sequence[Outcome], console: Console) -> None:
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
            "\n".join(filter(None, (outcome.observed, _format_figures(outcome.figures)))),
            _WORDS[outcome.holds],
        )
    console.print(table)


def _write(outcomes: Sequence[Outcome], folder: Path) -> None:
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
            _format_figures(outcome.figures),
            _WORDS[outcome.holds],
        )
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _format_figures(figures: Mapping[str, Any]) -> str:
    """`steered_again_seconds` is read as "steered again seconds"."""
    return ", ".join(f"{name.replace('_', ' ')} {_value(v)}" for name, v in figures.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['median']:g} ({value['low']:g}–{value['high']:g})"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(faults)

"""Injects every fault and says what was seen: `python -m tools.faults`.

The table is printed; `build/faults/` gets `result.json` and `findings.md`.  The exit code is 1 when
something was otherwise than expected.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tools.faults import report
from tools.faults.catalogue import linked_faults
from tools.faults.engine_faults import engine_faults, on_stage
from tools.faults.fault import Fault, Outcome, injected

EXIT_OTHERWISE = 1
EXIT_UNKNOWN = 2
_HOLDS = {True: "as expected", False: "OTHERWISE", None: "not injected"}


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
    with on_stage() as stage:
        every = [
            *linked_faults(kills, damages, full_disks),
            *(engine_faults(stage) if engine else ()),
        ]
        known = [fault.name for fault in every]
        if only is not None and (unknown := sorted(set(only) - set(known))):
            console.print(f"no fault {', '.join(unknown)}; there are {', '.join(known)}")
            raise typer.Exit(EXIT_UNKNOWN)
        chosen = [fault for fault in every if only is None or fault.name in only]
        outcomes = list(_injected(chosen, console))
    report.show(outcomes, console)
    report.write(outcomes, output)
    console.print(f"{output}/findings.md, {output}/result.json")
    if any(outcome.holds is False for outcome in outcomes):
        raise typer.Exit(EXIT_OTHERWISE)


def _injected(chosen: list[Fault], console: Console) -> Iterable[Outcome]:
    for number, fault in enumerate(chosen, 1):
        console.print(f"[{number}/{len(chosen)}] {fault.name}: {fault.injected}", markup=False)
        outcome = injected(fault)
        console.print(f"    {outcome.seconds:.1f} s, {_HOLDS[outcome.holds]}", markup=False)
        if not outcome.holds:
            console.print(f"    {outcome.observed}", markup=False)
        yield outcome


if __name__ == "__main__":
    typer.run(faults)

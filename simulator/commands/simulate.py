"""Implements `controller simulate`: the production core, and every peer, on a simulated engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.output import (
    Output,
    OutputOption,
    exit_with_error,
    print_lines,
    print_result,
    print_table,
    print_wrapped,
)
from controller.core.errors import SpeculationError
from simulator.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.results import SimulationReport
    from simulator.scenarios.scenario_file import Scenario


def simulate(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[POLICY]...", help="More for --policy.")
    ] = None,
    scenario: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE.yaml", help="Runs the scenario of a file; may be repeated."),
    ] = None,
    dump_scenario: Annotated[
        str,
        typer.Option(metavar="NAME", help="Prints the file of a scenario of the suite, and ends."),
    ] = "",
    suite: Annotated[
        str,
        typer.Option(
            help="'standard', or 'standard/PART' for scenarios whose name has PART; 'cold-start': "
            "the first 500 steps without a profile."
        ),
    ] = "",
    acceptance: Annotated[
        str,
        typer.Option(
            help="geometric:0.7, positions:0.8,0.7, survival:0.8,0.6 (also DRAFTER=..., joined by "
            "semicolons), or a bank: SpecDecode-Bench .jsonl, rounds .csv."
        ),
    ] = "",
    cost: Annotated[
        list[str] | None,
        typer.Option(
            help="Step-cost table .csv (DRAFTER=PATH for several), profile .json, or a published "
            "name such as h100-llama3.1-8b."
        ),
    ] = None,
    arrivals: Annotated[
        Path | None, typer.Option(help="CSV of TIMESTAMP,ContextTokens,GeneratedTokens.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Report these only (static arms and the oracle are always run)."),
    ] = None,
    drafter: Annotated[str, typer.Option(help="Which drafter a nameless table is of.")] = "",
    concurrency: Annotated[
        str, typer.Option(help="Sequences at a time without --arrivals, e.g. 1,8,64.")
    ] = "",
    tokens: Annotated[int, typer.Option(help="Tokens a sequence and closed phase.")] = 5000,
    max_batch: Annotated[int | None, typer.Option(help="The engine's largest batch.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Number of arrivals to use, from the first.")
    ] = None,
    speed: Annotated[float, typer.Option(help="2: arrivals come twice as fast.")] = 1.0,
    prefill: Annotated[str, typer.Option(help="'none' (disaggregated) or 'chunked'.")] = "none",
    lag: Annotated[int, typer.Option(help="Steps that telemetry and plan are late.")] = 1,
    noise: Annotated[float, typer.Option(help="Standard deviation of log step seconds.")] = 0.03,
    outliers: Annotated[float, typer.Option(help="Share of steps that take ten-fold.")] = 0.0,
    profile_error: Annotated[
        float, typer.Option(help="Factor by which the controller's drafting costs are wrong.")
    ] = 1.0,
    profile_noise: Annotated[
        float, typer.Option(help="Standard deviation of the log of each cell of its profile.")
    ] = 0.01,
    no_profile: Annotated[
        bool, typer.Option("--no-profile", help="The controller starts without any costs.")
    ] = False,
    kv_seconds: Annotated[
        float, typer.Option(help="Price of a token of context, seconds; a .csv does not tell.")
    ] = 0.0,
    switch_seconds: Annotated[
        float, typer.Option(help="Price of a step whose draft length or drafter is another one.")
    ] = 2e-4,
    catch_up_seconds: Annotated[
        float | None,
        typer.Option(help="Price of a token that a drafter missed; a .csv's is derived."),
    ] = None,
    catch_up_pass_seconds: Annotated[
        float | None,
        typer.Option(help="Price of catching up, once for all tokens; a .csv's is derived."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Repetitions; paired over policies.")] = None,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    processes: Annotated[int | None, typer.Option(help="Side by side; all processors.")] = None,
    sustained: Annotated[
        bool,
        typer.Option(
            "--sustained",
            help="Also find the highest load that each policy serves within the latency bound of "
            "its scenario.",
        ),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Writes the report.")] = None,
    html: Annotated[Path | None, typer.Option(help="Writes one page with plots.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compares the controller with every static choice, hindsight, and the peers.

    Scenarios come from files (--scenario), from the suite (--suite standard), or from --acceptance
    and --cost (and perhaps --arrivals); the options about these do not change the others.
    Virtual time, seeded: equal inputs give equal results.

    Exit codes: 0 done, 2 bad input (one line on standard error).
    """
    from simulator.engine import EngineOptions, Prefill
    from simulator.user_scenarios import SimulationRequest

    selected = _selected_policies(policy, more)
    try:
        if dump_scenario:
            _print_scenario_file(dump_scenario)
            return
        if suite == "cold-start":
            _run_cold_start_suite(
                _parse_sizes(concurrency), range(seed, seed + (seeds or 3)), processes, output
            )
            return
        if prefill not in {kind.value for kind in Prefill}:
            raise InvalidInputError("--prefill", 0, f"{prefill!r}: 'none' or 'chunked'")
        options = EngineOptions(
            lag=lag, noise=noise, outlier_share=outliers, switch_seconds=switch_seconds,
            prefill=Prefill(prefill),
        )  # fmt: skip
        request = SimulationRequest(
            acceptance, tuple(cost or ()), arrivals, drafter, _parse_sizes(concurrency), tokens,
            max_batch, limit, speed, None if no_profile else profile_error, profile_noise,
            catch_up_seconds, catch_up_pass_seconds, kv_seconds, seeds or 3, options,
        )  # fmt: skip
        scenarios = _collect_scenarios(scenario or [], suite, request, seeds)
        _require_writable(json_file, html)
        if sustained:
            _require_bounds(scenarios)
        report = _run_scenarios(scenarios, seed, selected, processes, sustained=sustained)
        _show_report(report, json_file, html, output)
    except SpeculationError as error:
        exit_with_error("simulate", " ".join(str(error).splitlines()))


def _selected_policies(policy: list[str] | None, more: list[str] | None) -> list[str] | None:
    names = [name for text in [*(policy or ()), *(more or ())] for name in text.split(",") if name]
    return names or None


def _parse_sizes(text: str) -> tuple[int, ...]:

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise InvalidInputError("--concurrency", 0, f"{text!r}: numbers such as 1,8,64")
    return tuple(int(part) for part in parts)


def _print_scenario_file(name: str) -> None:
    from simulator.scenarios.scenario_file import scenario_text

    print_lines(scenario_text(name).removesuffix("\n"))


def _collect_scenarios(
    paths: "Sequence[Path]", suite: str, request: "object", seeds: int | None
) -> "list[Scenario]":
    from dataclasses import replace

    from simulator import user_scenarios
    from simulator.scenarios.scenario_file import load_scenario, standard_scenarios

    assert isinstance(request, user_scenarios.SimulationRequest)
    if not (paths or suite or request.acceptance):
        fault = "is needed, or --scenario FILE.yaml, or --suite standard"
        raise InvalidInputError("--acceptance", 0, fault)
    collected = [load_scenario(path) for path in paths]
    if suite:
        name, _, part = suite.partition("/")
        if name != "standard":
            fault = f"{name!r} is not a suite; there are 'standard' and 'cold-start'"
            raise InvalidInputError("--suite", 0, fault)
        suite_scenarios = standard_scenarios(part)
        if not suite_scenarios:
            raise InvalidInputError("--suite", 0, f"no scenario's name has {part!r}")
        collected += suite_scenarios
    if seeds:
        collected = [replace(scenario, seeds=seeds) for scenario in collected]
    if request.acceptance:
        collected += user_scenarios.make_scenarios(request)
    names = [scenario.name for scenario in collected]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError("--scenario", 0, f"{name!r} is the name of two scenarios")
    return collected


def _require_writable(*paths: Path | None) -> None:
    """Minutes of work must not end in a directory that does not exist."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidInputError(path, 0, "its directory does not exist")


def _require_bounds(scenarios: "Sequence[Scenario]") -> None:

    if all(scenario.sustained_tpot_p99_seconds is None for scenario in scenarios):
        raise InvalidInputError(
            "--sustained", 0, "no scenario has a bound on the latency per token"
        )


def _run_scenarios(
    scenarios: "Sequence[Scenario]",
    seed: int,
    selected: list[str] | None,
    processes: int | None,
    *,
    sustained: bool,
) -> "SimulationReport":
    import shlex
    import sys
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    import controller
    from simulator.comparison.run import run_all
    from simulator.comparison.summary import summarise
    from simulator.comparison.sustained import find_sustained_loads as sustained_loads
    from simulator.results import SimulationReport

    start_time = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = sum(scenario.seeds for scenario in scenarios)
        task = progress.add_task("simulating", total=total)

        def on_done(scenario: "Scenario") -> None:
            progress.update(task, advance=1, description=scenario.name[:40])

        runs = run_all(scenarios, seed, selected, processes=processes, on_done=on_done)
    loads = [
        tuple(sustained_loads(scenario, selected, seed).values())
        if sustained and scenario.sustained_tpot_p99_seconds is not None
        else ()
        for scenario in scenarios
    ]
    return SimulationReport(
        shlex.join(["controller", *sys.argv[1:]]),
        controller.__version__,
        seed,
        time.monotonic() - start_time,
        tuple(
            summarise(scenario, seed_runs, selected, load)
            for scenario, seed_runs, load in zip(scenarios, runs, loads, strict=True)
        ),
    )


def _show_report(
    report: "SimulationReport", json_file: Path | None, html: Path | None, output: Output
) -> None:
    from controller.util.files import write_atomically
    from simulator.report.html import render_html
    from simulator.report.text import render_text
    from simulator.results import to_json, to_values

    written = []
    for path, text in ((json_file, to_json), (html, render_html)):
        if path is not None:
            try:
                write_atomically(path, text(report).encode())
            except OSError as error:
                raise InvalidInputError(path, 0, f"cannot be written: {error.strerror}") from error
            written.append(str(path))

    def print_report() -> None:
        for part in render_text(report):
            if isinstance(part, str):
                print_wrapped(part)
            else:
                print_table(part, wide=output is Output.WIDE)
        for path in written:
            print_wrapped(path)

    names = [scenario.name for scenario in report.scenarios]
    print_result("Simulation", to_values(report), output, names, print_report)


def _run_cold_start_suite(
    sizes: tuple[int, ...], seeds: range, processes: int | None, output: Output
) -> None:
    from simulator.cold_start import (
        cold_start_cases,
        cold_start_table,
        cold_start_text,
        run_cold_starts,
    )

    runs = run_cold_starts(
        cold_start_cases(sizes) if sizes else cold_start_cases(), seeds, processes
    )

    def print_runs() -> None:
        print_table(cold_start_table(runs), wide=output is Output.WIDE)
        print_wrapped(cold_start_text(runs))

    items = [
        {
            "name": run.case.name, "seed": run.seed, "best_over_off": run.gain,
            "first_steps_over_off": run.ratio_to_off, "settled_over_best": run.settled_ratio,
        }
        for run in runs
    ]  # fmt: skip
    names = list(dict.fromkeys(run.case.name for run in runs))
    print_result("ColdStartList", {"items": items}, output, names, print_runs)

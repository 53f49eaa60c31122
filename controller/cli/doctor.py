"""Implements `controller doctor`: checks a pod from inside and names what to fix."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.connection import checked_address
from controller.cli.output import DOCUMENTS, Output, OutputOption, print_document, print_line
from controller.util.exit_codes import Exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.doctor import DoctorRequest, Finding


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="CONTROLLER_CONFIG", help="YAML file of settings, as for `controller serve`."
        ),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            callback=checked_address,
            help="Where the sidecar serves: unix:PATH, /PATH or HOST:PORT.",
            show_default="as the settings say",
        ),
    ] = "",
    engine_url: Annotated[
        str, typer.Option(help='The engine\'s HTTP API; "" skips its checks.')
    ] = "http://localhost:30000",
    api_key: Annotated[
        str, typer.Option(envvar="ENGINE_API_KEY", help="The engine's API key, if it has one.")
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Checks everything between engine and sidecar: ok, warn or fail, and what to do.

    Checks settings, socket, sidecar, versions, engines and their reports, profile, store, clocks,
    the engine's HTTP API and plugin, state directory, disk, health port.  Changes nothing.

    Exit codes: 0 no check failed, 1 a check failed.
    """
    import os

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from controller.doctor import DoctorRequest, Level

    findings = _run_checks(
        DoctorRequest(config, address, engine_url, api_key),
        None if output in DOCUMENTS else _print_name if output is Output.NAME else _print_finding,
    )
    if output in DOCUMENTS:
        rows = [
            {"check": item.check, "level": item.level.value, "found": item.state, "fix": item.fix}
            for item in findings
        ]
        print_document("FindingList", {"items": rows}, output)
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(Exit.FAILED)


def _run_checks(
    request: "DoctorRequest", on_finding: "Callable[[Finding], None] | None"
) -> "list[Finding]":
    """Returns all findings.  on_finding: called with each finding as soon as it is available."""
    import asyncio

    from controller.doctor import diagnose

    async def run() -> "list[Finding]":
        findings = []
        async for finding in diagnose(request):
            findings.append(finding)
            if on_finding is not None:
                on_finding(finding)
        return findings

    return asyncio.run(run())


def _print_finding(finding: "Finding") -> None:
    print_line(f"{finding.level.value:5}{finding.check}: {finding.state}")
    if finding.fix:
        print_line(f"     -> {finding.fix}")


def _print_name(finding: "Finding") -> None:
    print_line(finding.check)

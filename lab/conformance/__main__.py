"""Runs the checks: `python -m lab.conformance shim ADDRESS` and `... sidecar ADDRESS`."""

from typing import Annotated

import grpc
import typer

from controller.util.text import to_printable
from lab.conformance.rules import Findings
from lab.conformance.shim_side import ShimCheck
from lab.conformance.sidecar_side import check_sidecar

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def shim(
    address: Annotated[str, typer.Argument(help="Where to serve: unix:PATH or HOST:PORT.")],
    wait_seconds: Annotated[
        float, typer.Option(help="How long to wait for each part; the engine has to be busy.")
    ] = 120.0,
) -> None:
    """Plays a sidecar for an engine that you start with this address and keep busy."""
    try:
        findings = ShimCheck(address, print, wait_seconds).run()
    except TimeoutError as error:
        print(to_printable(str(error)))
        raise typer.Exit(2) from None
    _report_and_exit(findings)


@app.command()
def sidecar(
    address: Annotated[str, typer.Argument(help="The sidecar's: unix:PATH or HOST:PORT.")],
) -> None:
    """Plays an engine against a running sidecar that takes engines without credentials."""
    try:
        findings = check_sidecar(address)
    except grpc.RpcError as error:
        print(to_printable(f"{address}: {error.code().name}: {error.details()}"))
        raise typer.Exit(2) from None
    _report_and_exit(findings)


def _report_and_exit(findings: Findings) -> None:
    for line in findings.lines():
        print(to_printable(f"broken: {line}"))
    if findings.first:
        raise typer.Exit(1)
    print("the contract is kept")


if __name__ == "__main__":
    app()

"""What all commands share that ask a running sidecar."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import grpc

_PIPE_WIDTH = 250

Address = Annotated[
    str,
    typer.Option(
        envvar="CONTROLLER_ADDRESS", help="Where the sidecar serves: unix:PATH or HOST:PORT."
    ),
]
DEFAULT_ADDRESS = "unix:/run/speculation/controller.sock"


@contextmanager
def connected(address: str) -> "Iterator[grpc.Channel]":
    """A channel; an error of a call ends the command with exit code 1 and one line."""
    import os

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    try:
        with grpc.insecure_channel(address) as channel:
            yield channel
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        # A sidecar that serves says more than this when it cannot do something.
        silent = details is None or "failed to connect" in details or "Deadline" in details
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED} and silent:
            details = f"no sidecar answers at {address}: is `controller serve` running there?"
        typer.echo(f"controller: {details}", err=True)
        raise typer.Exit(1) from error


def print_wide(what: object) -> None:
    """To a terminal as wide as it is; to a pipe or a file as wide as it needs to be."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(what)

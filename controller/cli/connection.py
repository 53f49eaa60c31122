"""What all commands share that ask a running sidecar."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.exit_codes import Exit

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


def for_operators(address: str) -> str:
    """Where overrides are set: a unix socket beside the sidecar's, or the same TCP address."""
    from pathlib import Path

    from controller.socket_paths import operators_path

    kind, _, path = address.partition(":")
    return f"unix:{operators_path(Path(path))}" if kind == "unix" else address


@contextmanager
def connected(address: str) -> "Iterator[grpc.Channel]":
    """A channel; an error of a call ends the command with one line.

    Exit codes: NO_SIDECAR when nobody answers, else FAILED.
    """
    import os

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    from controller.credentials import why_silent

    try:
        with open_channel(address) as channel:
            yield channel
    except grpc.RpcError as error:
        away, details = is_away(error), error.details()
        if away:
            details = f"no sidecar answers at {address}: {why_silent(address, details)}"
        typer.echo(f"controller: {details}", err=True)
        raise typer.Exit(Exit.NO_SIDECAR if away else Exit.FAILED) from error


def is_away(error: "grpc.RpcError") -> bool:
    """Whether a call failed because no sidecar answers."""
    import grpc

    code, details = error.code(), error.details()
    # A sidecar that serves says more than this when it cannot do something.
    silent = details is None or "failed to connect" in details or "Deadline" in details
    return code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED} and silent


def open_channel(address: str) -> "grpc.Channel":
    """With what the environment names for it.  Ends the command when that cannot be used."""
    from controller.credentials import Credentials, CredentialsError

    try:
        credentials = Credentials.for_address(address)
    except CredentialsError as error:
        typer.echo(f"controller: {error}", err=True)
        raise typer.Exit(Exit.USAGE) from error
    channel = credentials.channel(address)
    return _with_metadata(channel, credentials.metadata()) if credentials.token else channel


def _with_metadata(channel: "grpc.Channel", more: tuple[tuple[str, str], ...]) -> "grpc.Channel":
    import grpc

    def with_it(details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), *more])

    class Interceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        def intercept_unary_unary(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            return continuation(with_it(client_call_details), request)

        def intercept_unary_stream(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            return continuation(with_it(client_call_details), request)

    return grpc.intercept_channel(channel, Interceptor())


def print_wide(what: object) -> None:
    """To a terminal as wide as it is; to a pipe or a file as wide as it needs to be."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(what)

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

    try:
        with open_channel(address) as channel:
            yield channel
    except grpc.RpcError as error:
        away, details = is_away(error), error.details()
        if away:
            details = f"no sidecar answers at {address}: is `controller serve` running there?"
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
    """Open on the unix socket and without CONTROLLER_CA; else TLS, and the caller's token."""
    import os
    from pathlib import Path

    import grpc

    def read(variable: str) -> bytes | None:
        path = os.environ.get(f"CONTROLLER_{variable}")
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            typer.echo(f"controller: {variable}: {path}: {error.strerror}", err=True)
            raise typer.Exit(Exit.USAGE) from error

    authority = None if address.startswith("unix:") else read("CA")
    token = None if address.startswith("unix:") else read("TOKEN_FILE")
    if authority is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(authority, read("CLIENT_KEY"), read("CLIENT_CERTIFICATE")),
        )
    return channel if token is None else _with_token(channel, token.decode().strip())


def _with_token(channel: "grpc.Channel", token: str) -> "grpc.Channel":
    import grpc

    def with_it(details: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {token}")]
        return details._replace(metadata=metadata)

    class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        def intercept_unary_unary(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            return continuation(with_it(client_call_details), request)

        def intercept_unary_stream(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            return continuation(with_it(client_call_details), request)

    return grpc.intercept_channel(channel, Bearer())


def print_wide(what: object) -> None:
    """To a terminal as wide as it is; to a pipe or a file as wide as it needs to be."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(what)

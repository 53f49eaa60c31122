"""Opens the connection to a running sidecar for every command that needs one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.output import exit_with_error
from controller.util.exit_codes import Exit
from controller.util.text import to_printable

if TYPE_CHECKING:
    import grpc

# The largest value of a uint32 field in a request.
UINT32_MAX = 2**32 - 1


def checked_address(text: str) -> str:
    """Returns the address in gRPC's form; raises a usage error if the text is not an address."""
    from controller.util.sockets import sidecar_address

    try:
        return sidecar_address(text) if text else ""
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Address = Annotated[
    str,
    typer.Option(
        envvar="CONTROLLER_ADDRESS",
        callback=checked_address,
        help="Where the sidecar serves: unix:PATH, /PATH or HOST:PORT.",
    ),
]
DEFAULT_ADDRESS = "unix:/run/speculation/controller.sock"


def to_operators_address(address: str) -> str:
    """Returns the operators' address: the socket next to the sidecar's, or its TCP address."""
    from controller.util.sockets import operators_address

    return operators_address(address)


@contextmanager
def open_connection(
    address: str, hints: Mapping[Exit, str] | None = None
) -> "Iterator[grpc.Channel]":
    """Opens a channel.  If a call fails, ends the command with one line and an exit code.

    address: of the sidecar, for calls that only read; its `to_operators_address` address for all
    others. hints: text that follows the error, by exit code.
    """
    import os

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    from controller.client.paging import EndlessListError

    try:
        with open_channel(address) as channel:
            yield channel
    except EndlessListError as error:
        exit_with_error("", error, Exit.FAILED)
    except grpc.RpcError as error:
        details, code = _failure_text(address, error)
        hint = (hints or {}).get(code, "")
        exit_with_error("", to_printable(f"{details}{hint and '; '}{hint}"), code)


def _failure_text(address: str, error: "grpc.RpcError") -> tuple[str, Exit]:
    """Returns one line of text and the exit code for a failed call."""
    from controller.client.channels import connection_failure_reason
    from controller.util.sockets import permission_denied_reason

    details = error.details() or error.code().name
    if is_unreachable(error):
        if denied_reason := permission_denied_reason(address):
            return f"{address}: {denied_reason}", Exit.DENIED
        return (
            f"no sidecar answers at {address}: {connection_failure_reason(address, details)}",
            Exit.NO_SIDECAR,
        )
    metadata: Any = error.trailing_metadata() or ()
    kind = next((str(value) for name, value in metadata if name == "speculation-error"), "")
    return details, _BY_ERROR.get(kind) or _BY_STATUS.get(error.code().name, Exit.FAILED)


# Exit codes by the sidecar's error name; all other errors by their status.
_BY_ERROR = {
    "UnknownEngineError": Exit.NOT_INTRODUCED,
    "NoEffectError": Exit.NO_EFFECT,
    "StoreUnavailableError": Exit.NO_STORE,
}
_BY_STATUS = {
    "INVALID_ARGUMENT": Exit.USAGE,
    "NOT_FOUND": Exit.NOT_FOUND,
    "PERMISSION_DENIED": Exit.DENIED,
    "UNAUTHENTICATED": Exit.DENIED,
}


def is_unreachable(error: "grpc.RpcError") -> bool:
    """Whether a call failed because no sidecar answers, or because it stopped during the call."""
    import grpc

    code, details = error.code(), error.details()
    # The commands cancel no calls themselves.
    if code is grpc.StatusCode.CANCELLED or details == "Cancelling all calls":
        return True
    # A running sidecar sends other details with its errors.
    silent = details is None or "failed to connect" in details or "Deadline" in details
    return code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED} and silent


def open_channel(address: str) -> "grpc.Channel":
    """Opens a channel with the credentials that the environment names.

    address: as in `open_connection`.  Ends the command if they cannot be used.
    """
    from controller.client.channels import Credentials, CredentialsError, reading_channel

    try:
        credentials = Credentials.for_address(address)
    except CredentialsError as error:
        exit_with_error("", error)
    channel = reading_channel(credentials, address)
    return _add_metadata(channel, credentials.metadata()) if credentials.token else channel


def _add_metadata(channel: "grpc.Channel", entries: tuple[tuple[str, str], ...]) -> "grpc.Channel":
    import grpc

    def add_entries(details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), *entries])

    class Interceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
        def intercept_unary_unary(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            return continuation(add_entries(client_call_details), request)

        intercept_unary_stream = intercept_unary_unary

    return grpc.intercept_channel(channel, Interceptor())

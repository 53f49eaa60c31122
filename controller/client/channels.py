"""Connects to a sidecar: without encryption on its unix socket; over TCP with TLS and a token.

CONTROLLER_CA names the authority of the sidecar's certificate, and turns TLS on.
CONTROLLER_CLIENT_CERTIFICATE and CONTROLLER_CLIENT_KEY name the caller's own certificate, and
CONTROLLER_TOKEN_FILE its token.  All are PEM or text files.

Calls that only read use the operators' socket if possible, because calls of engines do not count
against its rate limit.  If it refuses a caller, because the access list names other users or too
many operators are connected, the call is repeated on the engines' socket.
"""

import getpass
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from controller.core.errors import SpeculationError
from controller.util.sockets import is_loopback, reading_addresses

# Connect directly, even if the environment names an HTTP proxy.
_OPTIONS = (("grpc.enable_http_proxy", 0),)
# Answers of the operators' socket after which the call is repeated on the engines' socket.
_FALLBACK_STATUSES = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


class CredentialsError(SpeculationError):
    """The environment names credentials that cannot be used."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a caller.  tls: None for a plaintext connection.  token: "" for none."""

    tls: grpc.ChannelCredentials | None = None
    token: str = ""

    @classmethod
    def for_address(cls, address: str) -> Self:
        """Reads the credentials that the environment names; a unix socket needs none.

        Raises CredentialsError.
        """
        if address.startswith("unix:"):
            return cls()
        authority, token = _read_file("CA"), _read_token()
        certificate, key = _read_file("CLIENT_CERTIFICATE"), _read_file("CLIENT_KEY")
        if (certificate is None) != (key is None):
            raise CredentialsError(
                "CONTROLLER_CLIENT_CERTIFICATE and CONTROLLER_CLIENT_KEY need each other, and one "
                "of them is not set"
            )
        if authority is None and certificate is not None:
            raise CredentialsError("a certificate needs TLS: name the authority in CONTROLLER_CA")
        if authority is None and token and not is_loopback(address):
            raise CredentialsError(
                "the token would be sent unencrypted: name the authority in CONTROLLER_CA"
            )
        tls = (
            None if authority is None else grpc.ssl_channel_credentials(authority, key, certificate)
        )
        return cls(tls, token)

    def channel(self, address: str, *options: tuple[str, int | str]) -> grpc.Channel:
        """Makes a channel that is not connected yet; callers add `metadata` to their calls."""
        if self.tls is None:
            return grpc.insecure_channel(address, options=_OPTIONS + options)
        return grpc.secure_channel(address, self.tls, options=_OPTIONS + options)

    def aio_channel(self, address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
        """Does the same as `channel`, for asyncio."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS + options)
        return grpc.aio.secure_channel(address, self.tls, options=_OPTIONS + options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def connection_failure_reason(address: str, details: str | None) -> str:
    """Names what to check if no sidecar answers.  details: gRPC's error text."""
    if "handshake failed" in (details or "").lower():
        return "the authority in CONTROLLER_CA has not issued this sidecar's certificate and name"
    running = "is `controller serve` running there?"
    if address.startswith("unix:"):
        return f"{running} If it uses another address, set CONTROLLER_ADDRESS"
    if "CONTROLLER_CA" in os.environ:
        return running
    return f"{running} If it uses TLS, name its authority in CONTROLLER_CA"


def _read_token() -> str:
    token = (_read_file("TOKEN_FILE") or b"").decode("ascii", "replace").strip()
    # Otherwise gRPC would raise a different error at the call.
    if not (token.isascii() and token.isprintable()):
        raise CredentialsError(
            f"CONTROLLER_TOKEN_FILE: {os.environ['CONTROLLER_TOKEN_FILE']}: the token is not one "
            "line of printable ASCII"
        )
    return token


def _read_file(name: str) -> bytes | None:
    path = os.environ.get(f"CONTROLLER_{name}")
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise CredentialsError(f"CONTROLLER_{name}: {path}: {error.strerror}") from error


def reading_channel(
    credentials: Credentials, address: str, *options: tuple[str, int | str]
) -> grpc.Channel:
    """Makes a channel that is not connected yet, for calls that only read.

    address: of the sidecar.  A call that the operators' socket refuses is repeated at `address`.
    """
    operators_channel, *fallback_channels = [
        credentials.channel(reading_address, *options)
        for reading_address in reading_addresses(address)
    ]
    return (
        _ReadingChannel(operators_channel, fallback_channels[0])
        if fallback_channels
        else operators_channel
    )


class _ReadingChannel(grpc.Channel):
    """A channel that calls `first` and repeats a refused call on `other`."""

    def __init__(self, operators_channel: grpc.Channel, engines_channel: grpc.Channel) -> None:
        self._operators_channel, self._engines_channel = operators_channel, engines_channel

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        operators_call = self._operators_channel.unary_unary(*arguments, **options)
        engines_call = self._engines_channel.unary_unary(*arguments, **options)

        def call(request: Any, **of_call: Any) -> Any:
            try:
                return operators_call(request, **of_call)
            except grpc.RpcError as error:
                if not _is_refused(error):
                    raise
            return engines_call(request, **of_call)

        return call

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        operators_call = self._operators_channel.unary_stream(*arguments, **options)
        engines_call = self._engines_channel.unary_stream(*arguments, **options)
        return lambda request, **of_call: _AnswerStream(
            lambda: operators_call(request, **of_call), lambda: engines_call(request, **of_call)
        )

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._engines_channel.stream_unary(*arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._engines_channel.stream_stream(*arguments, **options)

    def subscribe(self, callback: Any, try_to_connect: Any = False) -> None:
        self._operators_channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._operators_channel.unsubscribe(callback)

    def close(self) -> None:
        self._operators_channel.close()
        self._engines_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _AnswerStream:
    """Iterates over the answers of a streaming call."""

    def __init__(
        self, start_first_call: Callable[[], Any], start_fallback_call: Callable[[], Any]
    ) -> None:
        self._call, self._start_fallback_call = start_first_call(), start_fallback_call
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            answer = next(self._call)
        except grpc.RpcError as error:
            if self._has_begun or not _is_refused(error):
                raise
            self._call = self._start_fallback_call()
            answer = next(self._call)
        self._has_begun = True
        return answer

    def cancel(self) -> None:
        """Ends the call."""
        self._call.cancel()


def _is_refused(error: grpc.RpcError) -> bool:
    """Whether the operators' socket, or its server, refused the call."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        # A sidecar that is shutting down sends other details.
        return "failed to connect" in (error.details() or "")
    return error.code() in _FALLBACK_STATUSES


def user_name() -> str:
    """Returns the user's name, or its uid if it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"

"""Connects a command to a sidecar: open on its unix socket; over TCP by TLS, and with a token.

CONTROLLER_CA names the authority of the sidecar's certificate, and switches TLS on;
CONTROLLER_CLIENT_CERTIFICATE and CONTROLLER_CLIENT_KEY a certificate of the caller's own;
CONTROLLER_TOKEN_FILE its token.  All are PEM or text files.

Calls that only read go through the operators' socket where that is possible: there, the calls of
engines and of others cannot use up what a sidecar answers in a second.  Who may not read there,
because the access list names other users or because too many operators are connected, reads
through the engines' socket.
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

# A sidecar is called where it is, whatever proxy the environment names for the web.
_OPTIONS = (("grpc.enable_http_proxy", 0),)
# What the operators' socket answers to those who have to ask elsewhere.
_ELSEWHERE = frozenset(
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
    """Holds the credentials of a caller.  tls: None for a plaintext line.  token: "" for none."""

    tls: grpc.ChannelCredentials | None = None
    token: str = ""

    @classmethod
    def for_address(cls, address: str) -> Self:
        """Returns the credentials of the environment; none for a unix socket.

        Raises CredentialsError.
        """
        if address.startswith("unix:"):
            return cls()
        authority, token = _read("CA"), _read_token()
        certificate, key = _read("CLIENT_CERTIFICATE"), _read("CLIENT_KEY")
        if (certificate is None) != (key is None):
            raise CredentialsError(
                "CONTROLLER_CLIENT_CERTIFICATE and CONTROLLER_CLIENT_KEY go together: one of them "
                "is not set"
            )
        if authority is None and certificate is not None:
            raise CredentialsError("a certificate needs TLS: name the authority in CONTROLLER_CA")
        if authority is None and token and not is_loopback(address):
            raise CredentialsError(
                "the token would go over an open line: name the authority in CONTROLLER_CA"
            )
        tls = (
            None if authority is None else grpc.ssl_channel_credentials(authority, key, certificate)
        )
        return cls(tls, token)

    def channel(self, address: str, *options: tuple[str, int | str]) -> grpc.Channel:
        """Makes a channel that is not connected yet; its calls carry no metadata of themselves."""
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


def why_silent(address: str, details: str | None) -> str:
    """Names what to check where no sidecar answers.  details: gRPC's words."""
    if "handshake failed" in (details or "").lower():
        return "CONTROLLER_CA's authority has issued no such certificate for this name"
    running = "is `controller serve` running there?"
    if address.startswith("unix:"):
        return f"{running} If it listens elsewhere, CONTROLLER_ADDRESS names the place"
    if "CONTROLLER_CA" in os.environ:
        return running
    return f"{running} If it serves TLS, name its authority in CONTROLLER_CA"


def _read_token() -> str:
    token = (_read("TOKEN_FILE") or b"").decode("ascii", "replace").strip()
    # gRPC would raise an error of its own at the call.
    if not (token.isascii() and token.isprintable()):
        raise CredentialsError(
            f"CONTROLLER_TOKEN_FILE: {os.environ['CONTROLLER_TOKEN_FILE']}: the token is not one "
            "line of printable ASCII"
        )
    return token


def _read(name: str) -> bytes | None:
    path = os.environ.get(f"CONTROLLER_{name}")
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise CredentialsError(f"CONTROLLER_{name}: {path}: {error.strerror}") from error


def reading_channel(
    credentials: Credentials, address: str, *options: tuple[str, int | str]
) -> grpc.Channel:
    """Makes a channel that is not connected yet, for calls that can be repeated without harm.

    address: of the sidecar.  A call that the operators' socket refuses is made there.
    """
    first, *others = [credentials.channel(found, *options) for found in reading_addresses(address)]
    return _ReadingChannel(first, others[0]) if others else first


class _ReadingChannel(grpc.Channel):
    """Asks `first`, and `other` what is refused there."""

    def __init__(self, first: grpc.Channel, other: grpc.Channel) -> None:
        self._first, self._other = first, other

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        first = self._first.unary_unary(*arguments, **options)
        other = self._other.unary_unary(*arguments, **options)

        def call(request: Any, **of_call: Any) -> Any:
            try:
                return first(request, **of_call)
            except grpc.RpcError as error:
                if not _is_refused(error):
                    raise
            return other(request, **of_call)

        return call

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        first = self._first.unary_stream(*arguments, **options)
        other = self._other.unary_stream(*arguments, **options)
        return lambda request, **of_call: _Answers(
            lambda: first(request, **of_call), lambda: other(request, **of_call)
        )

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._other.stream_unary(*arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._other.stream_stream(*arguments, **options)

    def subscribe(self, callback: Any, try_to_connect: Any = False) -> None:
        self._first.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._first.unsubscribe(callback)

    def close(self) -> None:
        self._first.close()
        self._other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Answers:
    """Iterates over the answers of a call that answers with a stream."""

    def __init__(self, first: Callable[[], Any], other: Callable[[], Any]) -> None:
        self._call, self._other = first(), other
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            answer = next(self._call)
        except grpc.RpcError as error:
            if self._has_begun or not _is_refused(error):
                raise
            self._call = self._other()
            answer = next(self._call)
        self._has_begun = True
        return answer

    def cancel(self) -> None:
        """Ends the call."""
        self._call.cancel()


def _is_refused(error: grpc.RpcError) -> bool:
    """Whether the operators' socket, or the server behind it, does not take the call."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        # What a sidecar is away for says something else.
        return "failed to connect" in (error.details() or "")
    return error.code() in _ELSEWHERE


def user_name() -> str:
    """The name of the user; the number where nobody has named it, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"

"""Connects a command to a sidecar: open on its unix socket; over TCP by TLS, and with a token.

CONTROLLER_CA names the authority of the sidecar's certificate, and switches TLS on;
CONTROLLER_CLIENT_CERTIFICATE and CONTROLLER_CLIENT_KEY a certificate of the caller's own;
CONTROLLER_TOKEN_FILE its token.  All are PEM or text files.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import grpc.aio

from controller.core.errors import SpeculationError
from controller.util.loopback import is_loopback

# A sidecar is called where it is, whatever proxy the environment names for the web.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


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

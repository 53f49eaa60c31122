"""Connects the agent to a sidecar over TCP: TLS, and a token or a certificate of its own.

The files are read for every session, so that what rotates is taken up when the next one opens.
"""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from engine_shim.link.errors import LinkSettingsError
from engine_shim.link.sidecar_address import is_on_this_machine

_CHANNEL_OPTIONS: Final = (
    # Waits between attempts are the client's; gRPC's own would go up to two minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A plan of 512 rows has 30 kB: what is larger is not for an engine.
    ("grpc.max_receive_message_length", 1 << 20),
)


@dataclass(frozen=True, slots=True)
class EngineCredentials:
    """Paths of PEM files and of a token's file; "" for none.  Without `ca` the line is open."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    token_file: str = ""

    def channel(self, target: str) -> grpc.aio.Channel:
        """Makes a channel that is not connected yet.

        Raises OSError for a file that cannot be read, and LinkSettingsError where the token would
        leave this machine unencrypted.
        """
        if not self.ca:
            if self.token_file and not is_on_this_machine(target):
                raise LinkSettingsError(
                    f"the token would go over an open line to {target}: name the authority of the "
                    "sidecar's certificate (--ca, or SPECULATION_CA)"
                )
            return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        key, certificate = _read(self.key), _read(self.certificate)
        tls = grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), key, certificate)
        return grpc.aio.secure_channel(target, tls, options=_CHANNEL_OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that every call carries.

        Raises OSError, also for a file that holds no token: gRPC would raise an error of its own at
        the call.
        """
        content = _read(self.token_file)
        if content is None:
            return ()
        token = content.decode("ascii", "replace").strip()
        if not (token.isascii() and token.isprintable()):
            wrong = "the token is not one line of printable ASCII"
            raise OSError(errno.EINVAL, wrong, self.token_file)
        return (("authorization", f"Bearer {token}"),)


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None

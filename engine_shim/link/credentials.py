"""Connects the agent to a sidecar over TCP: with TLS, and a token or a client certificate.

The files are read again for every session, so rotated files take effect with the next session.
"""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from engine_shim.link.errors import LinkSettingsError
from engine_shim.link.sidecar_address import is_local_address

_CHANNEL_OPTIONS: Final = (
    # The client waits between attempts itself; gRPC's own backoff would reach two minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A plan of 512 rows has 30 kB; a larger message is not meant for an engine.
    ("grpc.max_receive_message_length", 1 << 20),
)


@dataclass(frozen=True, slots=True)
class EngineCredentials:
    """Paths of PEM files and of a token file; "" for none.  No TLS is used without `ca`."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    token_file: str = ""

    def channel(self, target: str) -> grpc.aio.Channel:
        """Makes a channel that is not connected yet.

        Raises OSError for a file that cannot be read, and LinkSettingsError if the token would
        leave this machine unencrypted.
        """
        if not self.ca:
            if self.token_file and not is_local_address(target):
                raise LinkSettingsError(
                    f"the token would be sent unencrypted to {target}: name the authority of the "
                    "sidecar's certificate (--ca, or SPECULATION_CA)"
                )
            return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        key, certificate = _read(self.key), _read(self.certificate)
        tls = grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), key, certificate)
        return grpc.aio.secure_channel(target, tls, options=_CHANNEL_OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that every call carries.

        Raises OSError, also for a file that contains no valid token: otherwise gRPC would raise its
        own error at the call.
        """
        content = _read(self.token_file)
        if content is None:
            return ()
        token = content.decode("ascii", "replace").strip()
        if not (token.isascii() and token.isprintable()):
            message = "the token is not one line of printable ASCII"
            raise OSError(errno.EINVAL, message, self.token_file)
        return (("authorization", f"Bearer {token}"),)


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None

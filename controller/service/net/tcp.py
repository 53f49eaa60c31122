"""Binds TCP on request: with TLS or unencrypted, but without tokens on an unencrypted line."""

from collections.abc import Iterable

import grpc
import grpc.aio
import structlog

from controller.service.net.access import DIGEST, AccessList
from controller.service.net.errors import AddressTakenError, StartRefusedError
from controller.service.net.tls import certificates
from controller.settings.settings import Settings
from controller.util.sockets import is_loopback

_log = structlog.get_logger(__name__)


def require_no_open_token(settings: Settings, keys: Iterable[str]) -> None:
    """Raises StartRefusedError if tokens of an access list would go over an open line.

    keys: of the list, at the start and at every change.
    """
    address = settings.tcp
    if address is None or settings.tls_certificate is not None or is_loopback(address):
        return
    if any(key.startswith(DIGEST) for key in keys):
        raise StartRefusedError(
            "the access list has tokens, and they would go over an open line: name a TLS "
            "certificate and key, or listen on the loopback address"
        )


def bind(
    server: grpc.aio.Server, address: str, settings: Settings, access: AccessList | None
) -> None:
    """Raises AccessFileError for TLS files that cannot be used, and AddressTakenError."""
    encrypted = settings.tls_certificate is not None
    try:
        if settings.tls_certificate is not None and settings.tls_key is not None:
            server.add_secure_port(
                address,
                certificates(settings.tls_certificate, settings.tls_key, settings.tls_client_ca),
            )
        else:
            server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressTakenError(
            f"{address} cannot be bound (in use?): name another one with --tcp"
        ) from error
    if not encrypted or access is None:
        _log.warning(
            "tcp_open",
            address=address,
            encrypted=encrypted,
            detail="anyone who reaches it may read and steer, and nothing else"
            if access is None
            else "no encryption",
        )

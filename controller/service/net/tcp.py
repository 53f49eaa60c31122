"""Binds TCP on request, with TLS or unencrypted; tokens are refused on an unencrypted connection.

The TLS files may be replaced while the sidecar runs: they are read again for every connection.  If
the files do not match, because only one of them was replaced yet or one is half-written, the
previous ones stay in use.
"""

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from controller.service.net.access import BEARER_KEY_PREFIX, AccessFileError, AccessList
from controller.service.net.errors import AddressTakenError, StartRefusedError
from controller.settings.settings import Settings
from controller.util.files import UnreadableFileError, read_small
from controller.util.sockets import is_loopback

# Bytes of a PEM file; a bundle of all public authorities has a quarter of this.
_MAX_BYTES: Final = 1024 * 1024

_log = structlog.get_logger(__name__)


def require_no_unencrypted_token(settings: Settings, keys: Iterable[str]) -> None:
    """Raises StartRefusedError if tokens of an access list would be sent unencrypted.

    keys: the keys of the list, at the start and at every change.
    """
    address = settings.tcp
    if address is None or settings.tls_certificate is not None or is_loopback(address):
        return
    if any(key.startswith(BEARER_KEY_PREFIX) for key in keys):
        raise StartRefusedError(
            "the access list has tokens, and they would be sent unencrypted: set a TLS certificate "
            "and key, or listen on the loopback address"
        )


def bind(
    server: grpc.aio.Server, address: str, settings: Settings, access: AccessList | None
) -> None:
    """Binds the address.

    Raises AccessFileError for TLS files that cannot be used, and AddressTakenError.
    """
    encrypted = settings.tls_certificate is not None
    try:
        if settings.tls_certificate is not None and settings.tls_key is not None:
            server.add_secure_port(
                address,
                server_credentials(
                    settings.tls_certificate, settings.tls_key, settings.tls_client_ca
                ),
            )
        else:
            server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressTakenError(
            f"{address} cannot be bound (in use?): choose another one with --tcp"
        ) from error
    if not encrypted or access is None:
        _log.warning(
            "tcp_open",
            address=address,
            encrypted=encrypted,
            detail="every client that reaches it may read and steer, but nothing else"
            if access is None
            else "no encryption",
        )


def server_credentials(
    certificate: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCredentials:
    """Makes credentials from these files.  Raises AccessFileError if they do not match."""
    paths = [certificate, key, *([client_ca] if client_ca else [])]
    last_result: list[bytes] | str = ""

    def fetch() -> Any:
        nonlocal last_result
        try:
            contents = _read_pem_files(paths)
            if contents == last_result:
                return None
            configuration = _tls_configuration(paths, contents)
        except AccessFileError as error:
            if str(error) != last_result:
                last_result = str(error)
                _log.error("certificate_not_read", error=last_result)
            return None
        last_result = contents
        return configuration

    last_result = _read_pem_files(paths)
    return grpc.dynamic_ssl_server_credentials(
        _tls_configuration(paths, last_result), fetch, client_ca is not None
    )


def _read_pem_files(paths: list[Path]) -> list[bytes]:
    contents = []
    for path in paths:
        try:
            contents.append(read_small(path, _MAX_BYTES))
        except UnreadableFileError as error:
            raise AccessFileError(f"TLS: {path}: {error}") from error
    return contents


def _tls_configuration(paths: list[Path], contents: list[bytes]) -> Any:
    """Makes the configuration from a certificate, its key and, if there is one, the clients' CA.

    Raises AccessFileError if they are not such files, or do not match.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # gRPC decides on the required strength of a key.
        context.set_ciphers("ALL:@SECLEVEL=0")
        # gRPC has no password; without this, OpenSSL would prompt for it on the terminal.
        context.load_cert_chain(paths[0], paths[1], password=lambda: "")
        for authority in paths[2:]:
            context.load_verify_locations(authority)
    except (ssl.SSLError, OSError, ValueError) as error:
        names = ", ".join(map(str, paths))
        raise AccessFileError(
            f"TLS: {names} are not a PEM certificate, its key without a password, and an "
            f"authority: {error}"
        ) from error
    if _read_pem_files(paths) != contents:
        raise AccessFileError("TLS: the files changed while they were read")
    certificate, key, *authorities = contents
    return grpc.ssl_server_certificate_configuration(
        [(key, certificate)], authorities[0] if authorities else None
    )

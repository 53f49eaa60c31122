"""Serves TLS from files that may be replaced while the sidecar runs.

They are read again for every connection.  Files that do not fit together, because one of them has
been replaced so far or is half-written, are not used: the ones before stay in use.
"""

import ssl
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from controller.service.net.access import AccessFileError
from controller.util.files import UnreadableFileError, read_small

# Of a PEM file; a bundle of all public authorities has a quarter of it.
_MAX_BYTES: Final = 1024 * 1024
_log = structlog.get_logger(__name__)


def certificates(certificate: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Makes credentials of these files.  Raises AccessFileError if they do not fit together."""
    paths = [certificate, key, *([client_ca] if client_ca else [])]
    judged: list[bytes] | str = ""

    def fetch() -> Any:
        nonlocal judged
        try:
            found = _pem_files(paths)
            if found == judged:
                return None
            configuration = _tls(paths, found)
        except AccessFileError as error:
            if str(error) != judged:
                judged = str(error)
                _log.error("certificate_not_read", error=judged)
            return None
        judged = found
        return configuration

    judged = _pem_files(paths)
    return grpc.dynamic_ssl_server_credentials(_tls(paths, judged), fetch, client_ca is not None)


def _pem_files(paths: list[Path]) -> list[bytes]:
    found = []
    for path in paths:
        try:
            found.append(read_small(path, _MAX_BYTES))
        except UnreadableFileError as error:
            raise AccessFileError(f"TLS: {path}: {error}") from error
    return found


def _tls(paths: list[Path], contents: list[bytes]) -> Any:
    """Makes the configuration of a certificate, its key and, if there is one, the clients' CA.

    Raises AccessFileError if they are no such files, or do not fit together.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # How strong a key has to be is gRPC's affair.
        context.set_ciphers("ALL:@SECLEVEL=0")
        # gRPC knows no password; without this, OpenSSL would ask for it on the terminal.
        context.load_cert_chain(paths[0], paths[1], password=lambda: "")
        for authority in paths[2:]:
            context.load_verify_locations(authority)
    except (ssl.SSLError, OSError, ValueError) as error:
        names = ", ".join(map(str, paths))
        raise AccessFileError(
            f"TLS: {names} are not a PEM certificate, its key without a password, and an "
            f"authority: {error}"
        ) from error
    if _pem_files(paths) != contents:
        raise AccessFileError("TLS: the files change while they are read")
    certificate, key, *authorities = contents
    return grpc.ssl_server_certificate_configuration(
        [(key, certificate)], authorities[0] if authorities else None
    )

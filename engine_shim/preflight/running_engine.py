"""The flags of a running SGLang, as it was started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
from typing import Final
from urllib.parse import SplitResult, urlsplit

from engine_shim.common.verdict import InputError
from engine_shim.link.sidecar_address import is_on_this_machine
from engine_shim.preflight.known_flags import TakenFlags, taken_from

# For the whole answer, however slowly it comes.
PATIENCE_SECONDS: Final = 10.0
# Bytes: SGLang's answer has some tens of kB, and its command line some hundred bytes.
_LARGEST_ANSWER: Final = 4 << 20
_LONGEST_COMMAND: Final = 1 << 16
_INSTEAD: Final = "give its flags after `--`, without --url"


def flags_of(url: str) -> TakenFlags:
    """Asks /server_info for the command line of an engine, and takes what is harmless of it.

    url: http or https; the key in ENGINE_API_KEY is sent, if there is one, but only encrypted or on
    this machine.  Redirects are not followed, and no proxy is asked.  Raises InputError.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{url}: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InputError(f"{url} is no http:// or https:// address")
    headers = _headers(parts, os.environ.get("ENGINE_API_KEY", ""))
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, port, timeout=PATIENCE_SECONDS, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=PATIENCE_SECONDS)
    try:
        status, content = _answer(connection, f"{parts.path.rstrip('/')}/server_info", headers)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _stranger(url, error) from error
    finally:
        connection.close()
    if 300 <= status < 400:
        raise InputError(
            f"{url}/server_info answers {status}, a redirect, which is not followed: name the "
            "engine's own address"
        )
    if status != http.client.OK:
        raise InputError(f"{url}/server_info answers {status} (a key is taken from ENGINE_API_KEY)")
    return flags_in(content, url)


def flags_in(content: bytes, url: str) -> TakenFlags:
    """Reads the answer to /server_info.  url: named in errors.  Raises InputError."""
    if len(content) > _LARGEST_ANSWER:
        raise InputError(f"{url}/server_info answers more than {_LARGEST_ANSWER} bytes")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _stranger(url, error) from error
    command = found.get("launch_command") if isinstance(found, dict) else None
    if not isinstance(command, str) or not command.strip():
        raise InputError(
            f"{url}/server_info has no launch_command, which SGLang 0.5.23 has: {_INSTEAD}"
        )
    if len(command) > _LONGEST_COMMAND:
        raise InputError(f"the command line of {url} has {len(command)} characters: {_INSTEAD}")
    if any(mark in command for mark in "{}\"'"):
        raise InputError(
            f"the flags of {url} hold JSON, which SGLang joins with blanks and cannot be told "
            f"apart again: {_INSTEAD}"
        )
    try:
        return taken_from(command.split())
    except InputError as error:
        raise InputError(f"the flags of {url}: {error}: {_INSTEAD}") from error


def _headers(parts: SplitResult, key: str) -> dict[str, str]:
    """Returns the headers of the request.  Raises InputError where the key must not be sent."""
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise InputError("ENGINE_API_KEY holds what is not printable ASCII text")
    host = parts.hostname or ""
    address = f"[{host}]:80" if ":" in host else f"{host}:80"
    if parts.scheme == "http" and not is_on_this_machine(address):
        raise InputError(
            "the key in ENGINE_API_KEY would go over an open line: use https://, run this beside "
            "the engine, or unset ENGINE_API_KEY"
        )
    return {"Authorization": f"Bearer {key}"}


def _answer(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Returns the status and the content, of which one byte too many is read at most."""
    connection.connect()
    opened = connection.sock

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(PATIENCE_SECONDS, hang_up)
    watch.daemon = True
    watch.start()
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(_LARGEST_ANSWER + 1)
    finally:
        watch.cancel()


def _stranger(url: str, error: Exception) -> InputError:
    return InputError(f"{url}/server_info does not answer as SGLang does: {error}")

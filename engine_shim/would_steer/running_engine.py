"""The flags of a running SGLang, as it was started."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Final

from engine_shim.steering.verdict import InputError

PATIENCE_SECONDS: Final = 10.0
_LARGEST_ANSWER: Final = 16 << 20
_INSTEAD: Final = "give its flags after `--` instead"


def flags_of(url: str) -> list[str]:
    """Asks /server_info for the command line of an engine.

    url: http or https; the key in ENGINE_API_KEY is sent, if there is one.  Raises InputError.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url} is no http:// or https:// address")
    key = os.environ.get("ENGINE_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/server_info", headers=headers)  # noqa: S310 - checked above
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:  # noqa: S310 - same
            content: bytes = answer.read(_LARGEST_ANSWER)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _stranger(url, error) from error
    return flags_in(content, url)


def flags_in(content: bytes, url: str) -> list[str]:
    """Reads the answer to /server_info.  url: named in errors.  Raises InputError."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _stranger(url, error) from error
    command = found.get("launch_command") if isinstance(found, dict) else None
    if not isinstance(command, str) or not command.strip():
        raise InputError(
            f"{url}/server_info has no launch_command, which SGLang 0.5.23 has: {_INSTEAD}"
        )
    if any(mark in command for mark in "{}\"'"):
        raise InputError(
            f"the flags of {url} hold JSON, which SGLang joins with blanks and cannot be told "
            f"apart again: {_INSTEAD}"
        )
    return command.split()


def _stranger(url: str, error: Exception) -> InputError:
    return InputError(f"{url}/server_info does not answer as SGLang does: {error}")

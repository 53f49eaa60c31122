"""The flags with which a running SGLang was started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from engine_shim.link.sidecar_address import is_local_address
from engine_shim.preflight.verdict import InputError

# For the whole answer.
TIMEOUT_SECONDS: Final = 10.0
# Bytes and characters: SGLang's answer has tens of kB, its command line hundreds of bytes.
_MAX_ANSWER_BYTES: Final = 4 << 20
_MAX_COMMAND_CHARACTERS: Final = 1 << 16
_ALTERNATIVE_HINT: Final = "give its flags after `--`, without --url"

_SWITCH_FLAGS: Final = frozenset(
    {
        "--disable-cuda-graph", "--disable-cuda-graph-padding", "--disable-decode-cuda-graph",
        "--disable-overlap-schedule", "--disable-prefill-cuda-graph", "--disable-radix-cache",
        "--enable-custom-logit-processor", "--enable-deterministic-inference",
        "--enable-dp-attention", "--enable-dp-attention-local-control-broadcast",
        "--enable-dp-lm-head", "--enable-hicache", "--enable-hierarchical-cache", "--enable-lora",
        "--enable-mixed-chunk", "--enable-multi-layer-eagle", "--enable-pdmux",
        "--enable-two-batch-overlap", "--skip-tokenizer-init", "--speculative-adaptive",
        "--speculative-use-rejection-sampling",
    }
)  # fmt: skip
# Limits above the values of any engine, and far below values that cost SGLang memory or time.
_RANKS: Final = (1, 4096)
_BATCH: Final = (1, 65_536)
_DRAFT: Final = (0, 1024)
_TOKENS: Final = (1, 2**31 - 1)
_CHUNK: Final = (-1, 2**31 - 1)
_NUMBER_FLAGS: Final = {
    "--attention-context-parallel-size": _RANKS,
    "--attention-data-parallel-size": _RANKS,
    "--attn-cp-size": _RANKS,
    "--attn-dp-size": _RANKS,
    "--chunked-prefill-size": _CHUNK,
    "--context-length": _TOKENS,
    "--cuda-graph-max-bs": _BATCH,
    "--cuda-graph-max-bs-decode": _BATCH,
    "--cuda-graph-max-bs-prefill": _BATCH,
    "--data-parallel-size": _RANKS,
    "--disaggregation-decode-extra-slots": _BATCH,
    "--dp": _RANKS,
    "--dp-size": _RANKS,
    "--ep": _RANKS,
    "--ep-size": _RANKS,
    "--expert-parallel-size": _RANKS,
    "--max-prefill-tokens": _TOKENS,
    "--max-running-requests": _BATCH,
    "--max-total-tokens": _TOKENS,
    "--page-size": _BATCH,
    "--pipeline-parallel-size": _RANKS,
    "--pp": _RANKS,
    "--pp-size": _RANKS,
    "--speculative-dflash-block-size": _DRAFT,
    "--speculative-draft-window-size": _TOKENS,
    "--speculative-eagle-topk": _DRAFT,
    "--speculative-num-draft-tokens": _DRAFT,
    "--speculative-num-steps": _DRAFT,
    "--tensor-parallel-size": _RANKS,
    "--tp": _RANKS,
    "--tp-size": _RANKS,
    "--triton-attention-num-kv-splits": _BATCH,
    "--triton-attention-split-tile-size": _TOKENS,
}
# Batch sizes, as many as there are in _BATCH at most.
_LIST_FLAGS: Final = frozenset(
    {"--cuda-graph-bs", "--cuda-graph-bs-decode", "--cuda-graph-bs-prefill"}
)
_WORD_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# These select among SGLang's own implementations.
_WORD_FLAGS: Final = {
    **dict.fromkeys(
        (
            "--attention-backend", "--cuda-graph-backend-decode", "--cuda-graph-backend-prefill",
            "--decode-attention-backend", "--disaggregation-mode", "--dtype",
            "--elastic-ep-backend", "--kv-cache-dtype", "--prefill-attention-backend",
            "--speculative-algorithm", "--speculative-attention-mode",
            "--speculative-draft-attention-backend",
        ),
        _WORD_PATTERN,
    ),
    "--device": re.compile(r"cpu|cuda|hpu|mps|musa|npu|xpu"),
    "--mem-fraction-static": re.compile(r"0?\.[0-9]{1,17}|1(\.0{1,17})?|0"),
}  # fmt: skip
# Flags that the verdict needs and the user has to give; each with its aliases.
MODEL: Final = ("--model-path", "--model")
DRAFTER: Final = ("--speculative-draft-model-path", "--speculative-draft-model")
# Only the presence of adapters matters, not which ones.
_REPLACEMENT_FLAGS: Final = {"--lora-paths": "--enable-lora"}
_NAME_PATTERN: Final = re.compile(r"--[a-z0-9][a-z0-9-]{0,63}")
_NUMBER_PATTERN: Final = re.compile(r"-?[0-9]{1,10}")
_COUNT_PATTERN: Final = re.compile(r"([0-9]{1,10})(k|M|Ki|Mi)?")
_MULTIPLES: Final = {None: 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}
# Limit of flag names that are shown; further ones are counted.
_MAX_SHOWN_NAMES: Final = 64
_NOT_A_FLAG_TEXT: Final = "words that are no flag"


def fetch_flags(url: str) -> AcceptedFlags:
    """Reads an engine's command line from /server_info; returns its safe flags.

    url: http or https; the key in ENGINE_API_KEY is sent if it is set, but only encrypted or on
    this machine.  Redirects are not followed, and no proxy is used.  Raises InputError.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{url}: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InputError(f"{url} is not an http:// or https:// address")
    headers = _headers(parts, os.environ.get("ENGINE_API_KEY", ""))
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, port, timeout=TIMEOUT_SECONDS, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_SECONDS)
    try:
        status, content = _fetch(connection, f"{parts.path.rstrip('/')}/server_info", headers)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _not_sglang_error(url, error) from error
    finally:
        connection.close()
    if 300 <= status < 400:
        raise InputError(
            f"{url}/server_info answers {status}, a redirect, which is not followed: name the "
            "engine's own address"
        )
    if status != http.client.OK:
        raise InputError(f"{url}/server_info answers {status} (a key is taken from ENGINE_API_KEY)")
    return parse_server_info(content, url)


def parse_server_info(content: bytes, url: str) -> AcceptedFlags:
    """Parses the answer to /server_info.  url: for error texts.  Raises InputError."""
    if len(content) > _MAX_ANSWER_BYTES:
        raise InputError(f"{url}/server_info answers more than {_MAX_ANSWER_BYTES} bytes")
    try:
        server_info = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _not_sglang_error(url, error) from error
    command = server_info.get("launch_command") if isinstance(server_info, dict) else None
    if not isinstance(command, str) or not command.strip():
        raise InputError(
            f"{url}/server_info has no launch_command, which SGLang 0.5.23 has: {_ALTERNATIVE_HINT}"
        )
    if len(command) > _MAX_COMMAND_CHARACTERS:
        raise InputError(
            f"the command line of {url} has {len(command)} characters: {_ALTERNATIVE_HINT}"
        )
    if any(mark in command for mark in "{}\"'"):
        raise InputError(
            f"the flags of {url} contain JSON, which SGLang joins with blanks, so they cannot be "
            f"split again: {_ALTERNATIVE_HINT}"
        )
    try:
        return filter_flags(command.split())
    except InputError as error:
        raise InputError(f"the flags of {url}: {error}: {_ALTERNATIVE_HINT}") from error


def _headers(parts: SplitResult, key: str) -> dict[str, str]:
    """Returns the headers of the request.  Raises InputError if the key must not be sent."""
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise InputError("ENGINE_API_KEY is not printable ASCII text")
    host = parts.hostname or ""
    address = f"[{host}]:80" if ":" in host else f"{host}:80"
    if parts.scheme == "http" and not is_local_address(address):
        raise InputError(
            "the key in ENGINE_API_KEY would be sent unencrypted: use https://, run this on the "
            "engine's machine, or unset ENGINE_API_KEY"
        )
    return {"Authorization": f"Bearer {key}"}


def _fetch(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Returns the status and the content, at most one byte more than the limit."""
    connection.connect()
    connected_socket = connection.sock

    def shut_down_socket() -> None:
        with contextlib.suppress(OSError):
            connected_socket.shutdown(socket.SHUT_RDWR)

    timeout_timer = threading.Timer(TIMEOUT_SECONDS, shut_down_socket)
    timeout_timer.daemon = True
    timeout_timer.start()
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_ANSWER_BYTES + 1)
    finally:
        timeout_timer.cancel()


def _not_sglang_error(url: str, error: Exception) -> InputError:
    return InputError(f"{url}/server_info does not answer as SGLang does: {error}")


@dataclass(frozen=True, slots=True)
class AcceptedFlags:
    """The parts of an engine's command line that are used.

    flags: for SGLang's parser.  left_out: the names of all other flags, in order, each once.
    model, drafter: paths that the engine names, "" if it names none; they are not given to SGLang.
    """

    flags: tuple[str, ...]
    left_out: tuple[str, ...]
    model: str = ""
    drafter: str = ""


def filter_flags(arguments: Sequence[str]) -> AcceptedFlags:
    """Filters a command line.  Raises InputError for a known flag with an invalid value.

    The words before the first flag are the launch command.
    """
    flags: list[str] = []
    left_out: dict[str, None] = {}
    paths = {MODEL: "", DRAFTER: ""}
    for name, values in _iterate_options(arguments):
        if name in _REPLACEMENT_FLAGS:
            flags.append(_REPLACEMENT_FLAGS[name])
        elif (accepted := _accepted_values(name, values)) is not None:
            flags += [name, *accepted]
        else:
            left_out[name if _NAME_PATTERN.fullmatch(name) else _NOT_A_FLAG_TEXT] = None
        for names in paths:
            if name in names:
                paths[names] = " ".join(values)
    shown_names = [*left_out][:_MAX_SHOWN_NAMES]
    if len(left_out) > len(shown_names):
        shown_names.append(f"{len(left_out) - len(shown_names)} more")
    return AcceptedFlags(tuple(flags), tuple(shown_names), paths[MODEL], paths[DRAFTER])


def _iterate_options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag with its values."""
    name, values = "", list[str]()
    for argument in arguments:
        if not argument.startswith("--"):
            values.append(argument)
            continue
        if name:
            yield name, values
        name, has_equals_sign, value = argument.partition("=")
        values = [value] if has_equals_sign else []
    if name:
        yield name, values


def _accepted_values(name: str, values: list[str]) -> list[str] | None:
    """Returns the values of a flag that is used, None for any other flag."""
    if name in _SWITCH_FLAGS:
        return _require(name, values, not values)
    if name in _LIST_FLAGS:
        sizes = [_parse_number(name, value, _BATCH) for value in values]
        return _require(name, sizes, 0 < len(sizes) <= _BATCH[1])
    if name in _NUMBER_FLAGS:
        _require(name, values, len(values) == 1)
        return [_parse_number(name, values[0], _NUMBER_FLAGS[name])]
    if name in _WORD_FLAGS:
        return _require(name, values, len(values) == 1 and _WORD_FLAGS[name].fullmatch(values[0]))
    return None


def _parse_number(name: str, value: str, limits: tuple[int, int]) -> str:
    count = _COUNT_PATTERN.fullmatch(value)
    if count is not None:
        number = int(count[1]) * _MULTIPLES[count[2]]
    else:
        _require(name, [value], _NUMBER_PATTERN.fullmatch(value))
        number = int(value)
    _require(name, [value], limits[0] <= number <= limits[1])
    return str(number)


def _require(name: str, values: list[str], is_valid: object) -> list[str]:
    if not is_valid:
        raise InputError(f"{name} has {ascii(' '.join(values))[:80]}, which cannot be its value")
    return values

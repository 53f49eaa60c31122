"""The flags of a running SGLang, as it was started."""

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

from engine_shim.link.sidecar_address import is_on_this_machine
from engine_shim.preflight.verdict import InputError

# For the whole answer.
PATIENCE_SECONDS: Final = 10.0
# Bytes and characters: SGLang's answer has tens of kB, its command line hundreds of bytes.
_LARGEST_ANSWER: Final = 4 << 20
_LONGEST_COMMAND: Final = 1 << 16
_INSTEAD: Final = "give its flags after `--`, without --url"

_SWITCHES: Final = frozenset(
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
_NUMBERS: Final = {
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
_LISTS: Final = frozenset({"--cuda-graph-bs", "--cuda-graph-bs-decode", "--cuda-graph-bs-prefill"})
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# These select among SGLang's own implementations.
_WORDS: Final = {
    **dict.fromkeys(
        (
            "--attention-backend", "--cuda-graph-backend-decode", "--cuda-graph-backend-prefill",
            "--decode-attention-backend", "--disaggregation-mode", "--dtype",
            "--elastic-ep-backend", "--kv-cache-dtype", "--prefill-attention-backend",
            "--speculative-algorithm", "--speculative-attention-mode",
            "--speculative-draft-attention-backend",
        ),
        _WORD,
    ),
    "--device": re.compile(r"cpu|cuda|hpu|mps|musa|npu|xpu"),
    "--mem-fraction-static": re.compile(r"0?\.[0-9]{1,17}|1(\.0{1,17})?|0"),
}  # fmt: skip
# Flags that the verdict needs and the user has to give; each with its aliases.
MODEL: Final = ("--model-path", "--model")
DRAFTER: Final = ("--speculative-draft-model-path", "--speculative-draft-model")
# Only the presence of adapters matters, not which ones.
_STANDS_FOR: Final = {"--lora-paths": "--enable-lora"}
_NAME: Final = re.compile(r"--[a-z0-9][a-z0-9-]{0,63}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,10}")
_COUNT: Final = re.compile(r"([0-9]{1,10})(k|M|Ki|Mi)?")
_MULTIPLES: Final = {None: 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}
# Limit of flag names that are shown; further ones are counted.
_SHOWN_MAX: Final = 64
_STRANGE: Final = "words that are no flag"


def flags_of(url: str) -> TakenFlags:
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
    """Parses the answer to /server_info.  url: for error texts.  Raises InputError."""
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
            f"the flags of {url} contain JSON, which SGLang joins with blanks, so they cannot be "
            f"split again: {_INSTEAD}"
        )
    try:
        return taken_from(command.split())
    except InputError as error:
        raise InputError(f"the flags of {url}: {error}: {_INSTEAD}") from error


def _headers(parts: SplitResult, key: str) -> dict[str, str]:
    """Returns the headers of the request.  Raises InputError if the key must not be sent."""
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise InputError("ENGINE_API_KEY is not printable ASCII text")
    host = parts.hostname or ""
    address = f"[{host}]:80" if ":" in host else f"{host}:80"
    if parts.scheme == "http" and not is_on_this_machine(address):
        raise InputError(
            "the key in ENGINE_API_KEY would be sent unencrypted: use https://, run this on the "
            "engine's machine, or unset ENGINE_API_KEY"
        )
    return {"Authorization": f"Bearer {key}"}


def _answer(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Returns the status and the content, at most one byte more than the limit."""
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


@dataclass(frozen=True, slots=True)
class TakenFlags:
    """The parts of an engine's command line that are used.

    flags: for SGLang's parser.  left_out: the names of all other flags, in order, each once.
    model, drafter: paths that the engine names, "" if it names none; they are not given to SGLang.
    """

    flags: tuple[str, ...]
    left_out: tuple[str, ...]
    model: str = ""
    drafter: str = ""


def taken_from(words: Sequence[str]) -> TakenFlags:
    """Filters a command line.  Raises InputError for a known flag with an invalid value.

    The words before the first flag are the launch command.
    """
    flags: list[str] = []
    left_out: dict[str, None] = {}
    paths = {MODEL: "", DRAFTER: ""}
    for name, values in _options(words):
        if name in _STANDS_FOR:
            flags.append(_STANDS_FOR[name])
        elif (known := _known(name, values)) is not None:
            flags += [name, *known]
        else:
            left_out[name if _NAME.fullmatch(name) else _STRANGE] = None
        for names in paths:
            if name in names:
                paths[names] = " ".join(values)
    shown = [*left_out][:_SHOWN_MAX]
    if len(left_out) > len(shown):
        shown.append(f"{len(left_out) - len(shown)} more")
    return TakenFlags(tuple(flags), tuple(shown), paths[MODEL], paths[DRAFTER])


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag with its values."""
    name, values = "", list[str]()
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            yield name, values
        name, is_joined, value = word.partition("=")
        values = [value] if is_joined else []
    if name:
        yield name, values


def _known(name: str, values: list[str]) -> list[str] | None:
    """Returns the values of a flag that is used, None for any other flag."""
    if name in _SWITCHES:
        return _require(name, values, not values)
    if name in _LISTS:
        sizes = [_number(name, value, _BATCH) for value in values]
        return _require(name, sizes, 0 < len(sizes) <= _BATCH[1])
    if name in _NUMBERS:
        _require(name, values, len(values) == 1)
        return [_number(name, values[0], _NUMBERS[name])]
    if name in _WORDS:
        return _require(name, values, len(values) == 1 and _WORDS[name].fullmatch(values[0]))
    return None


def _number(name: str, value: str, limits: tuple[int, int]) -> str:
    count = _COUNT.fullmatch(value)
    if count is not None:
        number = int(count[1]) * _MULTIPLES[count[2]]
    else:
        _require(name, [value], _NUMBER.fullmatch(value))
        number = int(value)
    _require(name, [value], limits[0] <= number <= limits[1])
    return str(number)


def _require(name: str, values: list[str], is_so: object) -> list[str]:
    if not is_so:
        raise InputError(f"{name} has {ascii(' '.join(values))[:80]}, which cannot be its value")
    return values

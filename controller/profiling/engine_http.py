"""Calls the engine's HTTP API: readiness, limits, tokenizer, and load for a measurement.

SGLang and vLLM have the same functions under different paths.  It uses only the standard library,
in threads: a few requests per minute need no HTTP framework.
"""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from controller.profiling.errors import (
    EngineRefusedError,
    EngineUnreachableError,
    ProfilingUsageError,
)
from controller.util.sockets import is_loopback_host

_ANSWER_SECONDS = 30.0
# /health_generate itself waits up to 20 s for the scheduler.
_HEALTH_SECONDS = 25.0
_LOAD_SECONDS = 1800.0
# Largest answer that is read; a server's description has a few tens of kB.
_ANSWER_BYTES_MAX = 8 << 20
# Bytes of a load's answer that are read at a time; they are discarded.
_PIECE_BYTES = 1 << 20
# Assumed tokens of a sequence if an engine does not report its limit.
_FALLBACK_CONTEXT: Final = 2048
# A larger number of tokens is not a valid limit of an engine.
_TOKENS_MAX: Final = 2**48


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Most tokens of one sequence, and of all sequences together."""

    sequence_tokens: int
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class ServerKind:
    """The paths of one kind of server.

    ready: answers 200 once the engine can generate.  abort: ends a request; "" if there is no such
    path, and the engine ends a request when its client disconnects.
    """

    name: str
    ready: str
    tokenize: str
    generate: str
    abort: str


SGLANG: Final = ServerKind(
    "SGLang", "/health_generate", "/v1/tokenize", "/generate", "/abort_request"
)
VLLM: Final = ServerKind("vLLM", "/health", "/tokenize", "/v1/completions", "")


class EngineHttp:
    """Calls one engine's HTTP API, without redirects or proxies.

    Raises ProfilingUsageError for an invalid URL, and for a key that would be sent unencrypted to
    another machine.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ProfilingUsageError(f"engine URL {url!r}: {error}") from error
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ProfilingUsageError(
                f"engine URL {url!r} must be http://HOST:PORT or https://HOST:PORT"
            )
        self.url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._kind: ServerKind | None = None
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ProfilingUsageError("the API key must be printable ASCII text")
            if not (self._secure or is_loopback_host(parts.hostname)):
                raise ProfilingUsageError(
                    f"the API key would be sent unencrypted to {parts.hostname}: use https://, or "
                    "run this command on the engine's host"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def kind(self) -> ServerKind:
        """Returns the kind of server.  Raises EngineUnreachableError if it does not answer."""
        if self._kind is None:
            status, answer = await self.call("GET", "/version")
            is_vllm = status == 200 and isinstance(answer, dict) and "version" in answer
            self._kind = VLLM if is_vllm else SGLANG
        return self._kind

    async def not_ready_reason(self) -> str:
        """Explains why the engine cannot generate; "" if it can."""
        try:
            path = (await self.kind()).ready
            status, _ = await self.call("GET", path, seconds=_HEALTH_SECONDS)
        except EngineUnreachableError as error:
            return str(error)
        return "" if status == 200 else f"{self.url}{path} answers {status}"

    async def limits(self) -> EngineLimits:
        """Reads the limits from the server's description; missing ones have cautious defaults.

        Raises EngineUnreachableError if the server does not answer or refuses.
        """
        if await self.kind() is VLLM:
            models = await self._get_description("/v1/models")
            _, metrics = await self.call("GET", "/metrics")
            return vllm_limits(models, metrics if isinstance(metrics, str) else "")
        return sglang_limits(await self._get_description("/server_info", "/get_server_info"))

    async def _get_description(self, *paths: str) -> dict[str, Any]:
        """Returns the answer of the first of these paths that exists."""
        for path in paths:
            status, body = await self.call("GET", path)
            if status != 404:
                break
        if status in {401, 403}:
            raise EngineUnreachableError(
                f"{self.url} answers {status}: it requires an API key (--api-key)"
            )
        if status != 200 or not isinstance(body, dict):
            raise EngineUnreachableError(
                f"{self.url}{paths[0]} answers {status}: is this an SGLang or vLLM server?"
            )
        return body

    async def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a text; [] if the engine runs without a tokenizer."""
        body = {"prompt": text, "add_special_tokens": False}
        status, answer = await self.call("POST", (await self.kind()).tokenize, body)
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if isinstance(tokens, list) and all(isinstance(t, int) for t in tokens):
            return tokens
        return []

    def generate(
        self, prompts: Sequence[Sequence[int]], ids: Sequence[str], new_tokens: int
    ) -> "Generation":
        """Starts one request of several prompts; greedy, and never ended by a stop token."""
        kind = self._kind or SGLANG
        return Generation(self, kind, load_body(kind, prompts, ids, new_tokens), ids)

    async def call(
        self, method: str, path: str, body: object = None, seconds: float = _ANSWER_SECONDS
    ) -> tuple[int, Any]:
        """Returns the status and the body (JSON or text).  Raises EngineUnreachableError."""
        return await asyncio.to_thread(self.call_blocking, method, path, body, seconds)

    def call_blocking(
        self, method: str, path: str, body: object, seconds: float
    ) -> tuple[int, Any]:
        """Does the same as `call`, but blocks.

        Every request opens a new connection: the server could close a kept-alive one just when it
        is used again, and the request would be lost.
        """
        connection = self.connection(seconds)
        try:
            return self.exchange(connection, method, path, body)
        finally:
            connection.close()

    def connection(self, seconds: float) -> http.client.HTTPConnection:
        """Makes a connection that is not open yet."""
        if self._secure:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=seconds, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=seconds)

    def exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: object,
        *,
        is_load: bool = False,
    ) -> tuple[int, Any]:
        """Sends one request and returns its answer, blocking.  Raises EngineUnreachableError.

        is_load: an answer with status 200 is read and discarded; the returned body is None.
        """
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, self._prefix + path, content, self._headers)
            answer = connection.getresponse()
            if is_load and answer.status == http.client.OK:
                while answer.read(_PIECE_BYTES):
                    pass
                _require_whole(answer)
                return answer.status, None
            text = answer.read(_ANSWER_BYTES_MAX + 1)
            if len(text) <= _ANSWER_BYTES_MAX:
                _require_whole(answer)
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnreachableError(
                f"no engine answers at {self.url}{path}: {str(error) or type(error).__name__}"
            ) from error
        if len(text) > _ANSWER_BYTES_MAX:
            raise EngineUnreachableError(
                f"{self.url}{path} answers more than {_ANSWER_BYTES_MAX} bytes: is this an SGLang "
                "or vLLM server?"
            )
        try:
            return answer.status, json.loads(text)
        except (ValueError, RecursionError):
            return answer.status, text.decode(errors="replace")


def _require_whole(answer: http.client.HTTPResponse) -> None:
    """Raises IncompleteRead for a truncated answer, as `read()` without a size would."""
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


class Generation:
    """A running request, made by `EngineHttp.generate`."""

    def __init__(
        self, engine: EngineHttp, kind: ServerKind, body: dict[str, Any], ids: Sequence[str]
    ) -> None:
        self._engine = engine
        self._kind = kind
        self._ids = list(ids)
        self._connection = engine.connection(_LOAD_SECONDS)
        self._stopped = False
        self._task = asyncio.create_task(asyncio.to_thread(self._run, body))

    @property
    def has_ended(self) -> bool:
        """Whether the engine has answered.

        Raises EngineRefusedError if it refused, EngineUnreachableError if it went away.
        """
        if not self._task.done():
            return False
        status, answer = self._task.result()
        if status != 200 and not self._stopped:
            text = answer if isinstance(answer, str) else json.dumps(answer)
            raise EngineRefusedError(
                f"{self._engine.url}{self._kind.generate} answers {status}: {text[:300]}"
            )
        return True

    async def stop(self) -> None:
        """Ends all sequences, and returns when the engine has released them."""
        if not self._task.done():
            self._stopped = True
            with contextlib.suppress(EngineUnreachableError):
                await asyncio.to_thread(self._abort)
            if self._kind.abort:
                # If the engine refuses to abort, it notices that the client disconnects.
                await asyncio.wait({self._task}, timeout=2.0)
        self._hang_up()
        await asyncio.wait({self._task})
        # Retrieve the expected error of the aborted request.
        self._task.exception()

    def _run(self, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            return self._engine.exchange(
                self._connection, "POST", self._kind.generate, body, is_load=True
            )
        finally:
            self._connection.close()

    def _abort(self) -> None:
        for request_id in self._ids if self._kind.abort else ():
            self._engine.call_blocking(
                "POST", self._kind.abort, {"rid": request_id}, _ANSWER_SECONDS
            )

    def _hang_up(self) -> None:
        open_socket = self._connection.sock
        if open_socket is not None:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)


def load_body(
    kind: ServerKind, prompts: Sequence[Sequence[int]], ids: Sequence[str], new_tokens: int
) -> dict[str, Any]:
    """Makes one request of several prompts; greedy, and never ended by a stop token."""
    if kind is VLLM:
        return {
            "prompt": [list(prompt) for prompt in prompts],
            "request_id": ids[0],
            "temperature": 0,
            "max_tokens": new_tokens,
            "ignore_eos": True,
        }
    return {
        "input_ids": [list(prompt) for prompt in prompts],
        "rid": list(ids),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        },
    }


def sglang_limits(server_info: dict[str, Any]) -> EngineLimits:
    """Reads the limits from `/server_info`; missing ones have cautious defaults."""
    pool = _positive_tokens(server_info.get("max_total_num_tokens"))
    longest = _positive_tokens(server_info.get("max_req_input_len")) or _FALLBACK_CONTEXT
    return EngineLimits(longest, pool or longest)


def vllm_limits(models: Any, metrics: str) -> EngineLimits:
    """Reads the limits from `/v1/models` and `/metrics`; missing ones have cautious defaults.

    Raises EngineUnreachableError if there is no model.
    """
    model_list = models.get("data") if isinstance(models, dict) else None
    if not (isinstance(model_list, list) and model_list and isinstance(model_list[0], dict)):
        raise EngineUnreachableError("/v1/models names no model")
    longest = _positive_tokens(model_list[0].get("max_model_len")) or _FALLBACK_CONTEXT
    pool = _metric_label(metrics, "kv_cache_size_tokens") or (
        _metric_label(metrics, "num_gpu_blocks") * _metric_label(metrics, "block_size")
    )
    return EngineLimits(longest, pool or longest)


def _metric_label(metrics: str, name: str) -> int:
    """Returns the number in a label of `vllm:cache_config_info`; 0 if it is missing."""
    line = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    match = re.search(rf'(?:^|,){name}="(\d{{1,12}})"', line.group(1)) if line else None
    return int(match.group(1)) if match else 0


def _positive_tokens(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= _TOKENS_MAX else 0

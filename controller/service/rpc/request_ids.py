"""Answers a repeated request with the answer to the first one, and does nothing twice (AIP-155).

The remembered answers are bounded in time, number and bytes, and belong to this process.  A
restarted sidecar, or another one of the fleet, treats a repeated request as a new one.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import Message

from controller.service.net.callers import current_caller
from controller.service.net.errors import InvalidQuestionError, RequestIdReusedError
from controller.util import tasks

KEPT_SECONDS: Final = 600.0
KEPT_ANSWERS_MAX: Final = 1000
KEPT_BYTES_MAX: Final = 8 * 1024 * 1024

Answer = TypeVar("Answer", bound=Message)


class _Request(Protocol):
    """Describes a request with an id."""

    @property
    def request_id(self) -> str: ...

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...


@dataclass(slots=True, eq=False)
class _RememberedRequest:
    """Holds a remembered request.

    digest: of its content.  expires_at: its expiry in monotonic seconds.  answer_bytes: size of its
    answer, once there is one.
    """

    digest: bytes
    task: "asyncio.Task[Any]"
    expires_at: float
    answer_bytes: int = 0


class RequestIds:
    """Remembers the requests of all callers; each user and each access entry has its own ids."""

    def __init__(self) -> None:
        # The oldest first.
        self._entries: dict[tuple[str, str], _RememberedRequest] = {}

    async def run_once(
        self, request: _Request, work: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> Answer:
        """Returns the result of `work`, or the answer to an earlier request with the same id.

        Work with an id continues if its client disconnects, so that the client can ask again.
        Work that fails is forgotten, so that the client can try again.

        Raises InvalidQuestionError, RequestIdReusedError, and what `work` raises.
        """
        if not request.request_id:
            return await work()
        require_uuid(request.request_id)
        self._evict_answers()
        # Not the caller's name, which differs between processes on the operators' socket.
        key = (current_caller().account, request.request_id)
        digest = _digest(request)
        entry = self._entries.get(key)
        if entry is None:
            task = asyncio.create_task(work())
            entry = _RememberedRequest(digest, task, time.monotonic() + KEPT_SECONDS)
            self._entries[key] = entry
            task.add_done_callback(lambda done: self._on_done(key, done))
        elif entry.digest != digest:
            raise RequestIdReusedError(
                f"the request id {request.request_id} belongs to another request: every request "
                "needs a new id, and only a repetition has the same one",
                field_path="request_id",
            )
        answer: Answer = await asyncio.shield(entry.task)
        return answer

    async def close(self) -> None:
        """Cancels all work under way."""
        await tasks.cancel_tasks(entry.task for entry in self._entries.values())

    def _on_done(self, key: tuple[str, str], task: "asyncio.Task[Any]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._entries.pop(key, None)
            return
        entry = self._entries.get(key)
        if entry is not None:
            entry.answer_bytes = task.result().ByteSize()
            self._evict_answers()

    def _evict_answers(self) -> None:
        """Removes the oldest answers until the others are within the bounds."""
        now = time.monotonic()
        kept_bytes = sum(entry.answer_bytes for entry in self._entries.values())
        for key, entry in list(self._entries.items()):
            fits = len(self._entries) <= KEPT_ANSWERS_MAX and kept_bytes <= KEPT_BYTES_MAX
            if fits and now < entry.expires_at:
                return
            if entry.task.done():
                del self._entries[key]
                kept_bytes -= entry.answer_bytes


def require_uuid(request_id: str) -> None:
    """Raises InvalidQuestionError for an id that is not a UUID in its standard form."""
    try:
        is_valid = str(uuid.UUID(request_id)) == request_id.lower()
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidQuestionError(
            f"request_id {request_id[:40]!r} is not a UUID: every request needs a new one",
            field_path="request_id",
        )


def _digest(request: _Request) -> bytes:
    kind = type(request).__name__.encode()
    return hashlib.sha256(kind + b"\0" + request.SerializeToString(deterministic=True)).digest()

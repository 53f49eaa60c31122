"""Follows the pages of a call that lists engines (rules: proto/README.md, "Pages")."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from speculation.v1 import service_pb2

# A sidecar that is broken may have pages without end.
_PAGES_MAX: Final = 1000

Answer = TypeVar(
    "Answer",
    service_pb2.ListEnginesResponse,
    service_pb2.OverviewResponse,
    service_pb2.ListFleetResponse,
)


def every_engine(call: Callable[[str], Answer]) -> Answer:
    """The first page's answer, with the engines of all pages.  call: takes a page token."""
    answer = call("")
    token = answer.next_page_token
    for _ in range(_PAGES_MAX):
        if not token:
            break
        more = call(token)
        _extend(answer, more)
        token = more.next_page_token
    answer.next_page_token = ""
    return answer


async def every_engine_aio(call: Callable[[str], Awaitable[Answer]]) -> Answer:
    """Does the same as `every_engine`, for asyncio."""
    answer = await call("")
    token = answer.next_page_token
    for _ in range(_PAGES_MAX):
        if not token:
            break
        more = await call(token)
        _extend(answer, more)
        token = more.next_page_token
    answer.next_page_token = ""
    return answer


def _extend(answer: Any, more: Any) -> None:
    answer.engines.extend(more.engines)

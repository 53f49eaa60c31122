"""Follows the pages of a call that lists (rules: proto/README.md, "Pages")."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

# A sidecar that is broken may have pages without end.
_PAGES_MAX: Final = 1000

Answer = TypeVar("Answer", bound=Any)


def every_page(call: Callable[[str], Answer], rows: str = "engines") -> Answer:
    """The first page's answer, with the rows of all pages.

    call: takes a page token.  rows: name of the field that has them.
    """
    answer = call("")
    token = answer.next_page_token
    for _ in range(_PAGES_MAX):
        if not token:
            break
        more = call(token)
        getattr(answer, rows).extend(getattr(more, rows))
        token = more.next_page_token
    answer.next_page_token = ""
    return answer


async def every_page_aio(call: Callable[[str], Awaitable[Answer]], rows: str = "engines") -> Answer:
    """Does the same as `every_page`, for asyncio."""
    answer = await call("")
    token = answer.next_page_token
    for _ in range(_PAGES_MAX):
        if not token:
            break
        more = await call(token)
        getattr(answer, rows).extend(getattr(more, rows))
        token = more.next_page_token
    answer.next_page_token = ""
    return answer

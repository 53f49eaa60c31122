"""Follows the pages of a call that returns a list (rules: proto/README.md, "Pages")."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from controller.core.errors import SpeculationError

# Pages of one list.  A page has up to 1000 rows.
PAGES_MAX: Final = 1000
# Serialized bytes of all pages of one list: twice those of 1024 engines with the longest plan.
LIST_BYTES_MAX: Final = 64 << 20

Answer = TypeVar("Answer", bound=Any)


class EndlessListError(SpeculationError):
    """A list that does not end, or that is larger than any sidecar's."""


class PageFollower:
    """Follows the pages of one list, and refuses a list that does not end.

    keeps: the caller keeps all pages in memory, so that the sum of their bytes is limited.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._tokens: set[str] = set()
        self._bytes = 0

    def next_token(self, answer: Any) -> str:
        """Returns the token of the page after `answer`, "" after the last one.

        Raises EndlessListError.
        """
        token: str = answer.next_page_token
        self._bytes += answer.ByteSize() if self._keeps else 0
        if self._bytes > LIST_BYTES_MAX:
            raise EndlessListError(f"the sidecar's list has more than {LIST_BYTES_MAX} bytes")
        if token in self._tokens:
            raise EndlessListError("the sidecar's list repeats a page")
        if len(self._tokens) >= PAGES_MAX:
            raise EndlessListError(f"the sidecar's list has more than {PAGES_MAX} pages")
        if token:
            self._tokens.add(token)
        return token


def collect_pages(call: Callable[[str], Answer], rows: str = "engines") -> Answer:
    """Returns the first page's answer, with the rows of all pages.

    call: takes a page token.  rows: name of the field that has them.  Raises EndlessListError.
    """
    pages, answer = PageFollower(), call("")
    token = pages.next_token(answer)
    while token:
        next_page = call(token)
        token = pages.next_token(next_page)
        getattr(answer, rows).extend(getattr(next_page, rows))
    answer.next_page_token = ""
    return answer


def collect_request_pages(
    call: Callable[[Any], Answer], request: Any, rows: str = "engines"
) -> Answer:
    """Does the same for a call that takes a request; sets its page token for each page."""

    def page(token: str) -> Answer:
        request.page_token = token
        return call(request)

    return collect_pages(page, rows)


async def collect_pages_async(
    call: Callable[[str], Awaitable[Answer]], rows: str = "engines"
) -> Answer:
    """Does the same as `collect_pages`, for asyncio."""
    pages, answer = PageFollower(), await call("")
    token = pages.next_token(answer)
    while token:
        next_page = await call(token)
        token = pages.next_token(next_page)
        getattr(answer, rows).extend(getattr(next_page, rows))
    answer.next_page_token = ""
    return answer

"""Divides lists into pages that fit into a message (rules: proto/README.md, "Pages")."""

from collections.abc import Callable, Generator, Iterable
from typing import Final, TypeVar

import structlog
from google.protobuf.message import Message

from controller.service.net.errors import InvalidQuestionError
from controller.service.net.limits import FairQueue

ROWS_MAX: Final = 1000
# Bytes of a page's rows: a client's default limit is 4 MiB.
BYTES_MAX: Final = 3 * 1024 * 1024
# Characters of a token: an engine id and the id of its sidecar.
_TOKEN_CHARACTERS_MAX = 192
_REASON_CHARACTERS_MAX = 200

Row = TypeVar("Row", bound=Message)

_log = structlog.get_logger(__name__)


def unavailable_reason(error: Exception) -> str:
    """Returns why an engine cannot be shown; text of clients is quoted with escapes."""
    return f"this engine cannot be shown: {error!r}"[:_REASON_CHARACTERS_MAX]


async def page_of(
    queue: FairQueue,
    names: Iterable[str],
    row_of: Callable[[str], Row],
    unavailable: Callable[[str, str], Row] | None,
    size: int,
    token: str,
    bytes_max: int = BYTES_MAX,
    *,
    descending: bool = False,
) -> tuple[list[Row], str]:
    """Returns (rows, the next page's token), in the order of the names, such as engine ids.

    queue: the queue in which rows are made.  row_of: makes the row of a name.  If it fails,
    `unavailable(name, reason)` makes the row, if it is not None.  size, token: as in the request.
    bytes_max: of all rows together.

    Raises InvalidQuestionError for a token that this sidecar did not issue, and TooManyCallsError.
    """
    if len(token) > _TOKEN_CHARACTERS_MAX:
        raise InvalidQuestionError(
            "page_token is not a token of this sidecar: start without it", field_path="page_token"
        )
    rows_max = min(size or ROWS_MAX, ROWS_MAX)

    def make_page() -> Generator[None, None, tuple[list[Row], str]]:
        later = (n for n in names if not token or (n < token if descending else n > token))
        names_ahead = sorted(later, reverse=descending)
        rows: list[Row] = []
        bytes_left = bytes_max
        for number, name in enumerate(names_ahead):
            yield
            if unavailable is None:
                row = row_of(name)
            else:
                row = _row_or_unavailable(name, row_of, unavailable, bytes_max)
            bytes_left -= row.ByteSize()
            if rows and (bytes_left < 0 or len(rows) >= rows_max):
                return rows, names_ahead[number - 1]
            rows.append(row)
        return rows, ""

    return await queue.run_sliced(make_page())


def _row_or_unavailable(
    engine_id: str,
    row_of: Callable[[str], Row],
    unavailable: Callable[[str, str], Row],
    bytes_max: int,
) -> Row:
    try:
        row = row_of(engine_id)
    except Exception as error:  # noqa: BLE001  # whatever is wrong with one, others are shown
        _log.exception("engine_not_shown", engine=engine_id)
        return unavailable(engine_id, unavailable_reason(error))
    if (size := row.ByteSize()) > bytes_max:
        reason = f"this engine cannot be shown: its row has {size} bytes: at most {bytes_max}"
        return unavailable(engine_id, reason)
    return row

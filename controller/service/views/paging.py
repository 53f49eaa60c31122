"""Divides lists into pages that fit into a message (rules: proto/README.md, "Pages")."""

from collections.abc import Callable, Generator, Iterable
from typing import Final, TypeVar

import structlog
from google.protobuf.message import Message

from controller.service.net.errors import InvalidQuestionError
from controller.service.net.limits import Turns

ROWS_MAX: Final = 1000
# Bytes of a page's rows: a client's default limit is 4 MiB.
BYTES_MAX: Final = 3 * 1024 * 1024
# Characters of a token: an engine id and the id of its sidecar.
_TOKEN_MAX = 192
_WHY_MAX = 200

Row = TypeVar("Row", bound=Message)

_log = structlog.get_logger(__name__)


def why_not(error: Exception) -> str:
    """Returns why an engine cannot be shown; text of clients is quoted with escapes."""
    return f"this engine cannot be shown: {error!r}"[:_WHY_MAX]


async def page_of(
    turns: Turns,
    names: Iterable[str],
    row_of: Callable[[str], Row],
    unavailable: Callable[[str, str], Row] | None,
    size: int,
    token: str,
    most_bytes: int = BYTES_MAX,
    *,
    descending: bool = False,
) -> tuple[list[Row], str]:
    """Returns (rows, the next page's token), in the order of the names, such as engine ids.

    turns: the queue in which rows are made.  row_of: makes the row of a name.  If it fails,
    `unavailable(name, why)` makes the row, if it is not None.
    size, token: as in the request.  most_bytes: of all rows together.

    Raises InvalidQuestionError for a token that this sidecar did not issue, and TooManyCallsError.
    """
    if len(token) > _TOKEN_MAX:
        raise InvalidQuestionError(
            "page_token is not a token of this sidecar: start without it", field_path="page_token"
        )
    most_rows = min(size or ROWS_MAX, ROWS_MAX)

    def make() -> Generator[None, None, tuple[list[Row], str]]:
        later = (n for n in names if not token or (n < token if descending else n > token))
        ahead = sorted(later, reverse=descending)
        rows: list[Row] = []
        left = most_bytes
        for number, name in enumerate(ahead):
            yield
            if unavailable is None:
                row = row_of(name)
            else:
                row = _row(name, row_of, unavailable, most_bytes)
            left -= row.ByteSize()
            if rows and (left < 0 or len(rows) >= most_rows):
                return rows, ahead[number - 1]
            rows.append(row)
        return rows, ""

    return await turns.take_pieces(make())


def _row(
    engine_id: str,
    row_of: Callable[[str], Row],
    unavailable: Callable[[str, str], Row],
    most_bytes: int,
) -> Row:
    try:
        row = row_of(engine_id)
    except Exception as error:  # noqa: BLE001  # whatever is wrong with one, others are shown
        _log.exception("engine_not_shown", engine=engine_id)
        return unavailable(engine_id, why_not(error))
    if (size := row.ByteSize()) > most_bytes:
        why = f"this engine cannot be shown: its row has {size} bytes: at most {most_bytes}"
        return unavailable(engine_id, why)
    return row

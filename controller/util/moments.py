"""Writes moments that others have named, whatever numbers they are."""

from datetime import UTC, datetime
from typing import Final

DATE_AND_TIME: Final = "%Y-%m-%d %H:%M:%S"
TIME: Final = "%H:%M:%S"


def moment_text(seconds: float, form: str = DATE_AND_TIME, *, utc: bool = False) -> str:
    """Formats Unix seconds by this machine's zone, or in UTC; "-" for what is no moment.

    form: of `strftime`.
    """
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
        return (moment if utc else moment.astimezone()).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "-"

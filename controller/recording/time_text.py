"""Times for people."""

from datetime import UTC, datetime


def time_text(wall_seconds: float) -> str:
    """Unix seconds as UTC, to the millisecond; "-" for what is no time."""
    try:
        moment = datetime.fromtimestamp(wall_seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return "-"
    return moment.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")

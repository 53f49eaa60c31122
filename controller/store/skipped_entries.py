"""Counts the entries of a store that cannot be read, and logs them sparingly."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

# Between two log lines about one kind of entries.
LOG_SECONDS: Final = 60.0
# What a store holds, of which each entry is read by itself.
KINDS: Final = ("override", "override_beyond_limit", "audit", "profiles", "acceptance")
# Names in such a line.
_NAMED_MAX: Final = 5

_log = structlog.get_logger(__name__)


class SkippedEntries:
    """Counts since the start, by kind; every reading counts.  where: the store.  clock: seconds."""

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))

    def add(self, kind: str, names: Sequence[str], reason: str, count: int = 0) -> None:
        """Counts the entries named, or `count` of which only some are named."""
        number = max(count, len(names))
        if not number:
            return
        self.counts[kind] += number
        now = self._clock()
        if now - self._logged_at.get(kind, -LOG_SECONDS) < LOG_SECONDS:
            return
        self._logged_at[kind] = now
        _log.error(
            "store_entries_skipped", store=self._where, kind=kind, count=number,
            names=list(names[:_NAMED_MAX]), error=reason, skipped_so_far=self.counts[kind],
        )  # fmt: skip

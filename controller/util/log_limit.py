"""A limit on log lines: what repeats is held back and counted, and the next line says how often.

Every kind of line has a bucket of `_BURST` lines that fills up again by one every
`_SECONDS_A_LINE`.  A kind is an event, of one engine or about one override where it names such.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_BURST: Final = 10
_SECONDS_A_LINE: Final = 6.0
# Kinds that are remembered; beyond it the one that has been quiet for longest is forgotten, and
# what was held back of it is told with its event.
_KINDS: Final = 4096
_SAME = ("engine", "override")

_Kind = tuple[str, ...]


@dataclass(slots=True)
class _Bucket:
    lines: float
    filled_at: float
    suppressed: int = 0


class LineLimit(logging.Filter):
    """For a handler.  clock: seconds, for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # The kind that was seen last stands last.
        self._buckets: OrderedDict[_Kind, _Bucket] = OrderedDict()
        # Lines held back of kinds that are forgotten, by event.
        self._forgotten: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """False where the line is held back; else it carries `suppressed`, if any were."""
        kind = _kind_of(record)
        with self._lock:
            bucket = self._bucket(kind)
            if bucket.lines < 1:
                bucket.suppressed += 1
                self.suppressed += 1
                return False
            bucket.lines -= 1
            untold, bucket.suppressed = bucket.suppressed, 0
        if untold:
            if isinstance(record.msg, dict):
                record.msg = {**record.msg, "suppressed": untold}
            else:
                record.suppressed = untold
        return True

    def untold(self) -> dict[str, int]:
        """Lines held back that no later line has told of, by event; they count as told then."""
        with self._lock:
            found, self._forgotten = self._forgotten, Counter()
            for kind, bucket in self._buckets.items():
                found[kind[0]] += bucket.suppressed
                bucket.suppressed = 0
        return {event: count for event, count in sorted(found.items()) if count}

    def _bucket(self, kind: _Kind) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(kind)
        if bucket is None:
            if len(self._buckets) >= _KINDS:
                self._forget_one()
            bucket = self._buckets[kind] = _Bucket(_BURST, now)
        self._buckets.move_to_end(kind)
        bucket.lines = min(_BURST, bucket.lines + (now - bucket.filled_at) / _SECONDS_A_LINE)
        bucket.filled_at = now
        return bucket

    def _forget_one(self) -> None:
        (event, *_), bucket = self._buckets.popitem(last=False)
        if bucket.suppressed:
            # Events have no bound of their own: a library's may be any text.
            known = event in self._forgotten or len(self._forgotten) < _KINDS
            self._forgotten[event if known else "other events"] += bucket.suppressed


def _kind_of(record: logging.LogRecord) -> _Kind:
    said = record.msg
    if isinstance(said, dict):
        return (str(said.get("event")), *(str(said[name]) for name in _SAME if name in said))
    # A library's: by its text before anything is put into it.
    return (str(said), record.name)

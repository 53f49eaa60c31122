"""The store interface: what the sidecar asks of a store, and what a store promises.

A store keeps one entry per override id.  A write names the revision that it replaces, so that
nobody overwrites what he has not seen; it is acknowledged only once it is durable.  An entry that
ended leaves a tombstone for a while: its id is not taken again, so a repeated request cannot
bring it back.  Times go in and out as seconds from now, by the store's own clock: a sidecar whose
clock is wrong neither shortens nor lengthens an override.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from controller.core.errors import SpeculationError
from controller.util.tasks import Work

# How long the tombstone of an ended override is kept.
TOMBSTONE_SECONDS = 7 * 24 * 3600.0
# Overrides in force at a time: every plan is made under all of them.
LIVE_ENTRIES_MAX: Final = 200
# Records of the audit that a store keeps; the oldest go first.
AUDIT_KEPT = 100_000
# Names of one kind that are kept; the one that was longest not put goes first.
BLOB_NAMES = 1000
# Between two log lines about one kind of entries.
LOG_SECONDS: Final = 60.0
# What a store holds, of which each entry is read by itself.
SKIPPED_KINDS: Final = ("override", "override_beyond_limit", "audit", "profiles", "acceptance")
# Names in such a log line.
_NAMED_MAX: Final = 5

_log = structlog.get_logger(__name__)

Listener = Callable[[], None]


class StoreError(SpeculationError):
    """A store that cannot do what it is asked to."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached or cannot be written.

    The message says that nothing was changed, or that it is not known whether something was.
    """


class StoreBrokenError(StoreError):
    """The store's contents cannot be read; the message names the place."""


class StoreTakenError(StoreError):
    """Another sidecar uses this store."""


class UnknownSequenceError(StoreError):
    """No record of this store's audit has such a sequence."""


class StoreFullError(StoreError):
    """The store has as many live entries as it takes; nothing was changed."""

    def __init__(self, live: int) -> None:
        super().__init__(f"{live} overrides are in force already, which is the limit: clear some")


class ConflictError(StoreError):
    """The entry is not at the revision that the write was meant for.  `found`: what is there."""

    def __init__(self, override_id: str, expected: int, found: "Entry | None") -> None:
        super().__init__(f"override {override_id!r} is not at revision {expected}")
        self.found = found


@dataclass(frozen=True, slots=True)
class Entry:
    """An override as a store holds it.

    revision: grows with every write of any entry.  body: JSON of the override, "" once it ended.
    remaining_seconds: None without an end; of an ended one, for how long its tombstone is kept.
    created_at: Unix seconds, for people.  ended: "", "cleared" or "expired".
    """

    override_id: str
    revision: int
    body: str
    remaining_seconds: float | None
    created_at: float
    ended: str = ""

    @property
    def etag(self) -> str:
        """Stands for this very content at this revision."""
        return f"{self.revision}-{digest(self.body)}"


@dataclass(frozen=True, slots=True)
class Actor:
    """The author and the reason of a change.  origin: where the sidecar saw the call come from."""

    author: str
    reason: str
    origin: str


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Holds one change.

    before, after: JSON of the override, "" for none.  sequence: store's order.
    """

    sequence: str
    at: float
    action: str
    subject: str
    author: str
    reason: str
    origin: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Health:
    """Holds the state of a store.

    detail: for people.  since_seconds: how long `ok` has been so.  unusable: of overrides that the
    store has and that cannot be in force, the reason by id; of many, not all are named.
    unusable_count: all of them.  skipped: entries that could not be read, by kind, in all readings
    since the start.
    """

    ok: bool
    detail: str
    since_seconds: float
    unusable: Mapping[str, str] = field(default_factory=dict)
    unusable_count: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)


class Store(Protocol):
    """See the module.  Every method but `close` may raise StoreUnavailableError."""

    async def open(self, changed: Listener) -> None:
        """Opens the store; `changed` is called (on the event loop) when `entries` may have changed.

        Raises StoreBrokenError, StoreTakenError.
        """

    @property
    def tasks(self) -> Mapping[str, Work]:
        """Returns what has to run, by name, between `open` and `close`."""

    async def close(self) -> None:
        """Closes the store; what was acknowledged is durable."""

    async def entries(self) -> Sequence[Entry]:
        """All entries, tombstones too; what has run out by now is ended, and recorded, by this.

        An entry that cannot be read is left out, and named by `health`.
        """

    async def write(
        self,
        override_id: str,
        body: str,
        seconds: float | None,
        expected: int,
        who: Actor,
    ) -> Entry:
        """Creates (expected = 0) or replaces the entry of that revision; durable on return.

        An entry that cannot be read is replaced as if it were not there.  Raises ConflictError,
        StoreFullError.
        """

    async def clear(self, override_id: str, expected: int, who: Actor) -> Entry:
        """Ends an entry; its tombstone is returned.  Raises ConflictError."""

    async def record(self, action: str, subject: str, who: Actor) -> None:
        """Adds a record to the audit of something that changes no entry; durable on return."""

    async def audit(self, limit: int, subject: str = "", before: str = "") -> Sequence[AuditRecord]:
        """The newest records first, of one subject if named, older than a sequence if given.

        A record that cannot be read is left out.
        """

    @property
    def health(self) -> Health:
        """Returns the present state."""

    @property
    def blobs(self) -> "BlobStore":
        """Goods in the same place."""

    @property
    def summaries(self) -> "SummaryBoard | None":
        """Returns what sidecars publish of their engines; None for a store of one sidecar."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Holds what one source put into a blob store.

    age_seconds: since then, by the store's clock.
    """

    source: str
    text: str
    age_seconds: float


@dataclass(frozen=True, slots=True)
class BlobKind:
    """One sort of goods: how many sources of a name are kept (the newest), and how long."""

    name: str
    sources: int
    seconds: float | None


PROFILES = BlobKind("profiles", sources=8, seconds=None)
ACCEPTANCE = BlobKind("acceptance", sources=16, seconds=7 * 24 * 3600.0)


class BlobStore(Protocol):
    """Keeps what pods leave for each other: profiles, estimates.  By name, and under it by source.

    Names and sources are hexadecimal digits.  Every method may raise StoreUnavailableError.
    """

    async def put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        """Keeps a text, in place of what the same source had put there."""

    async def items(self, kind: BlobKind, name: str) -> Sequence[Blob]:
        """Returns what is stored under a name, the newest first."""

    async def names(self, kind: BlobKind) -> Sequence[str]:
        """All names, the one last put first."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Holds what one sidecar has published of its engines.

    source: hexadecimal digits that stand for the sidecar.  body: as it is stored; anybody who can
    write to the store may have written it.  age_seconds: since then, by the store's clock.
    """

    source: str
    body: bytes
    age_seconds: float


@dataclass(frozen=True, slots=True)
class Summaries:
    """Holds everything that sidecars have published.

    found: the newest first.  refused: those whose type or size is wrong.  left_out: those
    that did not fit into one answer.
    """

    found: Sequence[Summary]
    refused: int = 0
    left_out: int = 0


class SummaryBoard(Protocol):
    """Keeps one text of each sidecar, for a limited time.  Nothing depends on it.

    Every method may raise StoreUnavailableError.  While the store is away they do so at once; it
    is tried again every five seconds at least.
    """

    async def put(self, source: str, body: bytes) -> None:
        """Keeps a text in place of the source's text before."""

    async def remove(self, source: str) -> None:
        """Takes the text of a source away; nothing happens if it has none."""

    async def read(self) -> Summaries:
        """Returns what is there, and changes nothing."""


def text_from_json(value: object) -> str:
    """Checks a text that somebody else may have written.  Raises one of MALFORMED."""
    if not isinstance(value, str):
        raise TypeError("a text is needed")
    value.encode()  # half a surrogate pair can stand in JSON, and nowhere else
    return value


def digest(body: str) -> str:
    """Twelve hexadecimal digits that stand for a content."""
    return hashlib.sha256(body.encode()).hexdigest()[:12]


class SkippedEntries:
    """Counts the entries of a store that cannot be read, and logs them sparingly.

    It counts since the start, by kind; every reading counts.  where: the store.  clock: seconds.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(SKIPPED_KINDS, 0))

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

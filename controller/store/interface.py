"""The store interface, and the guarantees of a store.

A store keeps one entry per override id.  A write names the revision that it replaces, so that a
caller cannot overwrite a change that it has not seen.  It is acknowledged only when it is durable.
An ended entry leaves a tombstone for a while, so that a repeated request cannot set it again.
Times are given as seconds from now, by the store's own clock, so that a sidecar with a wrong clock
neither shortens nor lengthens an override.
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

# Lifetime of the tombstone of an ended override.
TOMBSTONE_SECONDS = 7 * 24 * 3600.0
# Most active overrides: every plan applies all of them.
LIVE_ENTRIES_MAX: Final = 200
# Most audit records of a store; the oldest are removed first.
AUDIT_RECORDS_MAX = 100_000
# Most names of one kind of blobs; the least recently put is removed first.
BLOB_NAMES_MAX = 1000
# Interval between two log lines about one kind of entries.
LOG_SECONDS: Final = 60.0
# Kinds of entries that are read one by one, so that unreadable ones are skipped.
SKIPPED_KINDS: Final = ("override", "override_beyond_limit", "audit", "profiles", "acceptance")
# Most names in such a log line.
_LOGGED_NAMES_MAX: Final = 5

_log = structlog.get_logger(__name__)

ChangeListener = Callable[[], None]


class StoreError(SpeculationError):
    """A store operation failed."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached or cannot be written.

    The message says that nothing was changed, or that the outcome is unknown.
    """


class StoreBrokenError(StoreError):
    """The store's contents cannot be read; the message names the place."""


class StoreTakenError(StoreError):
    """Another sidecar uses this store."""


class UnknownSequenceError(StoreError):
    """The text is not a sequence of this store's audit."""


class StoreFullError(StoreError):
    """The store has reached its limit of live entries; nothing was changed."""

    def __init__(self, live: int) -> None:
        super().__init__(f"{live} overrides are in force, which is the limit: clear some first")


class ConflictError(StoreError):
    """The stored entry is not at the revision that the write expects.  `stored_entry`: it."""

    def __init__(self, override_id: str, expected: int, stored_entry: "Entry | None") -> None:
        super().__init__(f"override {override_id!r} is not at revision {expected}")
        self.stored_entry = stored_entry


@dataclass(frozen=True, slots=True)
class Entry:
    """An override in a store.

    revision: grows with every write of any entry.  body: JSON of the override, "" once it ended.
    remaining_seconds: None without an end; for an ended entry, the rest of its tombstone's
    lifetime.  created_at: Unix seconds, for people.  ended: "", "cleared" or "expired".
    """

    override_id: str
    revision: int
    body: str
    remaining_seconds: float | None
    created_at: float
    ended: str = ""

    @property
    def etag(self) -> str:
        """Identifies the content at this revision."""
        return f"{self.revision}-{digest(self.body)}"


@dataclass(frozen=True, slots=True)
class Actor:
    """The author and the reason of a change.  origin: the caller's address or user."""

    author: str
    reason: str
    origin: str


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A record of one change.

    before, after: JSON of the override, "" for none.  sequence: position in the store's audit.
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
    """State of a store.

    detail: for people.  since_seconds: time since `ok` changed.  unusable: stored overrides that
    cannot be in force, with the reason by id; if there are many, only some.  unusable_count: number
    of all of them.  skipped: number of unreadable entries by kind, over all reads since the start.
    """

    ok: bool
    detail: str
    since_seconds: float
    unusable: Mapping[str, str] = field(default_factory=dict)
    unusable_count: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)


class Store(Protocol):
    """Stores the overrides; see the module.  All but `close` may raise StoreUnavailableError."""

    async def open(self, changed: ChangeListener) -> None:
        """Opens the store.  `changed` is called on the event loop when `entries` may have changed.

        Raises StoreBrokenError, StoreTakenError.
        """

    @property
    def tasks(self) -> Mapping[str, Work]:
        """Returns the tasks that must run between `open` and `close`, by name."""

    async def close(self) -> None:
        """Closes the store.  Acknowledged writes are durable."""

    async def entries(self) -> Sequence[Entry]:
        """Returns all entries and tombstones.  Ends and records entries that have expired.

        Unreadable entries are left out; `health` names them.
        """

    async def write(
        self,
        override_id: str,
        body: str,
        seconds: float | None,
        expected: int,
        actor: Actor,
    ) -> Entry:
        """Creates an entry (expected = 0), or replaces that of this revision; durable on return.

        An unreadable entry is replaced as if it did not exist.  Raises ConflictError,
        StoreFullError.
        """

    async def clear(self, override_id: str, expected: int, actor: Actor) -> Entry:
        """Ends an entry and returns its tombstone.  Raises ConflictError."""

    async def record(self, action: str, subject: str, actor: Actor) -> None:
        """Adds an audit record of an action that changes no entry; durable on return."""

    async def audit(self, limit: int, subject: str = "", before: str = "") -> Sequence[AuditRecord]:
        """Returns audit records, the newest first.

        subject: only records of this subject, "" for all.  before: only records older than this
        sequence, "" for all.  Unreadable records are left out.
        """

    @property
    def health(self) -> Health:
        """Returns the present state."""

    @property
    def blobs(self) -> "BlobStore":
        """Returns the blob store in the same place."""

    @property
    def summaries(self) -> "SummaryStore | None":
        """Returns the summaries of all sidecars' engines; None for a store of one sidecar."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A text that one source put into a blob store.

    age_seconds: since then, by the store's clock.
    """

    source: str
    text: str
    age_seconds: float


@dataclass(frozen=True, slots=True)
class BlobKind:
    """A kind of blobs.  sources: how many, the newest, a name keeps.  seconds: their lifetime."""

    name: str
    sources: int
    seconds: float | None


PROFILES = BlobKind("profiles", sources=8, seconds=None)
ACCEPTANCE = BlobKind("acceptance", sources=16, seconds=7 * 24 * 3600.0)


class BlobStore(Protocol):
    """Keeps texts that pods share, such as profiles, by name and by source.

    Names and sources are hexadecimal digits.  All methods may raise StoreUnavailableError.
    """

    async def put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        """Keeps a text, replacing the source's previous one."""

    async def items(self, kind: BlobKind, name: str) -> Sequence[Blob]:
        """Returns the blobs of a name, the newest first."""

    async def names(self, kind: BlobKind) -> Sequence[str]:
        """Returns all names, the most recently put first."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A text that one sidecar has published about its engines.

    source: hexadecimal digits that identify the sidecar.  body: untrusted; any client of the store
    may have written it.  age_seconds: since then, by the store's clock.
    """

    source: str
    body: bytes
    age_seconds: float


@dataclass(frozen=True, slots=True)
class Summaries:
    """The summaries of all sidecars.

    summaries: the newest first.  refused: number of those with a wrong type or size.  left_out:
    number of those that did not fit into one answer.
    """

    summaries: Sequence[Summary]
    refused: int = 0
    left_out: int = 0


class SummaryStore(Protocol):
    """Keeps one text of each sidecar for a limited time.  It is not needed for decisions.

    All methods may raise StoreUnavailableError.  While the store is unavailable they do so at once;
    it is retried at least every five seconds.
    """

    async def put(self, source: str, body: bytes) -> None:
        """Keeps a text, replacing the source's previous one."""

    async def remove(self, source: str) -> None:
        """Removes the text of a source, if it has one."""

    async def read(self) -> Summaries:
        """Returns all summaries."""


def require_text(value: object) -> str:
    """Checks an untrusted text.  Raises one of MALFORMED."""
    if not isinstance(value, str):
        raise TypeError("must be a text")
    value.encode()  # JSON can contain a lone surrogate, which cannot be encoded
    return value


def digest(body: str) -> str:
    """Returns twelve hexadecimal digits that identify a content."""
    return hashlib.sha256(body.encode()).hexdigest()[:12]


class SkippedEntries:
    """Counts the unreadable entries of a store, and logs them at a limited rate.

    It counts by kind since the start; each read counts again.  location: the store.  clock:
    seconds.
    """

    def __init__(self, location: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._location = location
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(SKIPPED_KINDS, 0))

    def add(self, kind: str, names: Sequence[str], reason: str, count: int = 0) -> None:
        """Counts `count` entries, or as many as are named.  names: ids of some of them."""
        number = max(count, len(names))
        if not number:
            return
        self.counts[kind] += number
        now = self._clock()
        if now - self._logged_at.get(kind, -LOG_SECONDS) < LOG_SECONDS:
            return
        self._logged_at[kind] = now
        _log.error(
            "store_entries_skipped", store=self._location, kind=kind, count=number,
            names=list(names[:_LOGGED_NAMES_MAX]), error=reason, skipped_so_far=self.counts[kind],
        )  # fmt: skip

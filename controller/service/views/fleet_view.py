"""Combines the engines of all sidecars that share the store into one view.

This sidecar's engines come from its own status, and those of other sidecars from the store.  The
store is read only on request, at most once in two seconds.  A request waits at most half a second
for the store, and then gets the previous result.  If the store is unavailable, the view has this
sidecar's engines and the reason.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from controller.core.clock import Clock
from controller.service.net.limits import FairQueue
from controller.service.views.engine_status import EngineLine
from controller.service.views.fleet_summary import (
    EngineSummary,
    FleetMember,
    FleetPublisher,
    decode_summary,
    summary_of,
)
from controller.service.views.status_cache import StatusCache
from controller.store.interface import StoreUnavailableError, Summaries, Summary, SummaryStore
from controller.util import tasks
from controller.util.tasks import BackgroundTasks

# How long a request waits for the store.
_STORE_WAIT_SECONDS = 0.5
# Engines of one view.
ENGINES_MAX: Final = 20_000
_REFRESH_SECONDS = 2.0
# The largest share of time for reading.
_SHARE_MAX = 0.05
# How long a thread parses summaries at a time.
_SLICE_SECONDS = 0.005
# A sidecar is silent if this many of its intervals have passed, plus some time for the store.
_OVERDUE_INTERVALS, _SLACK_SECONDS = 3, 5.0
SILENT: Final = "silent"
_NOT_SHARED_REASON = "this sidecar shares no store with others (CONTROLLER_REDIS_URL)"

# The total in which an engine's link is counted.
_LINKS: Final = {
    "steered": "steered",
    "alone": "unsteered",
    "away": "unsteered",
    "waiting": "waiting",
    "": "unlinked",
}
# The totals that are counts of engines.
_COUNT_FIELDS: Final = (
    "engines", "steered", "unsteered", "waiting", "silent", "unavailable", "off", "overridden",
)  # fmt: skip
_NOT_READ_REASON = "the store has not answered yet"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """Holds one engine as its sidecar has published it.

    sidecar: the name of its host.  source: its process.  age_seconds: from the publication to the
    reading; 0 for this sidecar's own engines, which `local` marks.  silent: the sidecar's next
    summary is overdue.
    """

    sidecar: str
    source: str
    summary: EngineSummary
    age_seconds: float
    local: bool = False
    silent: bool = False

    @property
    def link(self) -> str:
        """Returns the link as in EngineLine, or "silent"."""
        return SILENT if self.silent else self.summary.link

    @property
    def key(self) -> str:
        """Returns a unique key by which the engines are ordered."""
        return f"{self.summary.engine_id} {self.source}"

    @property
    def tokens_gained_per_second(self) -> float | None:
        """Returns generated tokens less those of gamma = 0 in the same decoding time, per second.

        It uses the estimate `gain`; None if either is unknown.
        """
        rate, gain = self.summary.generated_per_second, self.summary.gain
        return None if rate is None or not gain else rate - rate / gain


@dataclass(frozen=True, slots=True)
class FleetTotals:
    """Holds totals over engines; a silent engine counts only as `silent`.

    steered, unsteered ("alone" or "away"), waiting (no step reported yet), silent and unavailable
    add up to engines.  off: steered with gamma = 0.  overridden: with an override in force.
    tokens_gained_per_second: estimated gain over gamma = 0, of the engines for which it is known.
    """

    engines: int
    sidecars: int
    steered: int
    unsteered: int
    waiting: int
    silent: int
    unavailable: int
    off: int
    overridden: int
    generated_per_second: float
    tokens_gained_per_second: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """Holds the engines of all sidecars.

    engines: ordered by id.  trouble: why the engines of other sidecars are missing, "" if they are
    not.  shared: this sidecar's store is shared with others.  refused: entries in the store that
    cannot be used.  left_out: engines and sidecars beyond the limits of a view.
    """

    engines: tuple[FleetEngine, ...]
    shared: bool
    trouble: str = ""
    refused: int = 0
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """Holds counts since the start.

    written, failed: summaries that this sidecar published, or failed to.  refused: entries read
    from others that could not be used.
    """

    written: int
    failed: int
    refused: int


class FleetTally:
    """Adds up engines."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._sources: set[str] = set()
        self._generated = self._gained = 0.0

    def add(self, engine: FleetEngine) -> None:
        """Counts one engine."""
        self._counts["engines"] += 1
        self._sources.add(engine.source)
        summary = engine.summary
        if engine.silent:
            self._counts["silent"] += 1
        elif summary.unavailable:
            self._counts["unavailable"] += 1
        else:
            self._counts[_LINKS[summary.link]] += 1
            self._counts["off"] += summary.link == "steered" and not summary.gamma
            self._counts["overridden"] += bool(summary.overrides)
            self._generated += summary.generated_per_second or 0.0
            self._gained += engine.tokens_gained_per_second or 0.0

    def totals(self) -> FleetTotals:
        """Returns the sums so far."""
        return FleetTotals(
            sidecars=len(self._sources),
            generated_per_second=self._generated,
            tokens_gained_per_second=self._gained,
            **{name: self._counts[name] for name in _COUNT_FIELDS},
        )


def totals_of(engines: Iterable[FleetEngine]) -> FleetTotals:
    """Adds up the engines of a view."""
    tally = FleetTally()
    for engine in engines:
        tally.add(engine)
    return tally.totals()


@dataclass(eq=False, repr=False)
class FleetView:
    """Makes the view of the fleet; there is one per sidecar."""

    board: SummaryStore | None
    status_cache: StatusCache
    clock: Clock

    def __post_init__(self) -> None:
        self._member = FleetMember.from_this_process()
        self.publisher = FleetPublisher(self.board, self.status_cache, self._member)
        self._other_engines = Fleet(
            (), self.board is not None, _NOT_READ_REASON if self.board else _NOT_SHARED_REASON
        )
        self._fresh_until = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._background_tasks = BackgroundTasks()
        # The newest view, its inputs, and until when it is fresh.
        self._fleet = self._other_engines
        self._view_inputs: tuple[Sequence[EngineLine], Fleet] | None = None
        self._view_fresh_until = -math.inf
        self._view_lock = asyncio.Lock()
        self._parse_queue = FairQueue(1)
        self._refused = 0

    @property
    def counts(self) -> FleetCounts | None:
        """Returns the counts since the start; None without a shared store."""
        if self.board is None:
            return None
        published = self.publisher.published
        return FleetCounts(published.written, published.failed, self._refused)

    async def close(self) -> None:
        """Removes this sidecar's summary, and cancels a reading under way."""
        await self.publisher.close()
        await self._background_tasks.close()

    async def current_view(self) -> Fleet:
        """Returns the view.  It never fails, whatever the store contains.

        It returns the same object until the engines have been read again.
        """
        lines = await self.status_cache.lines()
        if self.board is not None and self.clock.now() >= self._fresh_until:
            if self._reading is None or self._reading.done():
                self._reading = self._background_tasks.start(
                    "read the fleet", self._read_board(self.board)
                )
            await asyncio.wait([self._reading], timeout=_STORE_WAIT_SECONDS)
        async with self._view_lock:
            if self._view_inputs is None or (
                (
                    self._view_inputs[0] is not lines
                    or self._view_inputs[1] is not self._other_engines
                )
                and self.clock.now() >= self._view_fresh_until
            ):
                await self._update_view(lines)
        return self._fleet

    async def _update_view(self, lines: Sequence[EngineLine]) -> None:
        other_engines, began = self._other_engines, time.monotonic()
        # In a thread, because a large fleet would delay steering.
        merging = asyncio.to_thread(_merge_fleet, self._member, lines, other_engines)
        self._fleet = await tasks.run_to_completion(merging)
        self._view_inputs = lines, other_engines
        self._view_fresh_until = self.clock.now() + (time.monotonic() - began) / _SHARE_MAX

    async def _read_board(self, board: SummaryStore) -> None:
        busy_seconds = 0.0
        try:
            stored = await board.read()
            began = time.monotonic()
            parsing = _SummaryParser(stored, self._member.source)
            while not parsing.is_done:
                async with self._parse_queue.turn():
                    await asyncio.to_thread(parsing.parse_some)
            fleet = parsing.fleet()
            busy_seconds = time.monotonic() - began
        except StoreUnavailableError as error:
            fleet = Fleet((), shared=True, trouble=f"the store is unavailable: {error}")
        if fleet.refused and fleet.refused != self._other_engines.refused:
            _log.warning("fleet_entries_refused", entries=fleet.refused)
        self._refused += fleet.refused
        self._other_engines = fleet
        self._fresh_until = self.clock.now() + max(_REFRESH_SECONDS, busy_seconds / _SHARE_MAX)


class _SummaryParser:
    """Parses the summaries of other sidecars in slices, for a thread."""

    def __init__(self, stored: Summaries, own_source: str) -> None:
        self._unparsed_summaries = [
            summary for summary in reversed(stored.summaries) if summary.source != own_source
        ]
        self._engines: list[FleetEngine] = []
        self._refused, self._left_out = stored.refused, stored.left_out

    @property
    def is_done(self) -> bool:
        """Returns whether every summary has been parsed."""
        return not self._unparsed_summaries

    def parse_some(self) -> None:
        """Parses summaries for some milliseconds, and at least one."""
        deadline = time.monotonic() + _SLICE_SECONDS
        while self._unparsed_summaries:
            self._parse(self._unparsed_summaries.pop())
            if time.monotonic() >= deadline:
                return

    def _parse(self, summary: Summary) -> None:
        try:
            engines, refused, left_out = _engines_of(summary)
        except ValueError:
            self._refused += 1
            return
        self._refused += refused
        capacity_left = ENGINES_MAX - len(self._engines)
        self._left_out += left_out + max(0, len(engines) - capacity_left)
        self._engines += engines[:capacity_left]

    def fleet(self) -> Fleet:
        """Returns the parsed engines."""
        return Fleet(
            tuple(self._engines), shared=True, refused=self._refused, left_out=self._left_out
        )


def _engines_of(summary: Summary) -> tuple[list[FleetEngine], int, int]:
    """Returns (engines of a summary, number of unusable ones, number of engines left out).

    Raises ValueError.
    """
    head, engines, refused = decode_summary(summary.body)
    is_overdue = summary.age_seconds > _OVERDUE_INTERVALS * head.every_seconds + _SLACK_SECONDS
    fleet_engines = [
        FleetEngine(head.sidecar, summary.source, engine, summary.age_seconds, silent=is_overdue)
        for engine in engines
    ]
    return fleet_engines, refused, head.left_out


def _merge_fleet(member: FleetMember, lines: Sequence[EngineLine], other_engines: Fleet) -> Fleet:
    """Adds this sidecar's engines.  Nothing is copied, to save the GC thousands of new objects."""
    own_engines = [
        FleetEngine(member.name, member.source, summary_of(line), 0.0, local=True) for line in lines
    ]
    engines = sorted(
        _without_restarted([*own_engines, *other_engines.engines]), key=lambda engine: engine.key
    )
    return replace(other_engines, engines=tuple(engines))


def _without_restarted(engines: Iterable[FleetEngine]) -> Iterator[FleetEngine]:
    """Skips a silent sidecar's engine if the restarted sidecar has published it again."""
    engines = list(engines)
    returned = {(e.sidecar, e.summary.engine_id) for e in engines if not e.silent}
    for engine in engines:
        if not (engine.silent and (engine.sidecar, engine.summary.engine_id) in returned):
            yield engine

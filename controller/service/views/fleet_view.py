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
from controller.service.net.limits import Turns
from controller.service.views.engine_status import EngineLine
from controller.service.views.fleet_summary import (
    EngineSummary,
    FleetMember,
    FleetPublisher,
    decode_summary,
    summary_of,
)
from controller.service.views.status_cache import StatusCache
from controller.store.interface import StoreUnavailableError, Summaries, Summary, SummaryBoard
from controller.util import tasks
from controller.util.tasks import BackgroundTasks

# How long a request waits for the store.
_PATIENCE_SECONDS = 0.5
# Engines of one view.
ENGINES_MAX: Final = 20_000
_SECONDS = 2.0
# The largest share of time for reading.
_SHARE_MAX = 0.05
# How long a thread parses summaries at a time.
_PIECE_SECONDS = 0.005
# A sidecar is silent if this many of its intervals have passed, plus some time for the store.
_OVERDUE, _SLACK_SECONDS = 3, 5.0
SILENT: Final = "silent"
_ALONE = "this sidecar shares no store with others (CONTROLLER_REDIS_URL)"

# The total in which an engine's link is counted.
_LINKS: Final = {
    "steered": "steered",
    "alone": "unsteered",
    "away": "unsteered",
    "waiting": "waiting",
    "": "unlinked",
}
# The totals that are counts of engines.
_COUNTED: Final = (
    "engines", "steered", "unsteered", "waiting", "silent", "unavailable", "off", "overridden",
)  # fmt: skip
_NOT_READ = "the store has not answered yet"

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
            **{name: self._counts[name] for name in _COUNTED},
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

    board: SummaryBoard | None
    status_cache: StatusCache
    clock: Clock

    def __post_init__(self) -> None:
        self._me = FleetMember.of_this_process()
        self.publisher = FleetPublisher(self.board, self.status_cache, self._me)
        self._others = Fleet((), self.board is not None, _NOT_READ if self.board else _ALONE)
        self._fresh_until = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._under_way = BackgroundTasks()
        # The newest view, its inputs, and until when it is fresh.
        self._fleet = self._others
        self._made_of: tuple[Sequence[EngineLine], Fleet] | None = None
        self._good_until = -math.inf
        self._making = asyncio.Lock()
        self._turns = Turns(1)
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
        await self._under_way.close()

    async def look(self) -> Fleet:
        """Returns the view.  It never fails, whatever the store contains.

        It returns the same object until the engines have been read again.
        """
        lines = await self.status_cache.lines()
        if self.board is not None and self.clock.now() >= self._fresh_until:
            if self._reading is None or self._reading.done():
                self._reading = self._under_way.start("read the fleet", self._read(self.board))
            await asyncio.wait([self._reading], timeout=_PATIENCE_SECONDS)
        async with self._making:
            if self._made_of is None or (
                (self._made_of[0] is not lines or self._made_of[1] is not self._others)
                and self.clock.now() >= self._good_until
            ):
                await self._make(lines)
        return self._fleet

    async def _make(self, lines: Sequence[EngineLine]) -> None:
        others, began = self._others, time.monotonic()
        # In a thread, because a large fleet would delay steering.
        made = asyncio.to_thread(_merged, self._me, lines, others)
        self._fleet = await tasks.finish(made)
        self._made_of = lines, others
        self._good_until = self.clock.now() + (time.monotonic() - began) / _SHARE_MAX

    async def _read(self, board: SummaryBoard) -> None:
        busy = 0.0
        try:
            stored = await board.read()
            began = time.monotonic()
            parsing = _Parsing(stored, self._me.source)
            while not parsing.is_done:
                async with self._turns.turn():
                    await asyncio.to_thread(parsing.go_on)
            found = parsing.fleet()
            busy = time.monotonic() - began
        except StoreUnavailableError as error:
            found = Fleet((), shared=True, trouble=f"the store is unavailable: {error}")
        if found.refused and found.refused != self._others.refused:
            _log.warning("fleet_entries_refused", entries=found.refused)
        self._refused += found.refused
        self._others = found
        self._fresh_until = self.clock.now() + max(_SECONDS, busy / _SHARE_MAX)


class _Parsing:
    """Parses the summaries of other sidecars in slices, for a thread."""

    def __init__(self, stored: Summaries, own: str) -> None:
        self._texts = [summary for summary in reversed(stored.found) if summary.source != own]
        self._engines: list[FleetEngine] = []
        self._refused, self._left_out = stored.refused, stored.left_out

    @property
    def is_done(self) -> bool:
        """Returns whether every summary has been parsed."""
        return not self._texts

    def go_on(self) -> None:
        """Parses summaries for some milliseconds, and at least one."""
        until = time.monotonic() + _PIECE_SECONDS
        while self._texts:
            self._read(self._texts.pop())
            if time.monotonic() >= until:
                return

    def _read(self, summary: Summary) -> None:
        try:
            found, bad, more = _engines_of(summary)
        except ValueError:
            self._refused += 1
            return
        self._refused += bad
        room = ENGINES_MAX - len(self._engines)
        self._left_out += more + max(0, len(found) - room)
        self._engines += found[:room]

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
    overdue = summary.age_seconds > _OVERDUE * head.every_seconds + _SLACK_SECONDS
    found = [
        FleetEngine(head.sidecar, summary.source, engine, summary.age_seconds, silent=overdue)
        for engine in engines
    ]
    return found, refused, head.left_out


def _merged(me: FleetMember, lines: Sequence[EngineLine], others: Fleet) -> Fleet:
    """Adds this sidecar's engines.  Nothing is copied, to save the GC thousands of new objects."""
    own = [FleetEngine(me.name, me.source, summary_of(line), 0.0, local=True) for line in lines]
    engines = sorted(_heard_of([*own, *others.engines]), key=lambda engine: engine.key)
    return replace(others, engines=tuple(engines))


def _heard_of(engines: Iterable[FleetEngine]) -> Iterator[FleetEngine]:
    """Skips a silent sidecar's engine if the restarted sidecar has published it again."""
    engines = list(engines)
    back = {(e.sidecar, e.summary.engine_id) for e in engines if not e.silent}
    for engine in engines:
        if not (engine.silent and (engine.sidecar, engine.summary.engine_id) in back):
            yield engine

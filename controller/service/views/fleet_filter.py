"""Filters the fleet's engines for lists, and converts a list into plain values for the page.

A filter has words, separated by spaces; an engine that matches all of them is listed.  FIELD=VALUE
matches a field exactly.  Any other word is searched for, ignoring case, in the ids of the engine
and its overrides, and in the names of sidecar, model and drafter.
"""

from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from controller.service.net.errors import InvalidQuestionError
from controller.service.net.limits import WAITING_READS_MAX, FairQueue
from controller.service.views.fleet_view import (
    Fleet,
    FleetEngine,
    FleetTally,
    FleetTotals,
    FleetView,
)

# Characters and words of a filter: each word takes some milliseconds for 20,000 engines.
FILTER_CHARACTERS_MAX: Final = 256
FILTER_WORDS_MAX: Final = 16
# Selections of one view that are cached for equal filters.
_SELECTIONS_MAX = 16
# Engines between two points where the work may be interrupted, a few microseconds each.
_CHUNK_ENGINES = 16

_FIELDS: Mapping[str, Callable[[FleetEngine], Sequence[str]]] = {
    "sidecar": lambda engine: [engine.sidecar],
    "engine": lambda engine: [engine.summary.engine_id],
    "model": lambda engine: [engine.summary.target_model],
    "drafter": lambda engine: [engine.summary.drafter],
    "gamma": lambda engine: [str(engine.summary.gamma)],
    "link": lambda engine: [engine.link],
    "reason": lambda engine: [engine.summary.reason],
    "override": lambda engine: engine.summary.overrides,
}
_SEARCHED = ("engine", "sidecar", "model", "drafter", "override")


_Matches = Callable[[FleetEngine], bool]
# Engines in a page of the list, at most and by default; characters of its `engines_after`.
LIMIT_MAX: Final = 1000
LIMIT_DEFAULT: Final = 200
_AFTER_CHARACTERS_MAX = 192


@dataclass(frozen=True, slots=True)
class Selection:
    """Holds the engines of a view that match a filter, ordered by key, and their totals.

    keys: of the engines, in the same order.
    """

    fleet: Fleet
    engines: Sequence[FleetEngine]
    keys: Sequence[str]
    totals: FleetTotals

    def engines_after(self, key: str, count_max: int) -> Sequence[FleetEngine]:
        """Returns the engines that follow a key, `count_max` of them at most."""
        start = bisect_right(self.keys, key)
        return self.engines[start : start + count_max]


class FleetSearch:
    """Selects engines for the calls of one server; equal filters share a selection.

    read_queue: the queue of other lists on this server.
    """

    def __init__(self, fleet_view: FleetView, read_queue: FairQueue) -> None:
        self._fleet_view = fleet_view
        self._read_queue = read_queue
        self._select_queue = FairQueue(WAITING_READS_MAX)
        # Selections of the newest view, by filter.
        self._selections: dict[str, Selection] = {}

    async def select(self, text: str) -> Selection:
        """Returns the matching engines.  Raises InvalidQuestionError, TooManyCallsError."""
        matches = _parse_filter(text)
        fleet = await self._fleet_view.current_view()
        if (cached := self._cached_selection(fleet, text)) is not None:
            return cached
        async with self._select_queue.turn():
            # Another call may have made it meanwhile.
            if (cached := self._cached_selection(fleet, text)) is not None:
                return cached
            selection = await self._read_queue.run_sliced(_select_engines(fleet, matches))
            if len(self._selections) >= _SELECTIONS_MAX or any(
                stored_selection.fleet is not fleet
                for stored_selection in self._selections.values()
            ):
                self._selections.clear()
            self._selections[text] = selection
        return selection

    def _cached_selection(self, fleet: Fleet, text: str) -> Selection | None:
        selection = self._selections.get(text)
        return selection if selection is not None and selection.fleet is fleet else None


def _select_engines(fleet: Fleet, matches: _Matches) -> Generator[None, None, Selection]:
    engines, keys, tally = list[FleetEngine](), list[str](), FleetTally()
    for number, engine in enumerate(fleet.engines, 1):
        if matches(engine):
            engines.append(engine)
            keys.append(engine.key)
            tally.add(engine)
        if number % _CHUNK_ENGINES == 0:
            yield
    return Selection(fleet, engines, keys, tally.totals())


def _parse_filter(text: str) -> _Matches:
    """Parses a filter.  Raises InvalidQuestionError."""
    if len(text) > FILTER_CHARACTERS_MAX:
        raise _filter_error(f"has {len(text)} characters, and {FILTER_CHARACTERS_MAX} are allowed")
    words = text.split()
    if len(words) > FILTER_WORDS_MAX:
        raise _filter_error(f"has {len(words)} words, and {FILTER_WORDS_MAX} are allowed")
    exact, searched = list[tuple[str, str]](), list[str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            searched.append(word.casefold())
        elif name in _FIELDS:
            exact.append((name, value))
        else:
            raise _filter_error(f"names the field {name[:40]!r}: there are {', '.join(_FIELDS)}")

    def matches(engine: FleetEngine) -> bool:
        if not all(value in _FIELDS[name](engine) for name, value in exact):
            return False
        # No word contains a space or a line break.
        names = "\n".join(
            field_value for field in _SEARCHED for field_value in _FIELDS[field](engine)
        )
        folded = names.casefold() if searched else ""
        return all(word in folded for word in searched)

    return matches


def _filter_error(problem: str) -> InvalidQuestionError:
    return InvalidQuestionError(f"the filter {problem}", field_path="filter")


def fleet_document(selection: Selection, limit: int, after: str) -> dict[str, Any]:
    """Returns a page of the matching engines, with the totals of all matching ones.

    after: the `next` of the previous page, "" for the first one.  Raises InvalidQuestionError.
    """
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidQuestionError(f"limit {limit} must be in [1, {LIMIT_MAX}]")
    if len(after) > _AFTER_CHARACTERS_MAX:
        raise InvalidQuestionError("`after` is not a value of this sidecar: start without it")
    fleet, engines = selection.fleet, selection.engines_after(after, limit + 1)
    return {
        "shared": fleet.shared,
        "trouble": fleet.trouble,
        "refused": fleet.refused,
        "left_out": fleet.left_out,
        "totals": asdict(selection.totals),
        "engines": [engine_values(engine) for engine in engines[:limit]],
        "next": engines[limit - 1].key if len(engines) > limit else "",
    }


def engine_values(engine: FleetEngine) -> dict[str, Any]:
    """Returns one engine as plain values."""
    return asdict(engine.summary) | {
        "sidecar": engine.sidecar,
        "local": engine.local,
        "link": engine.link,
        "age_seconds": engine.age_seconds,
        "tokens_gained_per_second": engine.tokens_gained_per_second,
    }

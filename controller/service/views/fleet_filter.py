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
from controller.service.net.limits import READS_WAITING, Turns
from controller.service.views.fleet_view import (
    Fleet,
    FleetEngine,
    FleetTally,
    FleetTotals,
    FleetView,
)

# Characters and words of a filter: each word takes some milliseconds for 20,000 engines.
FILTER_MAX: Final = 256
FILTER_WORDS_MAX: Final = 16
# Selections of one view that are cached for equal filters.
_KEPT_MAX = 16
# Engines between two points where the work may be interrupted, a few microseconds each.
_CHUNK = 16

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
# Engines in a page of the list, at most and by default; characters of its `after`.
LIMIT_MAX: Final = 1000
LIMIT: Final = 200
_AFTER_MAX = 192


@dataclass(frozen=True, slots=True)
class Selection:
    """Holds the engines of a view that match a filter, ordered by key, and their totals.

    keys: of the engines, in the same order.
    """

    fleet: Fleet
    engines: Sequence[FleetEngine]
    keys: Sequence[str]
    totals: FleetTotals

    def after(self, key: str, most: int) -> Sequence[FleetEngine]:
        """Returns the engines that follow a key, `most` of them at most."""
        start = bisect_right(self.keys, key)
        return self.engines[start : start + most]


class FleetSearch:
    """Selects engines for the calls of one server; equal filters share a selection.

    turns: the queue of other lists on this server.
    """

    def __init__(self, fleet_view: FleetView, turns: Turns) -> None:
        self._fleet_view = fleet_view
        self._turns = turns
        self._selecting = Turns(READS_WAITING)
        # Selections of the newest view, by filter.
        self._kept: dict[str, Selection] = {}

    async def select(self, text: str) -> Selection:
        """Returns the matching engines.  Raises InvalidQuestionError, TooManyCallsError."""
        matches = _matcher(text)
        fleet = await self._fleet_view.look()
        if (known := self._known(fleet, text)) is not None:
            return known
        async with self._selecting.turn():
            # Another call may have made it meanwhile.
            if (known := self._known(fleet, text)) is not None:
                return known
            found = await self._turns.take_pieces(_selecting(fleet, matches))
            if len(self._kept) >= _KEPT_MAX or any(
                kept.fleet is not fleet for kept in self._kept.values()
            ):
                self._kept.clear()
            self._kept[text] = found
        return found

    def _known(self, fleet: Fleet, text: str) -> Selection | None:
        known = self._kept.get(text)
        return known if known is not None and known.fleet is fleet else None


def _selecting(fleet: Fleet, matches: _Matches) -> Generator[None, None, Selection]:
    engines, keys, tally = list[FleetEngine](), list[str](), FleetTally()
    for number, engine in enumerate(fleet.engines, 1):
        if matches(engine):
            engines.append(engine)
            keys.append(engine.key)
            tally.add(engine)
        if number % _CHUNK == 0:
            yield
    return Selection(fleet, engines, keys, tally.totals())


def _matcher(text: str) -> _Matches:
    """Parses a filter.  Raises InvalidQuestionError."""
    if len(text) > FILTER_MAX:
        raise _refusal(f"has {len(text)} characters, and {FILTER_MAX} are allowed")
    words = text.split()
    if len(words) > FILTER_WORDS_MAX:
        raise _refusal(f"has {len(words)} words, and {FILTER_WORDS_MAX} are allowed")
    exact, searched = list[tuple[str, str]](), list[str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            searched.append(word.casefold())
        elif name in _FIELDS:
            exact.append((name, value))
        else:
            raise _refusal(f"names the field {name[:40]!r}: there are {', '.join(_FIELDS)}")

    def matches(engine: FleetEngine) -> bool:
        if not all(value in _FIELDS[name](engine) for name, value in exact):
            return False
        # No word contains a space or a line break.
        names = "\n".join(found for field in _SEARCHED for found in _FIELDS[field](engine))
        folded = names.casefold() if searched else ""
        return all(word in folded for word in searched)

    return matches


def _refusal(why: str) -> InvalidQuestionError:
    return InvalidQuestionError(f"the filter {why}", field_path="filter")


def fleet_document(selection: Selection, limit: int, after: str) -> dict[str, Any]:
    """Returns a page of the matching engines, with the totals of all matching ones.

    after: the `next` of the previous page, "" for the first one.  Raises InvalidQuestionError.
    """
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidQuestionError(f"limit {limit} must be in [1, {LIMIT_MAX}]")
    if len(after) > _AFTER_MAX:
        raise InvalidQuestionError("`after` is not a value of this sidecar: start without it")
    fleet, ahead = selection.fleet, selection.after(after, limit + 1)
    return {
        "shared": fleet.shared,
        "trouble": fleet.trouble,
        "refused": fleet.refused,
        "left_out": fleet.left_out,
        "totals": asdict(selection.totals),
        "engines": [engine_values(engine) for engine in ahead[:limit]],
        "next": ahead[limit - 1].key if len(ahead) > limit else "",
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

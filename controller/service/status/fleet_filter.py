"""Filters for lists of the fleet's engines.

A filter has words, separated by spaces; an engine that matches all of them is listed.  FIELD=VALUE
matches a field exactly; any other word is looked for in the ids of engine and overrides, and in the
names of sidecar, model and drafter, without regard to case.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from controller.service.net.errors import InvalidQuestionError
from controller.service.status.fleet_view import FleetEngine

FILTER_MAX: Final = 256

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


def selected(engines: Sequence[FleetEngine], text: str) -> list[FleetEngine]:
    """The engines that match.  Raises InvalidQuestionError."""
    if len(text) > FILTER_MAX:
        raise InvalidQuestionError(
            f"the filter has {len(text)} characters, and {FILTER_MAX} are allowed",
            field_path="filter",
        )
    words = [_matcher(word) for word in text.split()]
    return [engine for engine in engines if all(matches(engine) for matches in words)]


def _matcher(word: str) -> Callable[[FleetEngine], bool]:
    name, equals, value = word.partition("=")
    if not equals:
        folded = word.casefold()
        return lambda engine: any(
            folded in found.casefold() for field in _SEARCHED for found in _FIELDS[field](engine)
        )
    if name not in _FIELDS:
        raise InvalidQuestionError(
            f"the filter names the field {name[:40]!r}: there are {', '.join(_FIELDS)}",
            field_path="filter",
        )
    return lambda engine: value in _FIELDS[name](engine)

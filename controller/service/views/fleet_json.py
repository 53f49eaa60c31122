"""The fleet as plain values, for the page (the shape is in docs/page.md)."""

from dataclasses import asdict
from typing import Any, Final

from controller.service.net.errors import InvalidQuestionError
from controller.service.views.fleet_filter import Selection
from controller.service.views.fleet_view import FleetEngine

LIMIT_MAX: Final = 1000
LIMIT: Final = 200
_AFTER_MAX = 192


def fleet_document(selection: Selection, limit: int, after: str) -> dict[str, Any]:
    """A page of the engines that match a filter, with the totals of all that match.

    after: the `next` of the page before, "" for the first one.  Raises InvalidQuestionError.
    """
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidQuestionError(f"limit {limit} is outside 1..{LIMIT_MAX}")
    if len(after) > _AFTER_MAX:
        raise InvalidQuestionError("this sidecar did not give this `after`: begin without one")
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
    """One engine as plain values."""
    return asdict(engine.summary) | {
        "sidecar": engine.sidecar,
        "local": engine.local,
        "link": engine.link,
        "age_seconds": engine.age_seconds,
        "tokens_gained_per_second": engine.tokens_gained_per_second,
    }

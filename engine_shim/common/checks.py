"""The checks that decide whether an engine can be steered.

A shim makes them as its engine starts, where the first obstacle ends the start, and
`speculation-would-steer` makes the same ones beforehand and shows all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.link.messages import slow_protobuf

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """Describes one thing that was looked at.

    found: what the engine has.  obstacle: why it cannot be steered with that, and what to change;
    "" if it can.  lead: begins the error of an engine that starts.  starts: an engine with this
    obstacle starts and serves, and never gains from its drafter: its log says why.  advice: what is
    worth a look and no obstacle; "" if there is nothing.
    """

    topic: str
    found: str
    obstacle: str = ""
    lead: str = ""
    starts: bool = False
    advice: str = ""

    @property
    def refusal(self) -> str:
        """Returns the error's text; "" without an obstacle."""
        return self.obstacle and self.lead + self.obstacle


def checked(topic: str, found: object, obstacles: Mapping[str, object], lead: str = "") -> Check:
    """Makes a check with the first of the obstacles that is there.

    obstacles: whether each of them is there, by its text.
    """
    obstacle = next((text for text, is_so in obstacles.items() if is_so), "")
    return Check(topic, str(found), obstacle, lead)


def protobuf_check() -> Check:
    """Checks whether protobuf is fast enough to report each step."""
    obstacle = slow_protobuf()
    return Check("protobuf", "pure Python" if obstacle else "compiled", obstacle)


def require(checks: Iterable[Check]) -> None:
    """Raises UnsupportedEngineError for the first check with an obstacle.

    Logs those with which an engine starts, and all advice.
    """
    for check in checks:
        if check.obstacle and not check.starts:
            raise UnsupportedEngineError(check.refusal)
        for words in filter(None, (check.refusal, check.advice)):
            _log.warning("%s: %s", check.topic, words)

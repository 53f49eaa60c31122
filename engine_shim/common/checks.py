"""The checks that decide whether an engine can be steered.

A shim runs them as its engine starts: the first obstacle ends the start.
`speculation-would-steer` runs the same checks before the start and shows all results.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.link.messages import slow_protobuf_reason

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    actual: what the engine has.  obstacle: why an engine with it cannot be steered, and what to
    change; "" if it can be steered.  error_prefix: prefix of the error text at the engine's start.
    engine_starts: an engine with this obstacle starts and serves but never gains from its drafter;
    its log contains the reason.  advice: a hint that is not an obstacle, or "".
    """

    topic: str
    actual: str
    obstacle: str = ""
    error_prefix: str = ""
    engine_starts: bool = False
    advice: str = ""

    @property
    def refusal(self) -> str:
        """Returns the error's text; "" without an obstacle."""
        return self.obstacle and self.error_prefix + self.obstacle


def make_check(
    topic: str, actual: object, obstacles: Mapping[str, object], error_prefix: str = ""
) -> Check:
    """Makes a check with the first obstacle that applies.

    obstacles: text of each obstacle -> whether it applies.
    """
    obstacle = next((text for text, applies in obstacles.items() if applies), "")
    return Check(topic, str(actual), obstacle, error_prefix)


def protobuf_check() -> Check:
    """Checks whether protobuf is fast enough to report each step."""
    obstacle = slow_protobuf_reason()
    return Check("protobuf", "pure Python" if obstacle else "compiled", obstacle)


def require_no_obstacle(checks: Iterable[Check]) -> None:
    """Raises UnsupportedEngineError for the first check with an obstacle.

    Logs the obstacles with which an engine starts, and all advice.
    """
    for check in checks:
        if check.obstacle and not check.engine_starts:
            raise UnsupportedEngineError(check.refusal)
        for message in filter(None, (check.refusal, check.advice)):
            _log.warning("%s: %s", check.topic, message)

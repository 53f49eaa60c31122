"""Defines what a check finds wrong with an engine."""

from dataclasses import dataclass
from enum import Enum


class WarningKind(Enum):
    """Names what a warning is about, in logs, metrics and the contract."""

    NO_ACCEPTANCE = "no-acceptance"
    OTHER_WIDTH = "other-width"
    FLAT_STEP_TIME = "flat-step-time"


@dataclass(frozen=True, slots=True)
class EngineWarning:
    """Tells that an engine works worse than it could; for people, and no decision reads it.

    drafter: the one that it is about.  found: what its reports show, in one line.  advice: likely
    causes, and what to do about them, in one line.
    """

    kind: WarningKind
    drafter: str
    found: str
    advice: str

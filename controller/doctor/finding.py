"""Defines the result of a check."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """Severity of a finding.  WARN: it works, but not as well as it could, or not for long."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    state: the state.  fix: what to do, in one line; "" if the level is OK.
    """

    check: str
    level: Level
    state: str
    fix: str = ""


def ok(check: str, state: str) -> Finding:
    """Returns a finding that needs no action."""
    return Finding(check, Level.OK, state)


def warn(check: str, state: str, fix: str) -> Finding:
    """Returns a finding that the operator should look at."""
    return Finding(check, Level.WARN, state, fix)


def fail(check: str, state: str, fix: str) -> Finding:
    """Returns a finding that must be fixed."""
    return Finding(check, Level.FAIL, state, fix)

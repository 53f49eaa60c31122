"""Defines the result of a check."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """Names how serious a finding is.  WARN: it works, but worse than it could, or not for long."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the result of one check.

    found: the state.  fix: what to do, in one line; "" when OK.
    """

    check: str
    level: Level
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.OK, found)


def warn(check: str, found: str, fix: str) -> Finding:
    """Something to look at."""
    return Finding(check, Level.WARN, found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    """Something to mend."""
    return Finding(check, Level.FAIL, found, fix)

"""Defines a fault, and records what was observed when it was injected."""

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from lab.harness.measured import Spread

# The most characters of an error's text that are kept.
_MAX_ERROR_CHARACTERS = 300
COMMAND = "python -m tools.faults --only"


class CannotInjectError(Exception):
    """This machine cannot have the fault; the message says what it lacks."""


@dataclass
class Observations:
    """The observations of an injection: statements that hold or do not, and figures."""

    statements: list[tuple[str, bool]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, text: str, holds: bool, otherwise: object = "") -> None:
        """Adds a statement; `otherwise` is what was observed instead if it does not hold."""
        self.statements.append((text if holds else f"NOT: {text} ({otherwise})", holds))

    def figure(self, name: str, value: float | str) -> None:
        """Adds a figure; its name ends with its unit."""
        self.figures[name] = round(value, 4) if isinstance(value, float) else value

    def spread(self, name: str, values: Iterable[float]) -> None:
        """Adds a figure of several repeats."""
        self.figures[name] = Spread(tuple(values)).as_json()


Injection: TypeAlias = Callable[[Path, Observations], None]
# Expectations that several faults share.
LAPSE_EXPECTED = (
    "plan to its lease's end, grace, safe default; then steered under what was acknowledged"
)
PLAN_CONTINUES = "the plan continues, no safe default"


@dataclass(frozen=True)
class Fault:
    """A fault with its injection and the expected outcome.

    quick: a few seconds, so that it is among the tests as well.
    """

    name: str
    injected: str
    expected: str
    inject: Injection
    quick: bool = False


def fault(name: str, expected: str, *, quick: bool = False) -> Callable[[Injection], Fault]:
    """Makes a fault of the function that injects it, whose docstring says what is injected."""
    return lambda inject: Fault(name, describe_injection(inject), expected, inject, quick)


def describe_injection(inject: Callable[..., None]) -> str:
    """The docstring, as a cell of the table."""
    return " ".join((inject.__doc__ or "").split()).removesuffix(".")


def list_faults(module: ModuleType) -> list[Fault]:
    """The faults that a module has made, in order."""
    return [value for value in vars(module).values() if isinstance(value, Fault)]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault.  holds: None if it was not injected, for the reason `observed`."""

    fault: Fault
    observed: str
    holds: bool | None
    figures: dict[str, Any]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Returns the outcome for the result file."""
        return {
            "name": self.fault.name,
            "injected": self.fault.injected,
            "expected": self.fault.expected,
            "observed": self.observed,
            "holds": self.holds,
            "figures": self.figures,
            "seconds": round(self.seconds, 1),
            "command": f"{COMMAND} {self.fault.name}",
        }


def run_fault(fault: Fault) -> Outcome:
    """Injects it in a place of its own; whatever goes wrong is what was observed."""
    observations = Observations()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        try:
            fault.inject(Path(place), observations)
        except CannotInjectError as error:
            return Outcome(fault, f"not injected: {error}", None, {}, time.monotonic() - start)
        except Exception as error:  # noqa: BLE001  # the others are to be injected all the same
            frames = traceback.extract_tb(error.__traceback__)
            own_frame = next(
                frame for frame in reversed(frames) if "/tools/faults/" in frame.filename
            )
            location = f"{Path(own_frame.filename).name}:{own_frame.lineno}"
            message = " ".join(str(error).split())[:_MAX_ERROR_CHARACTERS]
            observations.check(
                "it runs to its end", False, f"{location}: {type(error).__name__}: {message}"
            )
    observed = "; ".join(text for text, _ in observations.statements)
    holds = bool(observations.statements) and all(
        was_held for _, was_held in observations.statements
    )
    return Outcome(fault, observed, holds, observations.figures, time.monotonic() - start)

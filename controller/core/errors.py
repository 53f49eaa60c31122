"""Defines the errors of the decision core.  Each says what is wrong and often the remedy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

# Exceptions from decoding malformed JSON: invalid syntax, values of the wrong type, missing keys,
# nesting that is too deep, numbers that are too large.
MALFORMED_JSON_ERRORS: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class SpeculationError(Exception):
    """Base class of every error that this project raises deliberately.

    field_path: the invalid input field, for example `rule.gamma_min`; empty for none.
    resource: id of the engine, override or profile that the error is about; empty for none.
    facts: additional machine-readable details, by name.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field_path: str = "",
        resource: str = "",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.field_path = field_path
        self.resource = resource
        self.facts = dict(facts or {})


@contextmanager
def error_field_prefix(field: str) -> Iterator[None]:
    """Prefixes the `field_path` of an error raised in the block with a field name."""
    try:
        yield
    except SpeculationError as error:
        error.field_path = f"{field}.{error.field_path}".rstrip(".")
        raise


class InvalidEngineError(SpeculationError):
    """An engine's description contradicts itself."""


class InvalidReportError(SpeculationError):
    """A step report contains impossible values; the whole report is rejected."""


class UnknownArmError(InvalidReportError):
    """A report or a command names a drafter or draft length that the engine did not introduce."""


class StaleReportError(InvalidReportError):
    """A report's step counter does not increase."""


class InvalidLossError(SpeculationError):
    """A lost capability contradicts itself; it is rejected, and the rest of the message is used."""


class InvalidProfileError(SpeculationError):
    """A file is not a profile, or it contains impossible numbers."""


class InvalidBeliefError(SpeculationError):
    """Stored acceptance estimates cannot be read."""


class InvalidTrainingError(SpeculationError):
    """A trainer's result, or a stored state of training, is invalid."""


class InvalidStateError(SpeculationError):
    """Recorded variables are damaged, or belong to another engine's core."""


class ProfileMergeError(SpeculationError):
    """Profiles cannot be merged into one."""


class ProfileMismatchError(SpeculationError):
    """A profile belongs to another engine.  `field` names the first field that differs."""

    def __init__(self, field: str, profile_value: object, engine_value: object) -> None:
        self.field = field
        super().__init__(
            f"the profile does not belong to this engine: {field} is {profile_value!r} in the "
            f"profile and {engine_value!r} in the engine; measure again with `controller profile`",
            facts={"field": field},
        )

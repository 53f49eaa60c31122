"""Errors of the decision core.  Each says what was wrong and, where it helps, what to do."""

from typing import Final

# What comes of taking stored JSON for what it should be where it is something else: no JSON, other
# kinds of values, missing keys, nesting without an end, numbers that fit nowhere.
MALFORMED: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class SpeculationError(Exception):
    """Base of every error that this project raises on purpose."""


class InvalidEngineError(SpeculationError):
    """An engine's introduction contradicts itself."""


class InvalidReportError(SpeculationError):
    """A step report that cannot be true: it is refused, nothing of it is used."""


class UnknownArmError(InvalidReportError):
    """A drafter or draft length that the engine did not introduce."""


class StaleReportError(InvalidReportError):
    """A step counter that does not go forward."""


class InvalidLossError(SpeculationError):
    """A lost capability that cannot be: it is refused, and everything else is used."""


class InvalidProfileError(SpeculationError):
    """A profile file that is not one, or that holds impossible numbers."""


class InvalidBeliefError(SpeculationError):
    """Kept estimates that are none."""


class InvalidTrainingError(SpeculationError):
    """A trainer's result, or a kept state of training, that cannot be."""


class InvalidStateError(SpeculationError):
    """Kept variables of a core that are none, or another engine's."""


class ProfileMergeError(SpeculationError):
    """Profiles that cannot be made into one."""


class ProfileMismatchError(SpeculationError):
    """A profile of another fingerprint.  `field` names the first field that differs."""

    def __init__(self, field: str, profile_value: object, engine_value: object) -> None:
        self.field = field
        super().__init__(
            f"the profile does not belong to this engine: {field} is {profile_value!r} in the "
            f"profile and {engine_value!r} in the engine; measure again with `controller profile`"
        )

"""Defines what the service refuses, and turns errors into gRPC status codes in one place."""

from typing import Any, Never

import grpc
import grpc.aio

from controller.core.errors import (
    InvalidBeliefError,
    InvalidEngineError,
    InvalidLossError,
    InvalidProfileError,
    InvalidReportError,
    InvalidTrainingError,
    ProfileMergeError,
    ProfileMismatchError,
    SpeculationError,
    StaleReportError,
    UnknownArmError,
)
from controller.core.planning.overrides import InvalidOverrideError
from controller.store.interface import StoreError, StoreUnavailableError, UnknownSequenceError

# A message may quote what a client sent; this is as much of it as goes back.
_MESSAGE_MAX = 500


class UnknownDrafterError(UnknownArmError):
    """A report names a drafter that the engine did not introduce."""


class NoSessionError(SpeculationError):
    """The session is unknown, over, or taken over: the engine has to introduce itself again."""


class UnknownEngineError(SpeculationError):
    """No engine of that id has a session."""


class EngineTakenError(SpeculationError):
    """Another engine steers under this id, and has been heard of a moment ago."""


class TooManyEnginesError(SpeculationError):
    """The registry is full and none of its sessions is idle, or the sidecar is overloaded."""


class MeasurementConflictError(SpeculationError):
    """The engine is being measured by someone else, or went away while it was measured."""


class InvalidMeasurementError(SpeculationError):
    """A measurement asks for what the engine cannot run."""


class NoMatchingEngineError(SpeculationError):
    """A profile that belongs to no introduced engine; the message names the field that differs."""


class InvalidQuestionError(SpeculationError):
    """A question about what cannot be."""


class UnreadableRequestError(SpeculationError):
    """Bytes that are no message of the call."""


class TooManyReportsError(SpeculationError):
    """A message with more reports than one may hold."""


class SilentClientError(SpeculationError):
    """A client opens a stream and says nothing."""


class SlowClientError(SpeculationError):
    """A client reads so slowly that what it asked for piles up."""


class ProfileNotSavedError(SpeculationError):
    """The profile directory cannot be written."""


class NoProfileError(SpeculationError):
    """No such profile is in the store."""


class NoOverrideError(SpeculationError):
    """No such override is in force."""


class TooManyOverridesError(SpeculationError):
    """More overrides than a sidecar keeps in force."""


class OverrideExistsError(SpeculationError):
    """The id of a new override is taken, or was."""


class OverrideChangedError(SpeculationError):
    """The override is not what the caller has seen."""


class NoEffectError(SpeculationError):
    """The override would do nothing to the engines of this sidecar, and the caller forbids that."""


class ForbiddenError(SpeculationError):
    """The caller has not the right to do this."""


class UnauthenticatedError(SpeculationError):
    """Nobody knows who calls."""


class TooManyCallsError(SpeculationError):
    """More calls than this sidecar takes in a second."""


class CannotTrainError(SpeculationError):
    """The engine keeps no signals, or takes no versions of its drafter."""


class TrainerAttachedError(SpeculationError):
    """Another trainer attends the engine."""


class StartRefusedError(SpeculationError):
    """The sidecar cannot start as it was asked to."""


class AddressTakenError(StartRefusedError):
    """A socket or port cannot be bound."""


class ShuttingDownError(SpeculationError):
    """The sidecar is going away."""


# Narrow before broad: the first match counts.
_STATUS: tuple[tuple[type[SpeculationError], grpc.StatusCode], ...] = (
    (UnknownDrafterError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownArmError, grpc.StatusCode.OUT_OF_RANGE),
    (StaleReportError, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidReportError, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidEngineError, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidLossError, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidProfileError, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidBeliefError, grpc.StatusCode.INVALID_ARGUMENT),
    (ProfileMergeError, grpc.StatusCode.INVALID_ARGUMENT),
    (ProfileMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (NoSessionError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownEngineError, grpc.StatusCode.NOT_FOUND),
    (EngineTakenError, grpc.StatusCode.ALREADY_EXISTS),
    (TooManyEnginesError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (MeasurementConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidMeasurementError, grpc.StatusCode.INVALID_ARGUMENT),
    (NoMatchingEngineError, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidQuestionError, grpc.StatusCode.INVALID_ARGUMENT),
    (TooManyReportsError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnreadableRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (SilentClientError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (SlowClientError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ProfileNotSavedError, grpc.StatusCode.INTERNAL),
    (ShuttingDownError, grpc.StatusCode.UNAVAILABLE),
    (InvalidOverrideError, grpc.StatusCode.INVALID_ARGUMENT),
    (NoProfileError, grpc.StatusCode.NOT_FOUND),
    (NoOverrideError, grpc.StatusCode.NOT_FOUND),
    (TooManyOverridesError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (OverrideExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (OverrideChangedError, grpc.StatusCode.ABORTED),
    (NoEffectError, grpc.StatusCode.FAILED_PRECONDITION),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (TooManyCallsError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidTrainingError, grpc.StatusCode.INVALID_ARGUMENT),
    (CannotTrainError, grpc.StatusCode.FAILED_PRECONDITION),
    (TrainerAttachedError, grpc.StatusCode.ALREADY_EXISTS),
    (UnknownSequenceError, grpc.StatusCode.INVALID_ARGUMENT),
    (StoreUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StoreError, grpc.StatusCode.INTERNAL),
)


def status_of(error: SpeculationError) -> grpc.StatusCode:
    """The status that says what kind of error it is; UNKNOWN for one that is not listed."""
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.UNKNOWN


def message_of(error: SpeculationError) -> str:
    """The error's text, cut to a length that fits a status or a rejection."""
    text = str(error)
    return text if len(text) <= _MESSAGE_MAX else text[: _MESSAGE_MAX - 1] + "…"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SpeculationError) -> Never:
    """Ends the call with the error's status and message, and its name for programs."""
    name = (("speculation-error", type(error).__name__),)
    await context.abort(status_of(error), message_of(error), name)

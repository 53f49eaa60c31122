"""Defines what the service refuses, and the status and reason of each error in one place."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from grpc import StatusCode

from controller.core.errors import (
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
from speculation.v1 import errors_pb2

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


class RequestIdReusedError(SpeculationError):
    """A request has the id of an earlier one, and other content."""


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


class PolicyNotClearedError(NoOverrideError):
    """The id is that of file-based policy, which only its file ends."""


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


class SidecarFailedError(SpeculationError):
    """The sidecar failed at a call; the log has the error, and a client hears no more than that."""


class StartRefusedError(SpeculationError):
    """The sidecar cannot start as it was asked to."""


class AddressTakenError(StartRefusedError):
    """A socket or port cannot be bound."""


class ShuttingDownError(SpeculationError):
    """The sidecar is going away."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Says how clients hear of an error.

    resource_type: what the `resource` of such an error is; empty if it has none.
    """

    status: grpc.StatusCode
    reason: errors_pb2.ErrorReason.ValueType
    resource_type: str = ""


_ENGINE, _OVERRIDE, _PROFILE = "engine", "override", "profile"
# Narrow before broad: the first match counts.
KINDS: Mapping[type[SpeculationError], ErrorKind] = {
    UnknownDrafterError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_UNKNOWN_DRAFTER
    ),
    UnknownArmError: ErrorKind(
        StatusCode.OUT_OF_RANGE, errors_pb2.ERROR_REASON_UNKNOWN_DRAFT_LENGTH
    ),
    StaleReportError: ErrorKind(
        StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_STALE_REPORT
    ),
    InvalidReportError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_REPORT
    ),
    InvalidEngineError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_ENGINE
    ),
    InvalidLossError: ErrorKind(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_LOSS),
    InvalidProfileError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_PROFILE
    ),
    ProfileMergeError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_PROFILE
    ),
    ProfileMismatchError: ErrorKind(
        StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_PROFILE_MISMATCH
    ),
    NoSessionError: ErrorKind(
        StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_SESSION_ENDED
    ),
    UnknownEngineError: ErrorKind(
        StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_ENGINE_NOT_FOUND, _ENGINE
    ),
    EngineTakenError: ErrorKind(
        StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_ENGINE_TAKEN, _ENGINE
    ),
    TooManyEnginesError: ErrorKind(
        StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_ENGINES
    ),
    MeasurementConflictError: ErrorKind(
        StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_MEASUREMENT_CONFLICT, _ENGINE
    ),
    InvalidMeasurementError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_MEASUREMENT
    ),
    NoMatchingEngineError: ErrorKind(
        StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_NO_MATCHING_ENGINE, _PROFILE
    ),
    RequestIdReusedError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_REQUEST_ID_REUSED
    ),
    InvalidQuestionError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_REQUEST
    ),
    TooManyReportsError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_TOO_MANY_REPORTS
    ),
    UnreadableRequestError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_UNREADABLE_REQUEST
    ),
    SilentClientError: ErrorKind(
        StatusCode.DEADLINE_EXCEEDED, errors_pb2.ERROR_REASON_SILENT_CLIENT
    ),
    SlowClientError: ErrorKind(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_SLOW_CLIENT),
    ProfileNotSavedError: ErrorKind(
        StatusCode.INTERNAL, errors_pb2.ERROR_REASON_PROFILE_NOT_SAVED, _PROFILE
    ),
    ShuttingDownError: ErrorKind(StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_SHUTTING_DOWN),
    InvalidOverrideError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_OVERRIDE
    ),
    NoProfileError: ErrorKind(
        StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_PROFILE_NOT_FOUND, _PROFILE
    ),
    NoOverrideError: ErrorKind(
        StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_OVERRIDE_NOT_FOUND, _OVERRIDE
    ),
    TooManyOverridesError: ErrorKind(
        StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_OVERRIDES
    ),
    OverrideExistsError: ErrorKind(
        StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_OVERRIDE_EXISTS, _OVERRIDE
    ),
    OverrideChangedError: ErrorKind(
        StatusCode.ABORTED, errors_pb2.ERROR_REASON_OVERRIDE_CHANGED, _OVERRIDE
    ),
    NoEffectError: ErrorKind(
        StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_NO_EFFECT, _OVERRIDE
    ),
    ForbiddenError: ErrorKind(
        StatusCode.PERMISSION_DENIED, errors_pb2.ERROR_REASON_FORBIDDEN, _ENGINE
    ),
    UnauthenticatedError: ErrorKind(
        StatusCode.UNAUTHENTICATED, errors_pb2.ERROR_REASON_UNAUTHENTICATED
    ),
    TooManyCallsError: ErrorKind(
        StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_CALLS
    ),
    InvalidTrainingError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_TRAINING
    ),
    CannotTrainError: ErrorKind(
        StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_CANNOT_TRAIN, _ENGINE
    ),
    TrainerAttachedError: ErrorKind(
        StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_TRAINER_ATTACHED, _ENGINE
    ),
    UnknownSequenceError: ErrorKind(
        StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_REQUEST
    ),
    StoreUnavailableError: ErrorKind(
        StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_STORE_UNAVAILABLE
    ),
    StoreError: ErrorKind(StatusCode.INTERNAL, errors_pb2.ERROR_REASON_STORE_FAILED),
}
FAILED = ErrorKind(StatusCode.INTERNAL, errors_pb2.ERROR_REASON_INTERNAL)


def kind_of(error: SpeculationError) -> ErrorKind:
    """Returns how clients hear of an error; FAILED for one that is not listed."""
    return next((kind for of, kind in KINDS.items() if isinstance(error, of)), FAILED)


def status_of(error: SpeculationError) -> grpc.StatusCode:
    """The status that says what kind of error it is."""
    return kind_of(error).status


def message_of(error: SpeculationError) -> str:
    """The error's text, cut to a length that fits a status or a rejection."""
    return cut(str(error), _MESSAGE_MAX)


def cut(text: str, most: int) -> str:
    """Cuts a text to so many characters, and to twice as many bytes."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    data = text.encode(errors="replace")
    if len(data) <= 2 * most:
        return text
    return data[: 2 * most - 3].decode(errors="ignore") + "…"

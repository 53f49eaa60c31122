"""Defines what the service refuses: each error, its status and reason, and how a call ends with it.

Programs can act on them: a call ends with google.rpc.Status and its details.  The details are
bounded, so that they fit into the metadata that every gRPC client takes (8 KiB).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Never, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
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

DOMAIN: Final = "speculation.v1"
_PREFIX = "ERROR_REASON_"
_ENGINE, _OVERRIDE, _PROFILE = "engine", "override", "profile"
# A message may quote what a client sent; this is as much of it as goes back.
_MESSAGE_MAX = 500
# Characters of a name or a fact, and of the description of a field.
_NAME_MAX, _DESCRIPTION_MAX = 128, 250
_FAILED_TEXT = "the sidecar failed at this call: its log has the error"
_ABOUT_A_FIELD = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Error = TypeVar("_Error", bound=type[SpeculationError])


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Says how clients hear of an error.

    resource_type: what the `resource` of such an error is; empty if it has none.
    """

    status: grpc.StatusCode
    reason: errors_pb2.ErrorReason.ValueType
    resource_type: str = ""


# Errors that are raised where nothing is known about gRPC: class, status, reason.
_OF_OTHERS: Final = (
    (UnknownArmError, StatusCode.OUT_OF_RANGE, errors_pb2.ERROR_REASON_UNKNOWN_DRAFT_LENGTH),
    (StaleReportError, StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_STALE_REPORT),
    (InvalidReportError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_REPORT),
    (InvalidEngineError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_ENGINE),
    (InvalidLossError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_LOSS),
    (InvalidProfileError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_PROFILE),
    (ProfileMergeError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_PROFILE),
    (
        ProfileMismatchError,
        StatusCode.FAILED_PRECONDITION,
        errors_pb2.ERROR_REASON_PROFILE_MISMATCH,
    ),
    (InvalidOverrideError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_OVERRIDE),
    (InvalidTrainingError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_TRAINING),
    (UnknownSequenceError, StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_REQUEST),
    (StoreUnavailableError, StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_STORE_UNAVAILABLE),
    (StoreError, StatusCode.INTERNAL, errors_pb2.ERROR_REASON_STORE_FAILED),
)
# How clients hear of each class of errors, and of its subclasses that are not listed.
KINDS: Final[dict[type[SpeculationError], ErrorKind]] = {
    error: ErrorKind(status, reason) for error, status, reason in _OF_OTHERS
}
FAILED: Final = ErrorKind(StatusCode.INTERNAL, errors_pb2.ERROR_REASON_INTERNAL)


def told(
    status: grpc.StatusCode, reason: errors_pb2.ErrorReason.ValueType, resource_type: str = ""
) -> Callable[[_Error], _Error]:
    """Declares how clients hear of a class of errors; see `ErrorKind`."""

    def declare(of: _Error) -> _Error:
        KINDS[of] = ErrorKind(status, reason, resource_type)
        return of

    return declare


@told(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_UNKNOWN_DRAFTER)
class UnknownDrafterError(UnknownArmError):
    """A report names a drafter that the engine did not introduce."""


@told(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_SESSION_ENDED)
class NoSessionError(SpeculationError):
    """The session is unknown, over, or taken over: the engine has to introduce itself again."""


@told(StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_ENGINE_NOT_FOUND, _ENGINE)
class UnknownEngineError(SpeculationError):
    """No engine of that id has a session."""


@told(StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_ENGINE_TAKEN, _ENGINE)
class EngineTakenError(SpeculationError):
    """Another engine steers under this id, and has been heard of a moment ago."""


@told(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_ENGINES)
class TooManyEnginesError(SpeculationError):
    """The registry is full and none of its sessions is idle, or the sidecar is overloaded."""


@told(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_MEASUREMENT_CONFLICT, _ENGINE)
class MeasurementConflictError(SpeculationError):
    """The engine is being measured by someone else, or went away while it was measured."""


@told(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_MEASUREMENT)
class InvalidMeasurementError(SpeculationError):
    """A measurement asks for what the engine cannot run."""


@told(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_NO_MATCHING_ENGINE, _PROFILE)
class NoMatchingEngineError(SpeculationError):
    """A profile that belongs to no introduced engine; the message names the field that differs."""


@told(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_REQUEST)
class InvalidQuestionError(SpeculationError):
    """A question about what cannot be."""


@told(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_REQUEST_ID_REUSED)
class RequestIdReusedError(SpeculationError):
    """A request has the id of an earlier one, and other content."""


@told(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_UNREADABLE_REQUEST)
class UnreadableRequestError(SpeculationError):
    """Bytes that are no message of the call."""


@told(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_TOO_MANY_REPORTS)
class TooManyReportsError(SpeculationError):
    """A message with more reports than one may hold."""


@told(StatusCode.DEADLINE_EXCEEDED, errors_pb2.ERROR_REASON_SILENT_CLIENT)
class SilentClientError(SpeculationError):
    """A client opens a stream and says nothing."""


@told(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_SLOW_CLIENT)
class SlowClientError(SpeculationError):
    """A client reads so slowly that what it asked for piles up."""


@told(StatusCode.INTERNAL, errors_pb2.ERROR_REASON_PROFILE_NOT_SAVED, _PROFILE)
class ProfileNotSavedError(SpeculationError):
    """The profile directory cannot be written."""


@told(StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_PROFILE_NOT_FOUND, _PROFILE)
class NoProfileError(SpeculationError):
    """No such profile is in the store."""


@told(StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_OVERRIDE_NOT_FOUND, _OVERRIDE)
class NoOverrideError(SpeculationError):
    """No such override is in force."""


class PolicyNotClearedError(NoOverrideError):
    """The id is that of file-based policy, which only its file ends."""


@told(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_OVERRIDES)
class TooManyOverridesError(SpeculationError):
    """More overrides than a sidecar keeps in force."""


@told(StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_OVERRIDE_EXISTS, _OVERRIDE)
class OverrideExistsError(SpeculationError):
    """The id of a new override is taken, or was."""


@told(StatusCode.ABORTED, errors_pb2.ERROR_REASON_OVERRIDE_CHANGED, _OVERRIDE)
class OverrideChangedError(SpeculationError):
    """The override is not what the caller has seen."""


@told(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_NO_EFFECT, _OVERRIDE)
class NoEffectError(SpeculationError):
    """The override would do nothing to the engines of this sidecar, and the caller forbids that."""


@told(StatusCode.PERMISSION_DENIED, errors_pb2.ERROR_REASON_FORBIDDEN, _ENGINE)
class ForbiddenError(SpeculationError):
    """The caller has not the right to do this."""


@told(StatusCode.UNAUTHENTICATED, errors_pb2.ERROR_REASON_UNAUTHENTICATED)
class UnauthenticatedError(SpeculationError):
    """Nobody knows who calls."""


@told(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_CALLS)
class TooManyCallsError(SpeculationError):
    """More calls than this sidecar takes in a second."""


@told(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_CANNOT_TRAIN, _ENGINE)
class CannotTrainError(SpeculationError):
    """The engine keeps no signals, or takes no versions of its drafter."""


@told(StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_TRAINER_ATTACHED, _ENGINE)
class TrainerAttachedError(SpeculationError):
    """Another trainer attends the engine."""


class SidecarFailedError(SpeculationError):
    """The sidecar failed at a call; the log has the error, and a client hears no more than that."""


class StartRefusedError(SpeculationError):
    """The sidecar cannot start as it was asked to."""


class AddressTakenError(StartRefusedError):
    """A socket or port cannot be bound."""


@told(StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_SHUTTING_DOWN)
class ShuttingDownError(SpeculationError):
    """The sidecar is going away."""


def kind_of(error: SpeculationError) -> ErrorKind:
    """Returns how clients hear of an error; FAILED for one that is not listed."""
    return next((KINDS[of] for of in type(error).__mro__ if of in KINDS), FAILED)


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


def status_message(error: SpeculationError) -> status_pb2.Status:
    """Returns the status of an error with ErrorInfo, and BadRequest and ResourceInfo if any.

    A client learns nothing of an error that is not meant for it: the text may name internals.
    """
    kind = kind_of(error)
    text = _FAILED_TEXT if kind is FAILED else message_of(error)
    info = error_details_pb2.ErrorInfo(
        reason=errors_pb2.ErrorReason.Name(kind.reason).removeprefix(_PREFIX),
        domain=DOMAIN,
        metadata={name: cut(fact, _NAME_MAX) for name, fact in error.facts.items()},
    )
    details: list[Any] = [info]
    if kind.status in _ABOUT_A_FIELD and error.field_path:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cut(error.field_path, _NAME_MAX), description=cut(text, _DESCRIPTION_MAX)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if kind.resource_type and error.resource:
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=kind.resource_type, resource_name=cut(error.resource, _NAME_MAX)
            )
        )
    return status_pb2.Status(code=kind.status.value[0], message=text, details=map(_packed, details))


def _packed(detail: Any) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


async def abort(context: Context, error: SpeculationError) -> Never:
    """Ends the call with the error's status, message and details.

    Clients of earlier versions read the error's name from `speculation-error`.
    """
    kind, status = kind_of(error), status_message(error)
    metadata = (
        ("speculation-error", type(error).__name__),
        ("grpc-status-details-bin", status.SerializeToString()),
    )
    await context.abort(kind.status, status.message, metadata)

"""Defines the service's errors with their gRPC status and reason, and ends calls with them.

A call ends with google.rpc.Status and its details, so that programs can act on the reason.  The
details are bounded, so that they fit into the metadata that every gRPC client accepts (8 KiB).
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
# Characters of a message; it may quote what a client sent.
_MESSAGE_MAX = 500
# Characters of a name or a fact, and of the description of a field.
_NAME_MAX, _DESCRIPTION_MAX = 128, 250
_FAILED_TEXT = "the sidecar failed at this call: its log has the error"
_FIELD_ERROR_STATUSES = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Error = TypeVar("_Error", bound=type[SpeculationError])


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Describes the status that clients get for a class of errors.

    resource_type: the type of the error's `resource`; empty if it has none.
    """

    status: grpc.StatusCode
    reason: errors_pb2.ErrorReason.ValueType
    resource_type: str = ""


# Errors of packages that know nothing of gRPC: class, status, reason.
_FOREIGN_ERRORS: Final = (
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
# The status for each class of errors; it includes subclasses that are not listed.
ERROR_KINDS: Final[dict[type[SpeculationError], ErrorKind]] = {
    error: ErrorKind(status, reason) for error, status, reason in _FOREIGN_ERRORS
}
INTERNAL_ERROR_KIND: Final = ErrorKind(StatusCode.INTERNAL, errors_pb2.ERROR_REASON_INTERNAL)


def grpc_status(
    status: grpc.StatusCode, reason: errors_pb2.ErrorReason.ValueType, resource_type: str = ""
) -> Callable[[_Error], _Error]:
    """Declares the status that clients get for a class of errors; see `ErrorKind`."""

    def declare(error_class: _Error) -> _Error:
        ERROR_KINDS[error_class] = ErrorKind(status, reason, resource_type)
        return error_class

    return declare


@grpc_status(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_UNKNOWN_DRAFTER)
class UnknownDrafterError(UnknownArmError):
    """A report names a drafter that the engine did not introduce."""


@grpc_status(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_SESSION_ENDED)
class NoSessionError(SpeculationError):
    """The session is unknown, over, or was taken over: the engine must introduce itself again."""


@grpc_status(StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_ENGINE_NOT_FOUND, _ENGINE)
class UnknownEngineError(SpeculationError):
    """No engine with that id has a session."""


@grpc_status(StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_ENGINE_TAKEN, _ENGINE)
class EngineTakenError(SpeculationError):
    """Another engine is steered under this id and was in contact a moment ago."""


@grpc_status(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_ENGINES)
class TooManyEnginesError(SpeculationError):
    """The registry is full and none of its sessions is idle, or the sidecar is overloaded."""


@grpc_status(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_MEASUREMENT_CONFLICT, _ENGINE)
class MeasurementConflictError(SpeculationError):
    """Another client measures the engine, or the engine disconnected while it was measured."""


@grpc_status(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_MEASUREMENT)
class InvalidMeasurementError(SpeculationError):
    """A measurement requests an arm that the engine cannot run."""


@grpc_status(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_NO_MATCHING_ENGINE, _PROFILE)
class NoMatchingEngineError(SpeculationError):
    """A profile matches no introduced engine; the message names the field that differs."""


@grpc_status(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_INVALID_REQUEST)
class InvalidQuestionError(SpeculationError):
    """A request has an invalid or impossible argument."""


@grpc_status(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_REQUEST_ID_REUSED)
class RequestIdReusedError(SpeculationError):
    """A request has the id of an earlier one but different content."""


@grpc_status(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_UNREADABLE_REQUEST)
class UnreadableRequestError(SpeculationError):
    """A request cannot be parsed as a message of its call."""


@grpc_status(StatusCode.INVALID_ARGUMENT, errors_pb2.ERROR_REASON_TOO_MANY_REPORTS)
class TooManyReportsError(SpeculationError):
    """A message has too many reports."""


@grpc_status(StatusCode.DEADLINE_EXCEEDED, errors_pb2.ERROR_REASON_SILENT_CLIENT)
class SilentClientError(SpeculationError):
    """A client opens a call and does not send its first message in time."""


@grpc_status(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_SLOW_CLIENT)
class SlowClientError(SpeculationError):
    """A client reads so slowly that its answers pile up."""


@grpc_status(StatusCode.INTERNAL, errors_pb2.ERROR_REASON_PROFILE_NOT_SAVED, _PROFILE)
class ProfileNotSavedError(SpeculationError):
    """The profile directory cannot be written."""


@grpc_status(StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_PROFILE_NOT_FOUND, _PROFILE)
class NoProfileError(SpeculationError):
    """The store has no such profile."""


@grpc_status(StatusCode.NOT_FOUND, errors_pb2.ERROR_REASON_OVERRIDE_NOT_FOUND, _OVERRIDE)
class NoOverrideError(SpeculationError):
    """No such override is in force."""


class PolicyNotClearedError(NoOverrideError):
    """The id belongs to file-based policy, which only a change of its file can end."""


@grpc_status(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_OVERRIDES)
class TooManyOverridesError(SpeculationError):
    """There are more overrides than a sidecar can have in force."""


@grpc_status(StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_OVERRIDE_EXISTS, _OVERRIDE)
class OverrideExistsError(SpeculationError):
    """The id of a new override is in use, or was used before."""


@grpc_status(StatusCode.ABORTED, errors_pb2.ERROR_REASON_OVERRIDE_CHANGED, _OVERRIDE)
class OverrideChangedError(SpeculationError):
    """The override has changed since the caller read it."""


@grpc_status(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_NO_EFFECT, _OVERRIDE)
class NoEffectError(SpeculationError):
    """The override would have no effect on this sidecar's engines, but the caller requires one."""


@grpc_status(StatusCode.PERMISSION_DENIED, errors_pb2.ERROR_REASON_FORBIDDEN, _ENGINE)
class ForbiddenError(SpeculationError):
    """The caller does not have the right to do this."""


@grpc_status(StatusCode.UNAUTHENTICATED, errors_pb2.ERROR_REASON_UNAUTHENTICATED)
class UnauthenticatedError(SpeculationError):
    """The caller cannot be identified."""


@grpc_status(StatusCode.RESOURCE_EXHAUSTED, errors_pb2.ERROR_REASON_TOO_MANY_CALLS)
class TooManyCallsError(SpeculationError):
    """There are more calls than this sidecar accepts."""


@grpc_status(StatusCode.FAILED_PRECONDITION, errors_pb2.ERROR_REASON_CANNOT_TRAIN, _ENGINE)
class CannotTrainError(SpeculationError):
    """The engine stores no training signals, or cannot load new versions of its drafter."""


@grpc_status(StatusCode.ALREADY_EXISTS, errors_pb2.ERROR_REASON_TRAINER_ATTACHED, _ENGINE)
class TrainerAttachedError(SpeculationError):
    """Another trainer is attached to the engine."""


class SidecarFailedError(SpeculationError):
    """The sidecar failed in a call; only the log has the error, the client gets no details."""


class StartRefusedError(SpeculationError):
    """The sidecar cannot start with its settings."""


class AddressTakenError(StartRefusedError):
    """A socket or port cannot be bound."""


@grpc_status(StatusCode.UNAVAILABLE, errors_pb2.ERROR_REASON_SHUTTING_DOWN)
class ShuttingDownError(SpeculationError):
    """The sidecar is shutting down."""


def error_kind_of(error: SpeculationError) -> ErrorKind:
    """Returns the status and reason of an error; INTERNAL_ERROR_KIND for a class not listed."""
    return next(
        (
            ERROR_KINDS[error_class]
            for error_class in type(error).__mro__
            if error_class in ERROR_KINDS
        ),
        INTERNAL_ERROR_KIND,
    )


def status_code_of(error: SpeculationError) -> grpc.StatusCode:
    """Returns the gRPC status code of an error."""
    return error_kind_of(error).status


def error_text(error: SpeculationError) -> str:
    """Returns the error's text, truncated to fit a status or a rejection."""
    return truncate(str(error), _MESSAGE_MAX)


def truncate(text: str, characters_max: int) -> str:
    """Truncates a text to `characters_max` characters, and to twice as many bytes."""
    if len(text) > characters_max:
        text = text[: characters_max - 1] + "…"
    data = text.encode(errors="replace")
    if len(data) <= 2 * characters_max:
        return text
    return data[: 2 * characters_max - 3].decode(errors="ignore") + "…"


def status_message(error: SpeculationError) -> status_pb2.Status:
    """Returns the status of an error with ErrorInfo, and with BadRequest and ResourceInfo if any.

    For an error that is not listed the client gets a general text, because its own text may name
    internals.
    """
    kind = error_kind_of(error)
    text = _FAILED_TEXT if kind is INTERNAL_ERROR_KIND else error_text(error)
    info = error_details_pb2.ErrorInfo(
        reason=errors_pb2.ErrorReason.Name(kind.reason).removeprefix(_PREFIX),
        domain=DOMAIN,
        metadata={name: truncate(fact, _NAME_MAX) for name, fact in error.facts.items()},
    )
    details: list[Any] = [info]
    if kind.status in _FIELD_ERROR_STATUSES and error.field_path:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=truncate(error.field_path, _NAME_MAX),
            description=truncate(text, _DESCRIPTION_MAX),
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if kind.resource_type and error.resource:
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=kind.resource_type, resource_name=truncate(error.resource, _NAME_MAX)
            )
        )
    return status_pb2.Status(code=kind.status.value[0], message=text, details=map(_pack, details))


def _pack(detail: Any) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


async def abort(context: Context, error: SpeculationError) -> Never:
    """Ends the call with the error's status, message and details.

    Clients of earlier versions read the error's name from `speculation-error`.
    """
    kind, status = error_kind_of(error), status_message(error)
    metadata = (
        ("speculation-error", type(error).__name__),
        ("grpc-status-details-bin", status.SerializeToString()),
    )
    await context.abort(kind.status, status.message, metadata)

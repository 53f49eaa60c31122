"""Defines the errors of calls, made from the google.rpc error details that a sidecar sends.

Errors of older sidecars, and of gRPC itself, have no details: `reason` is empty, and the class
follows from the status.
"""

from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from controller.client.channels import connection_failure_reason
from controller.core.errors import SpeculationError
from controller.util.sockets import permission_denied_reason

_DOMAIN: Final = "speculation.v1"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """The error of one field of a request.  field: its path, such as `override.scope`."""

    field: str
    description: str


class CallError(SpeculationError):
    """A call that failed.

    status: gRPC's.  reason: the name of a value of `ErrorReason` without its prefix, "" if unknown.
    violations: the fields that are wrong.  resource_type, resource: what the error is about, both
    "" if that is unknown.  facts: metadata of the reason (proto/speculation/v1/errors.proto).
    """

    status: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str = ""
    violations: tuple[FieldViolation, ...] = ()
    resource_type: str = ""


class InvalidRequestError(CallError):
    """The request is not valid; `violations` names the fields."""


class NotFoundError(CallError):
    """The engine, override or profile does not exist; `resource_type` says which of them."""


class AlreadyExistsError(CallError):
    """The id is, or was, in use; `facts["etag"]` has the etag of the existing resource."""


class OverrideChangedError(CallError):
    """The override has changed since the caller read it; `facts["etag"]` has its newest etag."""


class PreconditionError(CallError):
    """The call needs another action first."""


class NoEffectError(PreconditionError):
    """The override would have no effect on the engines of this sidecar, and was not set."""


class AccessDeniedError(CallError):
    """The caller lacks the permission, or could not be authenticated."""


class OverloadedError(CallError):
    """A limit of the sidecar is reached."""


class UnavailableError(CallError):
    """The sidecar does not answer, or is shutting down, and retries did not help."""


class StoreUnavailableError(UnavailableError):
    """The store of overrides and profiles cannot be written now."""


class DeadlineExceededError(CallError):
    """No answer came in time."""


class UnsupportedError(CallError):
    """The sidecar is too old for this call."""


_BY_REASON: Final[dict[str, type[CallError]]] = {
    "NO_EFFECT": NoEffectError,
    "STORE_UNAVAILABLE": StoreUnavailableError,
}
_BY_STATUS: Final[dict[grpc.StatusCode, type[CallError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.ABORTED: OverrideChangedError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
}


def call_error(address: str, failed: grpc.RpcError) -> CallError:
    """Makes the error of a failed call."""
    status: grpc.StatusCode = failed.code()
    parts = _details(failed)
    info, resource = parts.get("ErrorInfo"), parts.get("ResourceInfo")
    reason = info.reason if info is not None and info.domain == _DOMAIN else ""
    kind = _BY_REASON.get(reason) or _BY_STATUS.get(status, CallError)
    violations = tuple(
        FieldViolation(violation.field, violation.description)
        for violation in (parts["BadRequest"].field_violations if "BadRequest" in parts else ())
    )
    error = kind(
        _error_text(address, failed),
        field_path=violations[0].field if violations else "",
        resource=resource.resource_name if resource is not None else "",
        facts=info.metadata if info is not None else None,
    )
    error.status, error.reason, error.violations = status, reason, violations
    error.resource_type = resource.resource_type if resource is not None else ""
    return error


def _error_text(address: str, failed: grpc.RpcError) -> str:
    details: str = failed.details() or failed.code().name
    # Every sidecar names its errors, even an older one that sends no details.
    if failed.code() is not grpc.StatusCode.UNAVAILABLE or "speculation-error" in _metadata(failed):
        return details
    if denied_reason := permission_denied_reason(address):
        return f"{address}: {denied_reason}"
    return f"no sidecar answers at {address}: {connection_failure_reason(address, details)}"


def _metadata(failed: grpc.RpcError) -> dict[str, Any]:
    entries: Any = failed.trailing_metadata() or ()
    return dict(entries)


def _details(failed: grpc.RpcError) -> dict[str, Any]:
    """Returns the details of a status by the names of their messages; unknown ones are left out."""
    details: dict[str, Any] = {}
    data = _metadata(failed).get("grpc-status-details-bin", b"")
    try:
        for packed in status_pb2.Status.FromString(data).details:
            kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2], None)
            part = None if kind is None else kind()
            if part is not None and packed.Unpack(part):
                details[type(part).__name__] = part
    except DecodeError:
        # Not from a sidecar: the status code has to do.
        return {}
    return details

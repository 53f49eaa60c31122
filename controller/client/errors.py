"""Defines the errors of calls, made from what a sidecar says of them in google.rpc's words.

A sidecar from before these details, and gRPC itself, say no more than the status: `reason` is
empty then, and the class follows from the status.
"""

from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from controller.client.channels import why_silent
from controller.core.errors import SpeculationError
from controller.util.sockets import why_denied

_DOMAIN: Final = "speculation.v1"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """Describes what is wrong with a field of a request, whose path is as in `override.scope`."""

    field: str
    description: str


class CallError(SpeculationError):
    """A call that failed.

    status: gRPC's.  reason: the name of a value of `ErrorReason` without its prefix, "" if unknown.
    violations: the fields that are wrong.  resource_type, resource: what the error is about, both
    "" if that is unknown.  facts: what the reason brings along (proto/speculation/v1/errors.proto).
    """

    status: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str = ""
    violations: tuple[FieldViolation, ...] = ()
    resource_type: str = ""


class InvalidRequestError(CallError):
    """The request cannot be what it is; `violations` says where."""


class NotFoundError(CallError):
    """There is no such engine, override or profile; `resource_type` says which of them."""


class AlreadyExistsError(CallError):
    """The id is taken, or was; `facts["etag"]` has the etag of what has it."""


class OverrideChangedError(CallError):
    """The override is not what the caller has seen; `facts["etag"]` has the newest etag."""


class PreconditionError(CallError):
    """Something else has to be done first."""


class NoEffectError(PreconditionError):
    """The override would do nothing to the engines of this sidecar, and is not set."""


class AccessDeniedError(CallError):
    """The caller may not do this, or the sidecar does not know who calls."""


class OverloadedError(CallError):
    """A limit of the sidecar is reached."""


class UnavailableError(CallError):
    """The sidecar does not answer, or is going away, and repeating the call did not help."""


class StoreUnavailableError(UnavailableError):
    """The store behind overrides and profiles takes nothing now."""


class DeadlineExceededError(CallError):
    """No answer came in time."""


class UnsupportedError(CallError):
    """The sidecar is older than this call."""


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


def error_of(address: str, failed: grpc.RpcError) -> CallError:
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
        _text(address, failed),
        field_path=violations[0].field if violations else "",
        resource=resource.resource_name if resource is not None else "",
        facts=info.metadata if info is not None else None,
    )
    error.status, error.reason, error.violations = status, reason, violations
    error.resource_type = resource.resource_type if resource is not None else ""
    return error


def _text(address: str, failed: grpc.RpcError) -> str:
    details: str = failed.details() or failed.code().name
    # Every sidecar names its errors, also one from before the details.
    if failed.code() is not grpc.StatusCode.UNAVAILABLE or "speculation-error" in _metadata(failed):
        return details
    if denied := why_denied(address):
        return f"{address}: {denied}"
    return f"no sidecar answers at {address}: {why_silent(address, details)}"


def _metadata(failed: grpc.RpcError) -> dict[str, Any]:
    found: Any = failed.trailing_metadata() or ()
    return dict(found)


def _details(failed: grpc.RpcError) -> dict[str, Any]:
    """Returns the details of a status by the names of their messages; unknown ones are left out."""
    found: dict[str, Any] = {}
    data = _metadata(failed).get("grpc-status-details-bin", b"")
    try:
        for packed in status_pb2.Status.FromString(data).details:
            kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2], None)
            part = None if kind is None else kind()
            if part is not None and packed.Unpack(part):
                found[type(part).__name__] = part
    except DecodeError:
        # Not from a sidecar: the status code says enough.
        return {}
    return found

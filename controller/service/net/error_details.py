"""Ends calls with errors that programs can act on: google.rpc.Status with its details.

The details are bounded, so that they fit into the metadata that every gRPC client takes (8 KiB).
"""

from typing import Any, Final, Never

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from controller.core.errors import SpeculationError
from controller.service.net.errors import FAILED, cut, kind_of, message_of
from speculation.v1 import errors_pb2

DOMAIN: Final = "speculation.v1"
_PREFIX = "ERROR_REASON_"
# Characters of a name or a fact, and of the description of a field.
_NAME_MAX, _DESCRIPTION_MAX = 128, 250
_FAILED_TEXT = "the sidecar failed at this call: its log has the error"
_ABOUT_A_FIELD = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})


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


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SpeculationError) -> Never:
    """Ends the call with the error's status, message and details.

    Clients of earlier versions read the error's name from `speculation-error`.
    """
    kind, status = kind_of(error), status_message(error)
    metadata = (
        ("speculation-error", type(error).__name__),
        ("grpc-status-details-bin", status.SerializeToString()),
    )
    await context.abort(kind.status, status.message, metadata)

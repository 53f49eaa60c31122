"""Reads the details of a failed call as a client of another language would: with google.rpc."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from tests.support.service_harness import with_timeout


@dataclass(frozen=True)
class Failure:
    """field: of the first violation.  resource: its type and name."""

    status: grpc.StatusCode
    reason: str
    field: str
    resource: tuple[str, str] | None
    facts: dict[str, str]
    message: str


def read_failure(error: grpc.aio.AioRpcError) -> Failure:
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(bytes(metadata["grpc-status-details-bin"]))
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    parts: dict[str, Any] = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])
        part = kind()
        assert packed.Unpack(part)
        assert kind.__name__ not in parts
        parts[kind.__name__] = part
    info = parts.pop("ErrorInfo")
    assert info.domain == "speculation.v1"
    bad_request, resource = parts.pop("BadRequest", None), parts.pop("ResourceInfo", None)
    assert not parts
    return Failure(
        error.code(),
        info.reason,
        bad_request.field_violations[0].field if bad_request else "",
        (resource.resource_type, resource.resource_name) if resource else None,
        dict(info.metadata),
        status.message,
    )


async def failure_details(awaitable: Awaitable[Any]) -> Failure:
    """What a call fails with."""
    try:
        await with_timeout(awaitable)
    except grpc.aio.AioRpcError as error:
        return read_failure(error)
    raise AssertionError("the call succeeded")

"""Calls that are made to the sidecar under attack."""

from collections.abc import Callable
from typing import Any

import grpc

from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    engine_message,
    secret_of,
)

CODE = grpc.StatusCode


def status_of(call: Callable[..., Any], *arguments: Any) -> grpc.StatusCode:
    """OK, or what a call ends with; a stream is read to its end."""
    try:
        answer = call(*arguments, timeout=PATIENCE_SECONDS)
        if hasattr(answer, "__next__"):
            for _ in answer:
                pass
    except grpc.RpcError as error:
        return error.code()
    return CODE.OK


def introduce(channel: grpc.Channel, engine_id: str, **engine: Any) -> str:
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    request = service_pb2.IntroduceRequest(
        engine=engine_message(engine_id, **engine), engine_secret=secret_of(engine_id)
    )
    return stub.Introduce(request, timeout=PATIENCE_SECONDS).session_id


INTRODUCE = "/speculation.v1.SpeculationService/Introduce"

"""Serves grpc.health.v1 on a TCP port of its own, unencrypted, and nothing else.

A kubelet's `grpc` probe calls at the pod's address, without TLS; the sidecar's sockets are files.
Only Check is served: a Watch stays open, and whoever opens many would be in the probes' way.
"""

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2

from controller.service.net import limits
from controller.service.net.request_parsing import Reading

_MESSAGE_BYTES = 4096
_CONNECTIONS = 64
_CALLS = 256


class HealthPort:
    """Answers what the servicer of the sidecar's other sockets answers."""

    def __init__(self, servicer: health.aio.HealthServicer, address: str) -> None:
        """Raises RuntimeError when the address cannot be bound."""
        self._server = grpc.aio.server(
            interceptors=[Reading(_CALLS // 2)],
            options=[
                ("grpc.max_receive_message_length", _MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                *limits.connection_options(_CONNECTIONS),
            ],
            maximum_concurrent_rpcs=_CALLS,
        )
        check = grpc.unary_unary_rpc_method_handler(
            servicer.Check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),)
        )
        self._server.add_insecure_port(address)

    async def open(self) -> None:
        """Begins to answer."""
        await self._server.start()

    async def close(self) -> None:
        """Ends at once."""
        await self._server.stop(0)

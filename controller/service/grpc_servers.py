"""Serves gRPC to engines, to operators and on TCP, each with a separate server and guard.

A server identifies its own callers only, and the calls of one server never wait for those of
another.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2

from controller.service.net import limits, tcp, unix_sockets
from controller.service.net.access import (
    AccessList,
    Identify,
    identify_engines_socket_caller,
    operators_socket_identifier,
    tcp_identifier,
)
from controller.service.net.errors import AddressTakenError, StartRefusedError
from controller.service.net.guard import Guard
from controller.service.net.request_parsing import RequestReaderInterceptor
from controller.service.net.unix_sockets import OperatorSocket
from controller.service.sessions.session import EngineSession
from controller.service.views.readiness import SERVICES
from controller.settings.settings import Settings
from controller.util.files import POLL_SECONDS

# Time for unary calls to end once the streams are closed; health watches are cancelled after it.
_LAST_GRACE_SECONDS = 0.2
# Limits of the health port: bytes of a message, connections, and concurrent calls.
_HEALTH_MESSAGE_BYTES = 4096
_HEALTH_CONNECTIONS_MAX = 64
_HEALTH_CALLS_MAX = 256

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class GrpcServers:
    """Binds, starts and stops the servers.  add_services: adds all servicers to a server."""

    settings: Settings
    operator_socket: OperatorSocket
    add_services: Callable[[grpc.aio.Server], None]

    def __post_init__(self) -> None:
        self._access: AccessList | None = None
        # The version of the access list by which open streams were last checked.
        self._checked_version = 0
        self._interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
        self._servers: list[grpc.aio.Server] = []
        self._guards: list[Guard] = []

    def bind(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        """Binds all addresses.  interceptors: they run after the guard.

        Raises StartRefusedError, AddressTakenError and the errors of the access list.
        """
        settings, path = self.settings, self.settings.socket_path
        self._access = access = self._make_access()
        self._checked_version = 0 if access is None else access.version
        self._interceptors = interceptors
        engines_server = self._make_server(identify_engines_socket_caller)
        operators_server = self._make_server(
            operators_socket_identifier(self.operator_socket, access)
        )
        if settings.channelz:
            # It shows every connection, so it is for callers on this machine only.
            _add_channelz(engines_server, operators_server)
        try:
            with (
                unix_sockets.claim_path(path),
                self.operator_socket.bind_inner_socket() as inner_path,
            ):
                engines_server.add_insecure_port(f"unix:{path}")
                operators_server.add_insecure_port(f"unix:{inner_path}")
        except (RuntimeError, OSError) as error:
            raise AddressTakenError(f"{path} cannot be bound: {error}") from error
        if settings.tcp is not None:
            tcp.bind(self._make_server(tcp_identifier(access)), settings.tcp, settings, access)

    def _make_access(self) -> AccessList | None:
        path = self.settings.access
        if path is None:
            return None
        return AccessList(path, partial(tcp.require_no_unencrypted_token, self.settings))

    def _make_server(self, identify: Identify) -> grpc.aio.Server:
        calls_max = self.settings.max_open_calls
        guard = Guard(identify, str(self.operator_socket.path), calls_max // 4)
        server = grpc.aio.server(
            interceptors=[guard, *self._interceptors],
            options=limits.server_options(self.settings),
            maximum_concurrent_rpcs=calls_max,
        )
        self._servers.append(server)
        self._guards.append(guard)
        self.add_services(server)
        if self.settings.reflection:
            from controller.service.net import reflection  # noqa: PLC0415  # only when asked for

            reflection.add_reflection(server, (*SERVICES, health.SERVICE_NAME))
        return server

    async def start(self) -> None:
        """Begins to serve.  Raises SocketTakenError."""
        for server in self._servers:
            await server.start()
        await self.operator_socket.open()

    async def stop(self, sessions: Iterable[EngineSession]) -> None:
        """Stops once the streams of these sessions are closed, or when the drain time is over."""
        if not self._servers:
            return
        drain_seconds = self.settings.drain_seconds
        try:
            async with asyncio.timeout(drain_seconds):
                await asyncio.gather(*(session.wait_until_streams_closed() for session in sessions))
        except TimeoutError:
            streams = sum(session.open_streams for session in sessions)
            _log.warning("drain_ran_out", streams=streams, drain_seconds=drain_seconds)
        grace = min(_LAST_GRACE_SECONDS, drain_seconds)
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        await self.operator_socket.close()
        self._servers, self._guards = [], []

    @property
    def has_access_list(self) -> bool:
        """Whether `watch_access` has something to watch."""
        return self._access is not None

    async def watch_access(self) -> None:
        """Reads the access list periodically, and ends streams that it no longer allows.

        Runs until cancelled.
        """
        assert self._access is not None
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self._access.reload_if_changed)
            version = self._access.version
            if version != self._checked_version:
                for guard in self._guards:
                    guard.recheck_streams()
                self._checked_version = version


def _add_channelz(*servers: grpc.aio.Server) -> None:
    """Adds the channelz service.  Raises StartRefusedError without its package."""
    try:
        from grpc_channelz.v1 import channelz  # noqa: PLC0415  # only when asked for
    except ImportError as error:
        raise StartRefusedError(
            "channelz needs a package: pip install 'speculation-controller[channelz]'"
        ) from error
    for server in servers:
        channelz.add_channelz_servicer(server)


class HealthPort:
    """Serves grpc.health.v1 on a TCP port of its own, unencrypted, and nothing else.

    A kubelet's `grpc` probe calls the pod's address without TLS, and the sidecar's sockets are
    files.  This port answers with the health servicer of the other sockets.  It serves only Check:
    a Watch stays open, and many of them would block the probes.
    """

    def __init__(self, servicer: health.aio.HealthServicer, address: str) -> None:
        """Raises RuntimeError when the address cannot be bound."""
        self._server = grpc.aio.server(
            interceptors=[RequestReaderInterceptor(_HEALTH_CALLS_MAX // 2)],
            options=[
                ("grpc.max_receive_message_length", _HEALTH_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                *limits.connection_options(_HEALTH_CONNECTIONS_MAX),
            ],
            maximum_concurrent_rpcs=_HEALTH_CALLS_MAX,
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
        """Begins to serve."""
        await self._server.start()

    async def close(self) -> None:
        """Stops the server without a grace period."""
        await self._server.stop(0)

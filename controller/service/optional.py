"""What is only loaded where it is asked for: the fleet's Redis, OpenTelemetry, channelz."""

from typing import Protocol

import grpc.aio

from controller.core.plan import Plan
from controller.service.net.errors import StartRefusedError
from controller.service.sessions.session import EngineSession
from controller.settings.settings import Settings
from controller.store.file_store import FileStore
from controller.store.interface import Store


class Tracing(Protocol):
    """What the sidecar asks of `tracing.Tracing`."""

    def decision(self, session: EngineSession, before: Plan, began: int) -> None:
        """For `EngineSession.on_decision`."""
        ...

    @property
    def interceptor(self) -> grpc.aio.ServerInterceptor:
        """For the server."""
        ...

    def close(self) -> None:
        """Blocks, for a few seconds at most."""
        ...


def make_store(settings: Settings) -> Store:
    """Redis where one is named, else files.  Raises RedisUrlError."""
    directory = settings.state_path
    if settings.redis_url is None:
        return FileStore(directory)
    from controller.store.redis_store import RedisStore  # noqa: PLC0415  # only when asked for

    return RedisStore(
        settings.redis_url.get_secret_value(),
        directory / "fleet.json",
        namespace=settings.redis_namespace,
        password_file=settings.redis_password_file,
        replicas=settings.redis_replicas,
    )


def make_telemetry(settings: Settings) -> Tracing | None:
    """Where a collector is named.  Raises StartRefusedError without the packages."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from controller.service import tracing  # noqa: PLC0415  # only when asked for
    except ImportError as error:
        raise StartRefusedError(
            f"a collector is named ({settings.otlp_endpoint}), but {error.name} is not installed: "
            "pip install 'speculation-controller[otel]'"
        ) from error
    made = tracing.Tracing(settings.otlp_endpoint, settings.otlp_trace_ratio)
    if settings.otlp_logs:
        made.send_logs()
    return made


def add_channelz(server: grpc.aio.Server) -> None:
    """Raises StartRefusedError without the package."""
    try:
        from grpc_channelz.v1 import channelz  # noqa: PLC0415  # only when asked for
    except ImportError as error:
        raise StartRefusedError(
            "channelz needs a package: pip install 'speculation-controller[channelz]'"
        ) from error
    channelz.add_channelz_servicer(server)

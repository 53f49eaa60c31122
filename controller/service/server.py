"""Starts, runs and stops the sidecar's process, and connects its parts.

Start: profiles -> servicers, health, reflection -> socket -> metrics -> SERVING.
Stop: NOT_SERVING -> sessions end, their streams close (bounded) -> socket file removed.
"""

import asyncio
import functools
import gc
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2_grpc

import controller
from controller.core.acceptance import warm_start
from controller.core.clock import Clock, WallClock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import EngineSpec
from controller.core.errors import SpeculationError
from controller.core.plan import Plan
from controller.recording.recorder import Recorder
from controller.service.grpc_servers import GrpcServers, HealthPort
from controller.service.metrics.server import MetricsServer, SidecarCollector
from controller.service.net.errors import AddressTakenError, ShuttingDownError, StartRefusedError
from controller.service.net.limits import WAITING_READS_MAX, FairQueue
from controller.service.net.unix_sockets import OperatorSocket
from controller.service.reload import Reloader
from controller.service.rpc.inspection import InspectionServicer
from controller.service.rpc.overrides import PolicyServicer
from controller.service.rpc.profiling import ProfilingServicer
from controller.service.rpc.request_ids import RequestIds
from controller.service.rpc.steering import SpeculationServicer
from controller.service.rpc.training import TrainingServicer
from controller.service.sessions.registry import LOAD_CHECK_SECONDS, CoreFactory, SessionRegistry
from controller.service.sessions.session import EngineSession, SessionObserver
from controller.service.state.audit_log import AuditLog
from controller.service.state.fleet_estimates import FleetEstimates
from controller.service.state.fleet_profiles import FleetProfiles
from controller.service.state.override_registry import OverrideRegistry
from controller.service.state.policy_watch import PolicyWatch
from controller.service.state.profile_registry import ProfileRegistry
from controller.service.state.training_state import TrainingStateFiles
from controller.service.views.fleet_view import FleetView
from controller.service.views.page_server import PageServer
from controller.service.views.readiness import Readiness
from controller.service.views.status_cache import StatusCache
from controller.settings.redis_settings import redis_access
from controller.settings.settings import Settings
from controller.store.file_store import FileStore
from controller.store.interface import Store
from controller.util.tasks import Supervisor, Work
from speculation.v1 import policy_pb2_grpc, service_pb2_grpc, training_pb2_grpc

if TYPE_CHECKING:
    from controller.service.tracing import Tracing

_EXPIRE_SECONDS = 15.0

_log = structlog.get_logger(__name__)


class Sidecar(SessionObserver):
    """Runs one sidecar: `async with Sidecar(settings)` serves inside the block.

    clock and core_factory: for tests and simulations; wall time and EngineController by default.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        core_factory: CoreFactory | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or WallClock()
        self.profiles = ProfileRegistry(settings.profile_directory)
        self.registry = SessionRegistry(
            core_factory or self._make_core,
            self.profiles,
            self._clock,
            settings.max_engines,
            settings.session_idle_seconds,
            self,
        )
        self.store = store = _make_store(settings)
        self.override_registry = OverrideRegistry(store, self.registry)
        self._audit = AuditLog(store)
        self._policy_watch = PolicyWatch(
            settings.policy, settings.state_path, self.override_registry, self._audit
        )
        self._fleet_profiles = FleetProfiles(store.blobs, self.profiles, self.registry)
        self._fleet_estimates = FleetEstimates(store.blobs, self.registry)
        self._training_files = TrainingStateFiles(settings.state_path / "training", self.registry)
        self._recorder = self._make_recorder()
        self.operator_socket = OperatorSocket(settings.socket_path, settings.operators_directory)
        self.supervisor = Supervisor()
        self._readiness = Readiness(
            self.registry,
            self.profiles,
            self.override_registry,
            self.operator_socket,
            settings.ready_with,
            self.supervisor,
        )
        self._status_cache = StatusCache(
            self.registry, self.override_registry, self._readiness, self._clock
        )
        self._request_ids = RequestIds()
        self._fleet_view = FleetView(store.summaries, self._status_cache, self._clock)
        self._policy_servicer = PolicyServicer(
            self.override_registry,
            self._request_ids,
            settings.override_default_seconds,
            settings.override_max_seconds,
        )
        self._reloader = Reloader(
            self.registry, self.profiles, self._readiness, self._policy_servicer
        )
        self._health_port: HealthPort | None = None
        self._servers = GrpcServers(settings, self.operator_socket, self._add_services)
        self._metrics: MetricsServer | None = None
        self._page: PageServer | None = None
        self._tracing: Tracing | None = None

    def _make_core(self, spec: EngineSpec, profile: Profile | None) -> EngineController:
        settings = self._settings
        create_core = EngineController if self._recorder is None else self._recorder.create_core
        return create_core(
            spec, settings.planner, profile, self._clock, settings.training,
            overrides=self.override_registry.active(),
            training_state=self._training_files.load(spec),
        )  # fmt: skip

    def _make_recorder(self) -> Recorder | None:
        directory = self._settings.record_directory
        if directory is None:
            return None
        limit = self._settings.record_megabytes * 1_000_000
        return Recorder(directory, limit, self.override_registry.ends_at)

    def on_session_opened(
        self, session: EngineSession, previous_session: EngineSession | None
    ) -> None:
        """Looks for a profile and acceptance estimates for a new session, in the background."""
        if not session.core.profile_id:
            self._fleet_profiles.search_for(session)
        if previous_session is not None and not session.identity.has_same_secret(
            previous_session.identity
        ):
            self._audit.record_replaced_session(session, previous_session)
        is_same_engine = previous_session is not None and session.identity.is_same(
            previous_session.identity
        )
        if previous_session is not None and is_same_engine:
            session.continue_checks(previous_session)
        if not self._settings.warm_start:
            return
        if previous_session is not None and previous_session.core.reports and is_same_engine:
            snapshots = warm_start.pool_snapshots(
                (snapshot, 0.0) for snapshot in previous_session.core.acceptance_snapshots()
            )
            session.warm_start_from(snapshots, "this engine's session before")
        else:
            self._fleet_estimates.search_for(session)

    def before_planning(self) -> None:
        """Ends the overrides that have expired."""
        self.override_registry.expire_overrides()

    def on_plan_changed(
        self, session: EngineSession, previous_plan: Plan, began_unix_ns: int
    ) -> None:
        """Traces the decision."""
        if self._tracing is not None:
            self._tracing.record_decision(session, previous_plan, began_unix_ns)

    def on_session_ended(self, session: EngineSession) -> None:
        """Publishes what a session has learnt, and cancels its searches."""
        self._fleet_profiles.searches.cancel(session)
        self._fleet_estimates.searches.cancel(session)
        self._fleet_estimates.publish(session)
        self._training_files.save_final(session)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when the sidecar is SERVING.

        Raises StartRefusedError, SocketTakenError, ProfileFileError, PolicyFileError, StoreError.
        After an error nothing is left running.
        """
        settings = self._settings
        self.profiles.load(settings.profiles)
        await self._readiness.update_servicer()
        self._tracing = _make_tracing(settings)
        try:
            self._servers.bind([self._tracing.interceptor] if self._tracing else [])
            self._bind_health()
            await self.override_registry.open()
            await self._policy_watch.open()
            if self._recorder is not None:
                self._recorder.open()
            if settings.metrics_port:
                self._metrics = self._serve_metrics()
            if settings.page_port:
                self._page = PageServer(
                    self._status_cache,
                    self._fleet_view,
                    asyncio.get_running_loop(),
                    settings.listener("page"),
                )
            await self._servers.start()
            if self._health_port is not None:
                await self._health_port.open()
        except SpeculationError:
            await self.stop()
            raise
        for name, work in self._tasks():
            self.supervisor.run(name, work)
        await self._readiness.finish_start()
        _log.info(
            "serving",
            version=controller.__version__,
            address=settings.address,
            operators=f"unix:{self.operator_socket.path}",
            tcp=settings.tcp,
            health_port=settings.health_port or None,
            metrics_port=settings.metrics_port or None,
            page_port=settings.page_port or None,
            profiles=len(self.profiles),
        )
        if not len(self.profiles):
            _log.warning(
                "no_profile",
                detail="costs come from a prior that live steps correct; measure a profile with "
                "`controller profile`, or name one with --profile",
            )

    async def stop(self) -> None:
        """Stops everything that `start` has started, within the drain time."""
        await self.supervisor.stop()
        await self._readiness.stop_serving()
        sessions = list(self.registry)
        self.registry.close(
            ShuttingDownError("the sidecar is shutting down"), self._settings.last_lease_seconds
        )
        await self._servers.stop(sessions)
        await self._request_ids.close()
        if self._page is not None:
            await asyncio.to_thread(self._page.close)
        await self._fleet_view.close()
        await self._fleet_estimates.close()
        await self._audit.close()
        await self.override_registry.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if self._health_port is not None:
            await self._health_port.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        self._metrics = self._page = self._health_port = self._tracing = None

    async def run(self, read_settings: Callable[[], Settings] | None = None) -> None:
        """Serves until SIGTERM or SIGINT; on SIGHUP, `read_settings` returns the new settings.

        It must run in the main thread of a process that ends afterwards.  Once it has returned,
        these signals are ignored, so that a repeated one does not change the exit status.
        Raises as `start`.
        """
        stop_requested, reload_requested = asyncio.Event(), asyncio.Event()
        handlers = {signal.SIGTERM: stop_requested.set, signal.SIGINT: stop_requested.set}
        if read_settings is not None:
            handlers[signal.SIGHUP] = reload_requested.set
        for number, callback in handlers.items():
            _call_on_signal(number, callback)
        try:
            async with self:
                if read_settings is not None:
                    reload = functools.partial(self._reload, reload_requested, read_settings)
                    self.supervisor.run("reload", reload)
                # The objects made so far live until the end: full collections can skip them.
                gc.collect()
                gc.freeze()
                await stop_requested.wait()
                _log.info("stopping", engines=len(self.registry))
            _log.info("stopped")
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)

    async def _reload(
        self, reload_requested: asyncio.Event, read_settings: Callable[[], Settings]
    ) -> None:
        while True:
            await reload_requested.wait()
            reload_requested.clear()
            self._settings = await self._reloader.reload(self._settings, read_settings)

    def _tasks(self) -> Iterator[tuple[str, Work]]:
        """Yields the tasks that run for as long as the sidecar serves, by name.

        `readiness` lists the services that depend on each task.
        """
        yield "readiness", self._readiness.watch
        yield "expiry", self._expire_sessions
        yield "load", self._watch_load
        if self._servers.has_access_list:
            yield "access_list", self._servers.watch_access
        yield "overrides", self.override_registry.run
        yield from self.store.tasks.items()
        if self._settings.policy is not None:
            yield "policy_file", self._policy_watch.watch
        yield "audit_counts", self._audit.record_counts
        yield "profile_searches", self._fleet_profiles.searches.run
        yield "estimate_searches", self._fleet_estimates.searches.run
        yield "estimates", self._fleet_estimates.publish_all
        yield "training_state", self._training_files.watch
        yield "status", self._status_cache.run
        if self.store.summaries is not None:
            yield "fleet_summary", self._fleet_view.publisher.publish
        if self._recorder is not None:
            yield "recorder", self._recorder.supervise
        if self._metrics is not None:
            yield "metrics_server", self._metrics.watch_thread
        if self._page is not None:
            yield "page_server", self._page.watch_thread

    def _add_services(self, server: grpc.aio.Server) -> None:
        # Each server has its own queue: calls of one server do not wait for those of another.
        read_queue = FairQueue(WAITING_READS_MAX)
        service_pb2_grpc.add_SpeculationServiceServicer_to_server(
            SpeculationServicer(self.registry), server
        )
        service_pb2_grpc.add_InspectionServiceServicer_to_server(
            InspectionServicer(
                self.registry,
                self.override_registry,
                self._readiness,
                self._status_cache,
                self._fleet_view,
                read_queue,
            ),
            server,
        )
        service_pb2_grpc.add_ProfilingServiceServicer_to_server(
            ProfilingServicer(
                self.registry,
                self.profiles,
                self._fleet_profiles,
                self._audit,
                self._request_ids,
                read_queue,
            ),
            server,
        )
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(self._policy_servicer, server)
        training_pb2_grpc.add_TrainingServiceServicer_to_server(
            TrainingServicer(self.registry, self._training_files), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._readiness.servicer, server)

    def _bind_health(self) -> None:
        listener = self._settings.listener("health")
        if not listener.port:
            return
        try:
            self._health_port = HealthPort(self._readiness.servicer, listener.address)
        except RuntimeError as error:
            raise AddressTakenError(
                f"{listener.address} cannot be bound (in use?): name another port with "
                "--health-port"
            ) from error

    def _serve_metrics(self) -> MetricsServer:
        collector = SidecarCollector(
            self.registry, self.override_registry, self._fleet_view, self.supervisor,
            asyncio.get_running_loop(),
        )  # fmt: skip
        return MetricsServer(collector, self._settings.listener("metrics"))

    async def _expire_sessions(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            self.registry.expire()

    async def _watch_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_CHECK_SECONDS)
            self.registry.load_monitor.check(self.registry)


def _call_on_signal(number: signal.Signals, callback: Callable[[], None]) -> None:
    """Calls `callback` on the running event loop when a signal arrives.

    `loop.add_signal_handler` is not used: a loop that closes restores the default handler, by which
    the signal would kill the process.
    """
    loop = asyncio.get_running_loop()
    signal.signal(number, lambda *_: loop.call_soon_threadsafe(callback))


def _make_store(settings: Settings) -> Store:
    """Makes the store: in Redis if a URL is set, else in files.  Raises RedisUrlError."""
    directory = settings.state_path
    if settings.redis_url is None:
        return FileStore(directory)
    from controller.store.redis_store import RedisStore  # noqa: PLC0415  # only when asked for

    return RedisStore(
        settings.redis_url.get_secret_value(),
        directory / "fleet.json",
        namespace=settings.redis_namespace,
        access=redis_access(settings),
        replicas=settings.redis_replicas,
    )


def _make_tracing(settings: Settings) -> "Tracing | None":
    """Makes the exporter if a collector is set.  Raises StartRefusedError without the packages."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from controller.service.tracing import Tracing  # noqa: PLC0415  # only when asked for
    except ImportError as error:
        raise StartRefusedError(
            f"a collector is set ({settings.otlp_endpoint}), but {error.name} is not installed: "
            "pip install 'speculation-controller[otel]'"
        ) from error
    tracing = Tracing(settings.otlp_endpoint, settings.otlp_trace_ratio)
    if settings.otlp_logs:
        tracing.send_logs()
    return tracing

"""Serves `/metrics`, with values read from the sessions at the time of a scrape.

A scrape arrives on the HTTP server's thread.  The values are read on the event loop, which is free
for steering between engines, and the thread writes them out.  An engine's series end with its
session and start from zero with its next one, which `rate()` handles.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import MetricsHandler
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from controller.service.metrics.engines import (
    DECISION_FAMILIES,
    ESTIMATE_FAMILIES,
    LEARNING_FAMILIES,
    LINK_FAMILIES,
    STEP_FAMILIES,
)
from controller.service.metrics.family import MetricFamily, add_samples, samples
from controller.service.metrics.sidecar import SIDECAR_FAMILIES, SidecarSnapshot
from controller.service.net.http_server import CLIENT_TIMEOUT_SECONDS, HttpServer
from controller.service.sessions.registry import SessionRegistry
from controller.service.state.override_registry import OverrideRegistry
from controller.service.views.engine_status import EngineSnapshot
from controller.service.views.fleet_view import FleetView
from controller.settings.listeners import Listener
from controller.util.tasks import Supervisor

_log = structlog.get_logger(__name__)

# A scrape fails if the event loop does not answer within this time; Prometheus reports that.
_SNAPSHOT_SECONDS_MAX = 5.0

ENGINE_FAMILIES: Final[tuple[MetricFamily[EngineSnapshot], ...]] = (
    *DECISION_FAMILIES, *ESTIMATE_FAMILIES, *STEP_FAMILIES, *LINK_FAMILIES, *LEARNING_FAMILIES,
)  # fmt: skip


@dataclass(eq=False, repr=False)
class SidecarCollector(Collector):
    """Collects all metric families."""

    registry: SessionRegistry
    override_registry: OverrideRegistry
    fleet_view: FleetView
    supervisor: Supervisor
    loop: asyncio.AbstractEventLoop

    async def _read_metrics(self) -> list[Metric]:
        sessions, unreadable = list(self.registry), 0
        families = [(family, family.make_empty("engine")) for family in ENGINE_FAMILIES]
        for session in sessions:
            try:
                view = EngineSnapshot.from_session(session)
                sample_lists = [samples(family, view) for family, _ in families]
            except Exception:  # noqa: BLE001  # whatever is wrong with one, others are scraped
                _log.exception("engine_not_scraped", engine=session.engine_id)
                unreadable += 1
                continue
            for (_, metric_family), engine_samples in zip(families, sample_lists, strict=True):
                add_samples(engine_samples, metric_family, session.engine_id)
            await asyncio.sleep(0)
        overrides = [
            overrides
            for overrides in self.override_registry.list_active()
            if not overrides.override.from_file
        ]
        sidecar = SidecarSnapshot(
            sessions, overrides, self.override_registry.policy, self.override_registry.health,
            self.supervisor.states, self.fleet_view.counts, unreadable,
            self.registry.load_monitor.is_overloaded,
        )  # fmt: skip
        sidecar_families = [(family, family.make_empty()) for family in SIDECAR_FAMILIES]
        for sidecar_family, metric_family in sidecar_families:
            add_samples(samples(sidecar_family, sidecar), metric_family)
        return [metric_family for _, metric_family in (*sidecar_families, *families)]

    def collect(self) -> Iterator[Metric]:
        """Yields all families; the HTTP server's thread calls it once per scrape."""
        future = asyncio.run_coroutine_threadsafe(self._read_metrics(), self.loop)
        yield from future.result(_SNAPSHOT_SECONDS_MAX)


class MetricsServer(HttpServer):
    """Serves `/metrics` over HTTP on a separate thread.  Raises AddressTakenError."""

    def __init__(self, collector: SidecarCollector, listener: Listener) -> None:
        metrics = CollectorRegistry()
        metrics.register(collector)
        ProcessCollector(registry=metrics)
        PlatformCollector(registry=metrics)
        super().__init__(listener, _MetricsHandler.factory(metrics), "metrics", "/metrics")


class _MetricsHandler(MetricsHandler):
    """Answers one scrape."""

    server: MetricsServer
    timeout = CLIENT_TIMEOUT_SECONDS
    server_version, sys_version = "controller", ""

    def do_GET(self) -> None:
        """Answers a scrape on any path."""
        if not self.server.accepts_host(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this host is not served here")
            return
        try:
            super().do_GET()
        except TimeoutError:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the sidecar is too busy")
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)

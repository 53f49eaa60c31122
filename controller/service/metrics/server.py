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

from controller.service.metrics.engines import DECISION, ESTIMATES, LEARNING, LINK, STEPS
from controller.service.metrics.family import Family, samples, write
from controller.service.metrics.sidecar import OF_THE_SIDECAR, SidecarSnapshot
from controller.service.net.http_server import SILENCE_SECONDS, HttpServer
from controller.service.sessions.registry import SessionRegistry
from controller.service.state.override_registry import OverrideRegistry
from controller.service.views.engine_status import EngineSnapshot
from controller.service.views.fleet_view import FleetView
from controller.settings.listeners import Listener
from controller.util.tasks import Supervisor

_log = structlog.get_logger(__name__)

# A scrape fails if the event loop does not answer within this time; Prometheus reports that.
_SNAPSHOT_SECONDS_MAX = 5.0

OF_AN_ENGINE: Final[tuple[Family[EngineSnapshot], ...]] = (
    *DECISION, *ESTIMATES, *STEPS, *LINK, *LEARNING,
)  # fmt: skip


@dataclass(eq=False, repr=False)
class SidecarCollector(Collector):
    """Collects all metric families."""

    registry: SessionRegistry
    override_registry: OverrideRegistry
    fleet_view: FleetView
    supervisor: Supervisor
    loop: asyncio.AbstractEventLoop

    async def _read(self) -> list[Metric]:
        sessions, unreadable = list(self.registry), 0
        families = [(family, family.empty("engine")) for family in OF_AN_ENGINE]
        for session in sessions:
            try:
                view = EngineSnapshot.of(session)
                read = [samples(family, view) for family, _ in families]
            except Exception:  # noqa: BLE001  # whatever is wrong with one, others are scraped
                _log.exception("engine_not_scraped", engine=session.engine_id)
                unreadable += 1
                continue
            for (_, written), found in zip(families, read, strict=True):
                write(found, written, session.engine_id)
            await asyncio.sleep(0)
        held = [held for held in self.override_registry.held() if not held.override.from_file]
        sidecar = SidecarSnapshot(
            sessions, held, self.override_registry.policy, self.override_registry.health,
            self.supervisor.states, self.fleet_view.counts, unreadable,
            self.registry.load.is_too_much,
        )  # fmt: skip
        general = [(family, family.empty()) for family in OF_THE_SIDECAR]
        for of_all, written in general:
            write(samples(of_all, sidecar), written)
        return [written for _, written in (*general, *families)]

    def collect(self) -> Iterator[Metric]:
        """Yields all families; the HTTP server's thread calls it once per scrape."""
        reading = asyncio.run_coroutine_threadsafe(self._read(), self.loop)
        yield from reading.result(_SNAPSHOT_SECONDS_MAX)


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
    timeout = SILENCE_SECONDS
    server_version, sys_version = "controller", ""

    def do_GET(self) -> None:
        """Answers a scrape on any path."""
        if not self.server.serves(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this host is not served here")
            return
        try:
            super().do_GET()
        except TimeoutError:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the sidecar is too busy")
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)

"""One sidecar of its own process with all its ports, and an honest engine that is steered by it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from controller.util.sockets import operators_path
from engine_shim.link.plan_follower import Source
from lab.harness.processes import free_port
from tests.support.eventually import eventually
from tests.support.linked_engine import LinkedEngine, linked_engine
from tests.support.service_harness import PATIENCE_SECONDS, health_stub
from tests.support.sidecar_process import SidecarProcess, sidecar_process

MAX_ENGINES = 96
MAX_CONNECTIONS = 200
MAX_OPEN_CALLS = 512
# What an attack may add, whatever it sends.
MEMORY_BYTES = 200 * 1024 * 1024


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> int:
    """1 in CI; `--hostile-scale 20` is an hour of it."""
    return int(request.config.getoption("--hostile-scale"))


@dataclass
class Besieged:
    """The sidecar under attack, its ports, and the engine that must not feel it."""

    sidecar: SidecarProcess
    engine: LinkedEngine
    directory: Path
    tcp: str
    health_port: int
    page_port: int
    metrics_port: int
    memory_bytes: int = 0
    descriptors: int = 0

    def __post_init__(self) -> None:
        self.process = psutil.Process(self.sidecar.process.pid)

    @property
    def operators(self) -> str:
        """Address of their socket."""
        return f"unix:{operators_path(Path(self.sidecar.address.removeprefix('unix:')))}"

    def look(self) -> None:
        """Remembers what it takes in peace."""
        self.memory_bytes = self.process.memory_info().rss
        self.descriptors = self.process.num_fds()

    def holds(self, descriptors: int = 0) -> None:
        """Under attack: bounded, serving, and the honest engine's plan is still renewed."""
        assert self.process.memory_info().rss - self.memory_bytes < MEMORY_BYTES
        # A sidecar that has much to do closes those of clients that have gone a little later.
        eventually(
            lambda: self.process.num_fds() <= self.descriptors + descriptors,
            description=f"{descriptors} more descriptors than in peace at most",
        )
        self.steers()

    def steers(self) -> None:
        """Plans still reach the engine, and operators see that all is well."""
        steering = self.engine.link.plan_follower
        before = steering.plans_accepted

        def steered() -> bool:
            self.engine.run(5)
            return steering.plans_accepted > before and steering.source is Source.PLAN

        eventually(steered, timeout_seconds=120.0, description="a fresh plan")
        with grpc.insecure_channel(self.operators) as channel:
            answer = health_stub(channel).Check(
                health_pb2.HealthCheckRequest(service="speculation.v1.SpeculationService"),
                timeout=PATIENCE_SECONDS,
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="session")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    directory = tmp_path_factory.mktemp("hostile")
    tcp, health, page, metrics = (free_port() for _ in range(4))
    settings = directory / "controller.yaml"
    settings.write_text(
        f"max_engines: {MAX_ENGINES}\nmax_connections: {MAX_CONNECTIONS}\n"
        f"max_open_calls: {MAX_OPEN_CALLS}\nchannelz: true\nready_with: guess\n"
    )
    flags = (
        "--config", str(settings), "--tcp", f"127.0.0.1:{tcp}", "--health-host", "127.0.0.1",
        "--health-port", str(health), "--page-port", str(page), "--metrics-port", str(metrics),
    )  # fmt: skip
    with sidecar_process(directory, *flags) as sidecar:
        assert sidecar.process.stderr is not None
        log = sidecar.process.stderr
        threading.Thread(target=lambda: list(log), daemon=True).start()
        with linked_engine(sidecar.address, "honest", agent_nice=0) as engine:
            engine.run(50)
            yield Besieged(sidecar, engine, directory, f"127.0.0.1:{tcp}", health, page, metrics)


@contextmanager
def raw_channel(address: str) -> Iterator[Any]:
    """For calls of bytes; the stubs' types want messages."""
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture(autouse=True)
def in_peace(besieged: Besieged) -> Iterator[None]:
    """Before an attack, and after it."""
    besieged.steers()
    besieged.look()
    yield
    besieged.holds(descriptors=40)


@pytest.fixture
def channel(besieged: Besieged) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(besieged.sidecar.address) as opened:
        yield opened


@pytest.fixture
def operators(besieged: Besieged) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(besieged.operators) as opened:
        yield opened

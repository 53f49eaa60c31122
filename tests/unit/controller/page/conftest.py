"""One browser for all tests of the page; each module has a sidecar and an agent."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from lab.harness.processes import free_port
from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc
from tests.support.linked_engine import LinkedEngine, linked_engine
from tests.support.service_harness import engine_message, report_message
from tests.support.sidecar_process import SidecarProcess, sidecar_process
from tests.unit.controller.page.chromium import PATIENCE_SECONDS, Page, chromium

HOSTILE = "<img src=x onerror=window.hurt=1>"
# As long as a name in a cluster may be.
LONG = "pod-8." + "decode-workers." * 7 + "svc:30000"
LOOKS = Path(__file__).with_name("looks.js")
ROW = "document.querySelector('tr[data-engine=\"{}\"]')"


@dataclass
class Scene:
    """What the tests look at."""

    page: Page
    sidecar: SidecarProcess
    engine: LinkedEngine
    directory: Path
    port: int
    processes: ExitStack

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cell(self, engine: str, column: str) -> str:
        """JavaScript for a cell's text."""
        cells = f"[...({ROW.format(engine)}?.cells || [])]"
        return f"{cells}.find(cell => cell.dataset.label === {column!r})?.textContent"

    def run_until(self, expression: str, batch_size: int) -> None:
        """Steps until the page shows it."""
        for _ in range(600):
            self.engine.run(50, batch_size)
            if self.page.value(expression):
                return
        raise AssertionError(f"never true: {expression}")


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A tab that each module uses in its turn."""
    with chromium(tmp_path_factory.mktemp("browser")) as page:
        page.first(LOOKS.read_text())
        yield page


@pytest.fixture(scope="module")
def scene(browser: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """pod-7 is steered by the real link; LONG has names that no page should believe.

    Each module has its own, because some tests stop the sidecar.
    """
    directory, port = tmp_path_factory.mktemp("page"), free_port()
    with ExitStack() as stack, ExitStack() as processes:
        sidecar = processes.enter_context(
            sidecar_process(directory, "--page-port", str(port), "--ready-with", "guess")
        )
        engine = stack.enter_context(linked_engine(sidecar.address, "pod-7", agent_nice=0))
        introduce(sidecar.address, LONG, HOSTILE, HOSTILE)
        page = browser
        page.prefer(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
        page.resize(1280, 1000)
        scene = Scene(page, sidecar, engine, directory, port, processes)
        page.open(scene.origin)
        page.wait_until(f"location.href.startsWith('{scene.origin}')")
        page.requests.clear()
        page.problems.clear()
        yield scene


def introduce(address: str, engine_id: str, model: str = "target", drafter: str = "mtp") -> None:
    """An engine that reports one step."""
    message = engine_message(engine_id, target_model=model)
    message.drafters[0].name = drafter
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        asked = service_pb2.IntroduceRequest(engine=message)
        session = stub.Introduce(asked, timeout=PATIENCE_SECONDS).session_id
        report: engine_pb2.StepReport = report_message(1, drafter=drafter)
        stub.Decide(
            service_pb2.DecideRequest(session_id=session, report=report), timeout=PATIENCE_SECONDS
        )

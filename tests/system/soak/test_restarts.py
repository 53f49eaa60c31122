"""Every step over a rollout of the sidecar: on record once, or counted as dropped by the link."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.harness.sidecar import SidecarHandle
from speculation.v1.engine_pb2 import StepReport
from tests.support.eventually import eventually
from tests.support.linked_engine import LinkedEngine, linked_engine
from tests.support.sidecar_process import SidecarProcess, sidecar_process
from tests.support.step_reports import fill_report
from tools.soak import reconcile
from tools.soak.engine_log import Row, Step
from tools.soak.on_record import read_record

pytestmark = pytest.mark.slow

RESTARTS = 3
ENGINE_ID = "engine-1"


@contextmanager
def running(engine: LinkedEngine) -> Iterator[list[Step]]:
    """Steps on a thread while the context is open; what has run."""
    ran: list[Step] = []
    send, stop = engine.link.report, threading.Event()

    def noted(fill: Callable[[StepReport], None]) -> bool:
        report = fill_report(fill)
        counts = enumerate(report.accepted_counts)
        rows = [Row("", k) for k, count in counts for _ in range(count)]
        ran.append(Step(report.step, report.gamma, tuple(rows)))
        return send(fill)

    def run() -> None:
        while not stop.is_set():
            engine.run(1)

    engine.link.report = noted  # type: ignore[method-assign]
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ran
    finally:
        stop.set()
        thread.join()


def test_no_step_is_lost_uncounted_when_sidecars_stop_and_start(tmp_path: Path) -> None:
    environment = {"CONTROLLER_RECORD_DIRECTORY": str(tmp_path / "record")}

    def reported(sidecar: SidecarProcess, steps: int) -> None:
        with SidecarHandle(sidecar.address, ENGINE_ID) as client:
            eventually(
                lambda: client.is_introduced() and client.status().reports >= steps,
                timeout_seconds=60.0,
                description="the engine reports to this sidecar",
            )

    with (
        sidecar_process(tmp_path, environment=environment) as first,
        linked_engine(first.address, ENGINE_ID) as engine,
    ):
        with running(engine) as ran:
            reported(first, 100)
            assert first.stop()[0] == 0
            for _ in range(RESTARTS):
                with sidecar_process(tmp_path, environment=environment) as later:
                    reported(later, 100)
                    assert later.stop()[0] == 0
        with sidecar_process(tmp_path, environment=environment) as last:
            with SidecarHandle(last.address, ENGINE_ID) as client:
                eventually(
                    lambda: (
                        client.is_introduced()
                        and client.status().last_report.step == ran[-1].number
                    ),
                    timeout_seconds=60.0,
                    description="the last step's report",
                )
            assert last.stop()[0] == 0
    record = read_record(tmp_path / "record", ENGINE_ID)
    assert len(record.sessions) == RESTARTS + 2
    assert reconcile.steps(ran, record) == []
    assert reconcile.plans(record) == []

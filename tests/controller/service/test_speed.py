"""How fast the service is: numbers are printed (`pytest -s`), not asserted, for machines differ."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from speculation.v1 import service_pb2, service_pb2_grpc
from tests.controller.cli.sidecar_process import SidecarProcess, sidecar_process
from tests.controller.service.harness import (
    PATIENCE_SECONDS,
    engine_message,
    next_of,
    report_message,
)

MESSAGES = 400
REPORTS_PER_MESSAGE = 64
ENGINES = 8
STEPS_PER_SECOND = 200
SECONDS = 2.0


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    with sidecar_process(tmp_path, "--log-level", "error") as running:
        yield running


def cpu_seconds(sidecar: SidecarProcess) -> float:
    """User and system time of the sidecar so far."""
    text = Path(f"/proc/{sidecar.process.pid}/stat").read_text(encoding="ascii")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def introduce(channel: grpc.Channel, engine_id: str) -> str:
    engine = engine_message(engine_id, gammas=(0, 1, 2, 3, 5, 7), max_batch_size=64)
    request = service_pb2.IntroduceRequest(engine=engine)
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    return stub.Introduce(request, timeout=PATIENCE_SECONDS).session_id


@pytest.mark.parametrize("reports_per_message", [1, 8, REPORTS_PER_MESSAGE])
def test_reports_folded_per_second(sidecar: SidecarProcess, reports_per_message: int):
    count = MESSAGES * 32 // (32 if reports_per_message > 1 else 8) * reports_per_message
    with grpc.insecure_channel(sidecar.address) as channel:
        session_id = introduce(channel, "engine-0")

        def requests() -> Iterator[service_pb2.SteerRequest]:
            for first in range(1, count + 1, reports_per_message):
                reports = [
                    report_message(step, batch_size=16, gamma=5, accepted_counts=[4, 4, 3, 2, 1, 2])
                    for step in range(first, first + reports_per_message)
                ]
                yield service_pb2.SteerRequest(session_id=session_id, reports=reports)

        prepared = list(requests())
        busy, began = cpu_seconds(sidecar), time.perf_counter()
        plans = sum(
            answer.HasField("plan")
            for answer in service_pb2_grpc.SpeculationServiceStub(channel).Steer(iter(prepared))
        )
        seconds, busy = time.perf_counter() - began, cpu_seconds(sidecar) - busy
        status = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
            service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
        )
    assert status.engines[0].reports == count
    print(
        f"\n{reports_per_message} reports a message: {count / seconds:,.0f} reports/s, "
        f"{count / busy:,.0f} per second of the sidecar's CPU time ({plans} plans)"
    )


async def test_answer_times_of_eight_engines(sidecar: SidecarProcess):
    """From a report to its answer; every message also holds one bad report, which is answered."""
    with grpc.insecure_channel(sidecar.address) as setting_up:
        sessions = [introduce(setting_up, f"engine-{i}") for i in range(ENGINES)]
    took: list[float] = []

    async def engine(session_id: str, channel: grpc.aio.Channel) -> None:
        call = service_pb2_grpc.SpeculationServiceStub(channel).Steer()
        pause, steps = 1 / STEPS_PER_SECOND, int(SECONDS * STEPS_PER_SECOND)
        due = time.perf_counter()
        for step in range(1, steps + 1):
            due += pause
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            await call.write(
                service_pb2.SteerRequest(
                    session_id=session_id, reports=[report_message(step), report_message(step)]
                )
            )
            while not (await next_of(call)).rejections:
                pass
            took.append(time.perf_counter() - began)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    async with grpc.aio.insecure_channel(sidecar.address) as channel:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(engine(session_id, channel) for session_id in sessions))
    took.sort()
    assert len(took) == ENGINES * SECONDS * STEPS_PER_SECOND
    at = {share: took[int(len(took) * share)] * 1e3 for share in (0.5, 0.99)}
    print(
        f"\n{ENGINES} engines at {STEPS_PER_SECOND} steps/s, report to answer: "
        f"p50 {at[0.5]:.2f} ms, p99 {at[0.99]:.2f} ms (client included)"
    )

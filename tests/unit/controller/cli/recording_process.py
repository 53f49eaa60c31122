"""A sidecar process that records, and reports for it to record."""

import random
from pathlib import Path
from typing import Any

import grpc

from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc
from tests.support.service_harness import PATIENCE_SECONDS, engine_message
from tests.support.sidecar_process import sidecar_process


def recording(directory: Path, *flags: str, megabytes: int = 64) -> Any:
    """A sidecar process that records to `directory`/record."""
    return sidecar_process(
        directory,
        *flags,
        environment={
            "CONTROLLER_RECORD_DIRECTORY": str(directory / "record"),
            "CONTROLLER_RECORD_MEGABYTES": str(megabytes),
        },
    )


def reports_of(address: str, engine_id: str) -> int:
    with grpc.insecure_channel(address) as channel:
        answer = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
            service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
        )
    return sum(e.reports for e in answer.engines if e.engine.engine_id == engine_id)


def steer(address: str, reports: list[engine_pb2.StepReport], a_message: int) -> str:
    """Sends the reports of engine "odd" on one stream, to its end; the session's token."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        engine = engine_message("odd", gammas=(0, 1, 2, 3, 5, 20), max_batch_size=32)
        session_id = stub.Introduce(
            service_pb2.IntroduceRequest(engine=engine), timeout=PATIENCE_SECONDS
        ).session_id
        messages = (
            service_pb2.SteerRequest(
                session_id=session_id,
                reports=reports[i : i + a_message],
                dropped_reports=int(i == 0),
            )
            for i in range(0, len(reports), a_message)
        )
        for _ in stub.Steer(messages, timeout=60.0):
            pass
    return str(session_id)


def rich_reports(count: int, gamma: int = 5) -> list[engine_pb2.StepReport]:
    """Reports that do not compress well, with a hostile class; the last one is refused."""
    rng = random.Random(0)
    reports = []
    for step in range(1, count + 1):
        counts = [rng.randint(0, 1) for _ in range(gamma + 1)]
        counts[0] += 1
        reports.append(
            engine_pb2.StepReport(
                step=step, batch_size=sum(counts), kv_tokens=rng.randint(1000, 90_000),
                drafter="mtp", gamma=gamma, accepted_counts=counts,
                step_seconds=rng.uniform(0.01, 0.012),
                classes=[engine_pb2.ClassCounts(label="<b>&chat$", accepted_counts=counts)],
                confidences=[rng.random() for _ in range(gamma)],
                flags=engine_pb2.StepFlags(unsteered=step % 50 == 0),
            )
        )  # fmt: skip
    return [*reports, engine_pb2.StepReport(step=1, batch_size=1, drafter="mtp", gamma=9)]

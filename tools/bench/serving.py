"""Starts a real sidecar that logs errors only, sends it reports, measures its processor time."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc

from speculation.v1 import service_pb2, service_pb2_grpc
from speculation.v1.engine_pb2 import EngineSpec, StepReport
from tests.support.sidecar_process import SidecarProcess, sidecar_process


@contextlib.contextmanager
def quiet_sidecar(environment: Mapping[str, str] | None = None) -> Iterator[SidecarProcess]:
    """A sidecar in a folder of its own.  environment: further variables."""
    with tempfile.TemporaryDirectory() as name:
        flags = ("--log-level", "error")
        with sidecar_process(Path(name), *flags, environment=environment) as sidecar:
            yield sidecar


@contextlib.contextmanager
def minimal_sidecar(*, answers_all: bool = False) -> Iterator[tuple[str, int]]:
    """The least sidecar that there can be (`link_bench --serve`): its address, its process.

    answers_all: it answers each message with a plan.
    """
    with tempfile.TemporaryDirectory() as name:
        address = f"unix:{name}/least.sock"
        command = [sys.executable, "-m", "tools.bench.link_bench", "--serve", address]
        command += ["--all"] if answers_all else []
        with subprocess.Popen(command) as process:
            try:
                with grpc.insecure_channel(address) as channel:
                    introduce(channel, EngineSpec())  # it serves
                yield address, process.pid
            finally:
                process.terminate()


def introduce(channel: grpc.Channel, engine: EngineSpec) -> str:
    """Introduces the engine, and returns its session."""
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    request = service_pb2.IntroduceRequest(engine=engine)
    return str(stub.Introduce(request, wait_for_ready=True).session_id)


def make_messages(
    session_id: str, reports: Sequence[StepReport], reports_per_message: int
) -> list[service_pb2.SteerRequest]:
    """Groups reports into messages of equal size."""
    return [
        service_pb2.SteerRequest(
            session_id=session_id, reports=reports[first : first + reports_per_message]
        )
        for first in range(0, len(reports), reports_per_message)
    ]


def send(channel: grpc.Channel, messages: Sequence[service_pb2.SteerRequest]) -> None:
    """Sends the messages on one stream, and waits until the sidecar ends it after the last."""
    for _ in service_pb2_grpc.SpeculationServiceStub(channel).Steer(iter(messages)):
        pass


def processor_seconds(pid: int) -> float:
    """Seconds of a process's live threads, to the nanosecond (`cpu_times` has ticks of 10 ms)."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds * 1e-9

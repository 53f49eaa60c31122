"""Reports folded a second of the sidecar's processor: `python -m tests.bench.fold_bench`.

A real `controller serve` gets one engine's reports as fast as it takes them, several to a message
as under load (an agent sends what has come since its last message), or one.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import grpc
import psutil

from speculation.v1 import service_pb2, service_pb2_grpc
from tests.bench.measurement import Measurement, run
from tests.controller.cli.sidecar_process import SidecarProcess, sidecar_process
from tests.controller.service.harness import engine_message, report_message

_REPORTS_A_MESSAGE = (64, 8, 1)
_BAR = 20_000


def _folded(
    sidecar: SidecarProcess, engine_id: str, reports: int, each: int
) -> tuple[float, float]:
    """Reports a second of its processor, and of the clock; `each` to a message."""
    with grpc.insecure_channel(sidecar.address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        engine = engine_message(engine_id, gammas=(0, 1, 2, 3, 5, 7), max_batch_size=64)
        session_id = stub.Introduce(service_pb2.IntroduceRequest(engine=engine)).session_id
        messages = [
            service_pb2.SteerRequest(
                session_id=session_id,
                reports=[
                    report_message(step, batch_size=16, gamma=5, accepted_counts=[4, 4, 3, 2, 1, 2])
                    for step in range(first, first + each)
                ],
            )
            for first in range(1, reports + 1, each)
        ]
        process = psutil.Process(sidecar.process.pid)
        before, began = process.cpu_times(), time.perf_counter()
        for _ in stub.Steer(iter(messages)):
            pass
        took, after = time.perf_counter() - began, process.cpu_times()
        status = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
            service_pb2.ListEnginesRequest()
        )
    (held,) = [engine for engine in status.engines if engine.engine.engine_id == engine_id]
    if held.reports != reports:
        raise RuntimeError(f"{held.reports} reports were folded, not {reports}")
    spent = after.user + after.system - before.user - before.system
    return reports / spent, reports / took


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Two rates for each size of message."""
    with (
        tempfile.TemporaryDirectory() as name,
        sidecar_process(Path(name), "--log-level", "error") as sidecar,
    ):
        for each in _REPORTS_A_MESSAGE:
            runs = [
                _folded(sidecar, f"engine-{each}-{repeat}", options.reports, each)
                for repeat in range(options.repeats)
            ]
            of_processor, of_clock = zip(*runs, strict=True)
            yield Measurement(
                f"reports folded a second of one core, {each} a message", "1/s", of_processor,
                at_least=_BAR if each > 1 else None,
            )  # fmt: skip
            yield Measurement(f"reports taken a second, {each} a message", "1/s", of_clock)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reports", type=int, default=25_600, help="of one run")
    parser.add_argument("--repeats", type=int, default=5)
    run(parser, measure, "tests.bench.fold_bench")


if __name__ == "__main__":
    main()

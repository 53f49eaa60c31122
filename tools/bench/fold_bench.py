"""Reports folded a second of the sidecar's processor: `python -m tools.bench.fold_bench`.

A real `controller serve` gets one engine's reports as fast as it takes them, several to a message
as under load (an agent sends what has come since its last message), or one.  The same messages in
turn go to the least sidecar that there can be (`link_bench --serve`), which reads and counts them:
what gRPC itself takes of a message, at the machine's speed of that minute.
"""

import argparse
import time
from collections.abc import Iterable
from typing import NamedTuple

import grpc

from lab.harness.sidecar import SidecarHandle
from tests.support.service_harness import engine_message, report_message
from tests.support.sidecar_process import SidecarProcess
from tools.bench.measurement import RATIO, Measurement, command_line, run
from tools.bench.serving import (
    introduce,
    make_messages,
    minimal_sidecar,
    processor_seconds,
    quiet_sidecar,
    send,
)

_REPORTS_A_MESSAGE = (64, 8, 1)
_BAR = 20_000


class _Rate(NamedTuple):
    """Reports a second of the sidecar's processor, and of the clock."""

    of_processor: float
    of_clock: float


def _fold_rate(
    sidecar: SidecarProcess, engine_id: str, reports: int, reports_per_message: int
) -> _Rate:
    """`reports_per_message` to a message.  Raises RuntimeError if any was not folded."""
    rate = _send_rate(sidecar.address, sidecar.process.pid, engine_id, reports, reports_per_message)
    with SidecarHandle(sidecar.address, engine_id) as handle:
        folded = handle.status().reports
    if folded != reports:
        raise RuntimeError(f"{folded} reports were folded, not {reports}")
    return rate


def _send_rate(
    address: str, pid: int, engine_id: str, reports: int, reports_per_message: int
) -> _Rate:
    with grpc.insecure_channel(address) as channel:
        step_reports = [
            report_message(step, batch_size=16, gamma=5, accepted_counts=[4, 4, 3, 2, 1, 2])
            for step in range(1, reports + 1)
        ]
        engine = engine_message(engine_id, gammas=(0, 1, 2, 3, 5, 7), max_batch_size=64)
        messages = make_messages(introduce(channel, engine), step_reports, reports_per_message)
        processor_before, start = processor_seconds(pid), time.perf_counter()
        send(channel, messages)
        elapsed, processor_used = (
            time.perf_counter() - start,
            processor_seconds(pid) - processor_before,
        )
    return _Rate(reports / processor_used, reports / elapsed)


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Rates for each size of message, and what the least sidecar would take of it."""
    with quiet_sidecar() as sidecar, minimal_sidecar() as (address, pid):
        for reports_per_message in _REPORTS_A_MESSAGE:
            runs, minimal_runs = [], []
            for repeat in range(options.repeats):
                runs.append(
                    _fold_rate(
                        sidecar,
                        f"engine-{reports_per_message}-{repeat}",
                        options.reports,
                        reports_per_message,
                    )
                )
                minimal_runs.append(
                    _send_rate(address, pid, "least", options.reports, reports_per_message)
                )
            yield Measurement(
                f"reports folded a second of one core, {reports_per_message} a message", "1/s",
                [rate.of_processor for rate in runs],
                at_least=_BAR if reports_per_message > 1 else None,
            )  # fmt: skip
            yield Measurement(
                f"reports taken a second, {reports_per_message} a message",
                "1/s",
                [rate.of_clock for rate in runs],
            )
            yield Measurement(
                f"processor time over that of the least sidecar, {reports_per_message} a message",
                RATIO,
                [bare.of_processor / rate.of_processor
                 for rate, bare in zip(runs, minimal_runs, strict=True)],
            )  # fmt: skip


PARSER = command_line(__doc__, repeats=5)
PARSER.add_argument("--reports", type=int, default=25_600, help="of one run")

if __name__ == "__main__":
    run(PARSER, measure)

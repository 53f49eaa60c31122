"""Engines of 200 steps a second that one sidecar serves on one core.

    python -m tools.bench.capacity_bench

A real `controller serve` has core 0 to itself, as far as the machine lets it; this process, which
plays the engines and their agents, has another one.  Each engine has a connection and a stream of
its own, sends a report every 5 ms, and holds reports back as the agent does (`InFlightReports`).
The traffic changes every 10 seconds; planner and pace are the default ones.

Taken is the time from the moment that a report is due until the sidecar's answer to its message:
each tenth message holds one more report, which is stale and therefore answered at once by a
rejection.  It passes the same queues as a report that changes the plan, and the same writer; the
planner's pause between two plans is not in it.  The generator's own lateness is.

The number of engines rises until reports are dropped.  Each number is measured several times; the
run counts in which other programs took least of the sidecar's core, and what they took is stated.
On a shared machine `--nice -15` (as root) keeps most of them away from both cores meanwhile.
"""

import argparse
import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
import psutil

from engine_shim.link.report_buffer import InFlightReports, ReportBuffer
from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc
from tests.support.service_harness import engine_message
from tools.bench.measurement import RATIO, Measurement, command_line, run
from tools.bench.serving import processor_seconds, quiet_sidecar

_STEPS_PER_SECOND: Final = 200
_BAR_MS: Final = 5.0
_ENGINES: Final = (1, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_SIDECAR_CORE, _ENGINES_CORE = 0, 1
# Without a profile the planner plans more often for its first 500 reports, which are left out.
_WARM_UP_SECONDS: Final = 3.0
_BATCH: Final = 8
_CONTEXT: Final = 512
_PHASE_STEPS: Final = 2000
_ACCEPTANCES: Final = (0.8, 0.5)
_GAMMAS: Final = (0, 1, 2, 3, 5, 7)
_SAMPLES: Final = 200
# As the agent: reports of a message, and reports that wait.
_REPORTS_A_MESSAGE: Final = 128
_WAITING_MAX: Final = 256
_ASK_EVERY: Final = 10
_STEER: Final = "/speculation.v1.SpeculationService/Steer"


def _histograms(acceptance: float) -> dict[int, list[list[int]]]:
    """Accepted counts of some steps, by draft length."""
    source, counts_by_gamma = random.Random(1), {}
    for gamma in _GAMMAS:
        counts_by_gamma[gamma] = steps = [[0] * (gamma + 1) for _ in range(_SAMPLES)]
        for counts in steps:
            for _ in range(_BATCH):
                length = 0
                while length < gamma and source.random() < acceptance:
                    length += 1
                counts[length] += 1
    return counts_by_gamma


_TRAFFIC: Final = [_histograms(acceptance) for acceptance in _ACCEPTANCES]


@dataclass
class _Engine:
    """One engine and its agent.  delays, lateness: seconds, since `reset`."""

    number: int
    gamma: int = 3
    step: int = 0
    messages: int = 0
    reports: int = 0
    dropped: int = 0
    delays: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    _session: str = ""
    _in_flight: InFlightReports | None = None
    # When each was due, and its report.
    _waiting: deque[tuple[float, engine_pb2.StepReport]] = field(default_factory=deque)
    # The stale steps that were reported so far, and when the oldest report beside each was due.
    _questions: int = 0
    _due_by_question: dict[int, float] = field(default_factory=dict)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self) -> None:
        """Counts from here."""
        self.messages = self.reports = self.dropped = 0
        self.delays, self.lateness = [], []

    async def live(self, address: str, engines: int) -> None:
        """Runs until it is cancelled."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            spec = engine_message(f"engine-{self.number}", gammas=_GAMMAS, max_batch_size=64)
            opened = await service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
                service_pb2.IntroduceRequest(engine=spec)
            )
            self._session = opened.session_id
            self._in_flight = InFlightReports(
                ReportBuffer(1), opened.session_id, opened.messages_in_flight_max
            )
            call: Any = channel.stream_stream(_STEER)()
            await call.write(self._message().SerializeToString())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(call, self._in_flight))
                tasks.create_task(self._write(call, self._in_flight))
                tasks.create_task(self._run_steps(self.number / engines))

    async def _run_steps(self, offset: float) -> None:
        due = time.perf_counter() + offset / _STEPS_PER_SECOND
        while True:
            await asyncio.sleep(due - time.perf_counter())
            self.lateness.append(time.perf_counter() - due)
            self.step += 1
            counts = _TRAFFIC[self.step // _PHASE_STEPS % 2][self.gamma][self.step * 7 % _SAMPLES]
            report = engine_pb2.StepReport(
                step=self.step, batch_size=_BATCH, kv_tokens=_BATCH * _CONTEXT, drafter="mtp",
                gamma=self.gamma, accepted_counts=counts,
                step_seconds=(0.004 + 0.0006 * self.gamma) * (1 + self.step * 37 % 100 / 5000),
            )  # fmt: skip
            self._waiting.append((due, report))
            if len(self._waiting) > _WAITING_MAX:
                self._waiting.popleft()
                self.dropped += 1
            self._has_news.set()
            due += 1 / _STEPS_PER_SECOND

    async def _write(self, call: Any, in_flight: InFlightReports) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while self._waiting and not in_flight.is_full:
                batch = [
                    self._waiting.popleft()
                    for _ in range(min(len(self._waiting), _REPORTS_A_MESSAGE))
                ]
                message = self._message(*(report for _, report in batch))
                self.messages += 1
                self.reports += len(batch)
                if self.messages % _ASK_EVERY == 0 and self._questions + 1 < batch[0][1].step:
                    self._questions += 1
                    message.reports.append(engine_pb2.StepReport(step=self._questions))
                    self._due_by_question[self._questions] = batch[0][0]
                in_flight.add_message(message.reports, 0)  # type: ignore[arg-type]  # they are only counted
                await call.write(message.SerializeToString())

    async def _read(self, call: Any, in_flight: InFlightReports) -> None:
        while True:
            data = await call.read()
            now = time.perf_counter()
            response = service_pb2.SteerResponse.FromString(data)
            in_flight.acknowledged = response.received_so_far
            self._has_news.set()
            for row in response.plan.rows:
                if row.max_batch_size >= _BATCH:
                    self.gamma = row.gamma
                    break
            for rejection in response.rejections:
                self.delays.append(now - self._due_by_question.pop(rejection.step))

    def _message(self, *reports: engine_pb2.StepReport) -> service_pb2.SteerRequest:
        return service_pb2.SteerRequest(session_id=self._session, reports=reports)


@dataclass(frozen=True)
class _Run:
    """The results of one run.

    delays: milliseconds.  sidecar_seconds: of the processor.  foreign_share: share of the sidecar's
    core that other programs took.  lateness: milliseconds, of the generator, p99.
    """

    seconds: float
    delays: Sequence[float]
    sidecar_seconds: float
    foreign_share: float
    messages: int
    reports: int
    dropped: int
    lateness: float

    @property
    def p99(self) -> float:
        return float(np.percentile(self.delays, 99))


def _core_seconds(core: int) -> float:
    """Seconds that a core has been busy, niced processes and kernel included."""
    times = psutil.cpu_times(percpu=True)[core]
    return float(sum(times[:8]) - times.idle - times.iowait)


async def _play(address: str, pid: int, count: int, seconds: float) -> _Run:
    engines = [_Engine(number) for number in range(count)]
    tasks = [asyncio.create_task(engine.live(address, count)) for engine in engines]
    await asyncio.wait(tasks, timeout=_WARM_UP_SECONDS)
    for engine in engines:
        engine.reset()
    sidecar_used, core_used, start = (
        processor_seconds(pid),
        _core_seconds(_SIDECAR_CORE),
        time.perf_counter(),
    )
    await asyncio.wait(tasks, timeout=seconds)
    elapsed = time.perf_counter() - start
    sidecar_used, core_used = (
        processor_seconds(pid) - sidecar_used,
        _core_seconds(_SIDECAR_CORE) - core_used,
    )
    late = [1e3 * seconds for engine in engines for seconds in engine.lateness]
    result = _Run(
        elapsed,
        [1e3 * delay for engine in engines for delay in engine.delays],
        sidecar_used,
        max(0.0, core_used - sidecar_used) / elapsed,
        sum(engine.messages for engine in engines),
        sum(engine.reports for engine in engines),
        sum(engine.dropped for engine in engines),
        float(np.percentile(late, 99)),
    )
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    return result


def _measure_count(count: int, seconds: float) -> _Run:
    with quiet_sidecar() as sidecar:
        for thread in Path(f"/proc/{sidecar.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {_SIDECAR_CORE})
        return asyncio.run(_play(sidecar.address, sidecar.process.pid, count, seconds))


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """p50 and p99 by the number of engines, and the largest numbers that hold."""
    os.sched_setaffinity(0, {_ENGINES_CORE})
    # The sidecar inherits it.
    os.nice(options.nice)
    in_time = lossless = 0
    is_in_time = True
    for count in options.engines or _ENGINES:
        runs = [_measure_count(count, options.seconds) for _ in range(options.repeats)]
        best = min(runs, key=lambda run: run.foreign_share)
        label = f"{count} engines"
        for name, unit, value in (
            ("report to answer, p50", "ms", float(np.percentile(best.delays, 50))),
            ("report to answer, p99", "ms", best.p99),
            ("processor time of a report", "us", 1e6 * best.sidecar_seconds / best.reports),
            ("of the core, the sidecar's", RATIO, best.sidecar_seconds / best.seconds),
            ("of the core, other programs'", RATIO, best.foreign_share),
            ("reports a message", "", best.reports / best.messages),
            ("reports dropped", "", best.dropped),
            ("generator late, p99", "ms", best.lateness),
        ):
            yield Measurement(f"{label}: {name}", unit, [value])
        is_in_time = is_in_time and best.p99 <= _BAR_MS
        in_time = count if is_in_time else in_time
        if best.dropped:
            break
        lossless = count
    yield Measurement(f"engines with a p99 of at most {_BAR_MS:g} ms", "engines", [in_time])
    yield Measurement("engines without a dropped report", "engines", [lossless])


PARSER = command_line(__doc__, repeats=3)
PARSER.add_argument("--engines", type=int, nargs="+", help="numbers to try, ascending")
PARSER.add_argument("--seconds", type=float, default=6.0, help="of one run")
PARSER.add_argument("--nice", type=int, default=0, help="of this process and the sidecar's")

if __name__ == "__main__":
    run(PARSER, measure)

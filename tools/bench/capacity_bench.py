"""Engines of 200 steps a second on one sidecar with a core of its own, beside a bare gRPC stream.

    python -m tools.bench.capacity_bench

A real `controller serve` has core 0 to itself, as far as the machine lets it; this process, which
plays the engines and their agents, has another one.  Each engine has a connection and a stream of
its own and a step every 5 ms.  Reports are sent as the agent sends them: looked for each
millisecond (`--look-ms`, the agent's SPECULATION_REPORT_INTERVAL_MS), all that have come since the
last message in one, and held back while messages are in flight (`InFlightReports`).  The traffic
changes every 10 seconds; planner and pace are the default ones.

Taken is the time from the moment that a report is due until the sidecar's answer to its message:
some messages hold one more report, which is stale and therefore answered at once.  It passes the
same queues as a report that changes the plan, and the same writer; the planner's pause between two
plans is not in it.  The generator's own lateness is.

Each run of the sidecar stands beside one of the bare stream (`link_bench --serve`), which folds
nothing and answers each message with a plan of eight rows.  On a shared machine the ratios of a
pair say more than the times; what other programs took of the core is stated.  `--nice -15` (as
root) keeps most of them away from both cores meanwhile.
"""

import argparse
import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
import numpy as np
import psutil

from engine_shim.link.messages import encode_report_field
from engine_shim.link.report_buffer import InFlightReports, ReportBuffer
from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc
from tests.support.service_harness import engine_message
from tools.bench.measurement import RATIO, Measurement, command_line, run
from tools.bench.serving import minimal_sidecar, processor_seconds, quiet_sidecar

_STEPS_PER_SECOND: Final = 200
_BAR_MS: Final = 5.0
_ENGINES: Final = (1, 8, 16, 32, 64)
# Bars by the number of engines: milliseconds, and the sidecar's over the bare stream's.
_P99_BARS_MS: Final = {64: 25.0}
_P99_RATIO_BARS: Final = dict.fromkeys((8, 32, 64), 1.5)
_PROCESSOR_RATIO_BARS: Final = {1: 1.2}
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
# Stale reports of an engine, and of all engines, far below the rate at which refusals are delayed.
_QUESTIONS_PER_SECOND: Final = 20
_QUESTIONS_PER_SECOND_OF_ALL: Final = 200
_STEER: Final = "/speculation.v1.SpeculationService/Steer"


def _make_reports(acceptance: float) -> dict[int, list[bytes]]:
    """Serialized reports of some steps without their numbers, by draft length."""
    source = random.Random(1)
    reports_by_gamma: dict[int, list[bytes]] = {}
    for gamma in _GAMMAS:
        reports_by_gamma[gamma] = reports = []
        for sample in range(_SAMPLES):
            counts = [0] * (gamma + 1)
            for _ in range(_BATCH):
                length = 0
                while length < gamma and source.random() < acceptance:
                    length += 1
                counts[length] += 1
            report = engine_pb2.StepReport(
                batch_size=_BATCH, kv_tokens=_BATCH * _CONTEXT, drafter="mtp", gamma=gamma,
                accepted_counts=counts,
                step_seconds=(0.004 + 0.0006 * gamma) * (1 + sample * 37 % 100 / 5000),
            )  # fmt: skip
            reports.append(report.SerializeToString())
    return reports_by_gamma


_TRAFFIC: Final = [_make_reports(acceptance) for acceptance in _ACCEPTANCES]


class _WaitingReport(NamedTuple):
    """A serialized report, and when it was due."""

    due: float
    step: int
    report: bytes


@dataclass
class _Engine:
    """One engine and its agent.

    question_steps: steps between two questions.  delays, lateness: seconds, since `reset`.
    """

    number: int
    question_steps: int
    gamma: int = 3
    step: int = 0
    messages: int = 0
    reports: int = 0
    dropped: int = 0
    delays: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    _session: str = ""
    # Reports of this stream, and those of them up to each question, with when the oldest report
    # beside it was due.
    _sent: int = 0
    _questions: int = 0
    _last_question_step: int = 1
    _asked: deque[tuple[int, float]] = field(default_factory=deque)
    _waiting: deque[_WaitingReport] = field(default_factory=deque)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self) -> None:
        """Counts from here."""
        self.messages = self.reports = self.dropped = 0
        self.delays, self.lateness = [], []

    def run_step(self, due: float, now: float) -> None:
        """Runs the step that was due, and hands over its report."""
        self.lateness.append(now - due)
        self.step += 1
        reports = _TRAFFIC[self.step // _PHASE_STEPS % 2][self.gamma]
        number = engine_pb2.StepReport(step=self.step).SerializeToString()
        report = number + reports[self.step * 7 % _SAMPLES]
        self._waiting.append(_WaitingReport(due, self.step, report))
        if len(self._waiting) > _WAITING_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self.has_news.set()

    async def live(self, address: str) -> None:
        """Runs until it is cancelled."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            spec = engine_message(f"engine-{self.number}", gammas=_GAMMAS, max_batch_size=64)
            opened = await service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
                service_pb2.IntroduceRequest(engine=spec)
            )
            self._session = opened.session_id
            in_flight = InFlightReports(
                ReportBuffer(1), opened.session_id, opened.messages_in_flight_max
            )
            call: Any = channel.stream_stream(_STEER)()
            await call.write(self._message([]))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(call, in_flight))
                tasks.create_task(self._write(call, in_flight))

    async def _write(self, call: Any, in_flight: InFlightReports) -> None:
        while True:
            await self.has_news.wait()
            self.has_news.clear()
            while self._waiting and not in_flight.is_full:
                count = min(len(self._waiting), _REPORTS_A_MESSAGE)
                batch = [self._waiting.popleft() for _ in range(count)]
                self.messages += 1
                self.reports += len(batch)
                reports = [waiting.report for waiting in batch]
                is_question = batch[0].step - self._last_question_step >= self.question_steps
                if is_question:
                    self._last_question_step = batch[0].step
                    self._questions += 1
                    stale_report = engine_pb2.StepReport(step=self._questions)
                    reports.append(stale_report.SerializeToString())
                self._sent += len(reports)
                if is_question:
                    self._asked.append((self._sent, batch[0].due))
                in_flight.add_message(reports, 0)
                await call.write(self._message(reports))

    async def _read(self, call: Any, in_flight: InFlightReports) -> None:
        while True:
            data = await call.read()
            now = time.perf_counter()
            response = service_pb2.SteerResponse.FromString(data)
            in_flight.acknowledged = response.received_so_far
            if self._waiting:
                self.has_news.set()
            for row in response.plan.rows:
                if row.max_batch_size >= _BATCH:
                    self.gamma = row.gamma
                    break
            while self._asked and self._asked[0][0] <= response.received_so_far.reports:
                self.delays.append(now - self._asked.popleft()[1])

    def _message(self, reports: Sequence[bytes]) -> bytes:
        head = service_pb2.SteerRequest(session_id=self._session).SerializeToString()
        return b"".join((head, *map(encode_report_field, reports)))


async def _run_steps(engines: Sequence[_Engine], look_seconds: float) -> None:
    """Runs the steps of all engines, which are evenly spread over a step's time."""
    due, number = time.perf_counter(), 0
    while True:
        await asyncio.sleep(look_seconds)
        while due <= (now := time.perf_counter()):
            engines[number % len(engines)].run_step(due, now)
            number += 1
            due += 1 / _STEPS_PER_SECOND / len(engines)


@dataclass(frozen=True)
class _Run:
    """The results of one run.

    delays: milliseconds.  processor: seconds of the server's.  foreign_share: share of the server's
    core that other programs took.  megabytes: the server's resident memory.  lateness:
    milliseconds, of the generator, p99.
    """

    seconds: float
    delays: Sequence[float]
    processor: float
    foreign_share: float
    megabytes: float
    messages: int
    reports: int
    dropped: int
    lateness: float

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.delays, share))


def _core_seconds(core: int) -> float:
    """Seconds that a core has been busy, niced processes and kernel included."""
    times = psutil.cpu_times(percpu=True)[core]
    return float(sum(times[:8]) - times.idle - times.iowait)


async def _play(address: str, pid: int, count: int, options: argparse.Namespace) -> _Run:
    questions_per_second = min(_QUESTIONS_PER_SECOND, _QUESTIONS_PER_SECOND_OF_ALL / count)
    question_steps = round(_STEPS_PER_SECOND / questions_per_second)
    engines = [_Engine(number, question_steps) for number in range(count)]
    tasks = [asyncio.create_task(engine.live(address)) for engine in engines]
    tasks.append(asyncio.create_task(_run_steps(engines, 1e-3 * options.look_ms)))
    await asyncio.wait(tasks, timeout=_WARM_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for engine in engines:
        engine.reset()
    used_before, core_before = processor_seconds(pid), _core_seconds(_SIDECAR_CORE)
    start = time.perf_counter()
    await asyncio.wait(tasks, timeout=options.seconds, return_when=asyncio.FIRST_COMPLETED)
    elapsed = time.perf_counter() - start
    used = processor_seconds(pid) - used_before
    core_used = _core_seconds(_SIDECAR_CORE) - core_before
    late = [1e3 * seconds for engine in engines for seconds in engine.lateness]
    result = _Run(
        elapsed,
        [1e3 * delay for engine in engines for delay in engine.delays],
        used,
        max(0.0, core_used - used) / elapsed,
        psutil.Process(pid).memory_info().rss / 1e6,
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


def _measure_count(count: int, options: argparse.Namespace, *, is_bare: bool) -> _Run:
    with ExitStack() as stack:
        if is_bare:
            address, pid = stack.enter_context(minimal_sidecar(answers_all=True))
        else:
            sidecar = stack.enter_context(quiet_sidecar())
            address, pid = sidecar.address, sidecar.process.pid
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {_SIDECAR_CORE})
        return asyncio.run(_play(address, pid, count, options))


def _measure_pair(
    count: int, options: argparse.Namespace, *, is_bare_first: bool
) -> tuple[_Run, _Run]:
    """Returns a run of the sidecar and one of the bare stream."""
    first = _measure_count(count, options, is_bare=is_bare_first)
    second = _measure_count(count, options, is_bare=not is_bare_first)
    return (second, first) if is_bare_first else (first, second)


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """p50 and p99 by the number of engines, and the largest numbers that hold."""
    os.sched_setaffinity(0, {_ENGINES_CORE})
    # The sidecar inherits it.
    os.nice(options.nice)
    in_time = lossless = 0
    is_in_time = is_lossless = True
    for count in options.engines or _ENGINES:
        pairs = [
            _measure_pair(count, options, is_bare_first=repeat % 2 == 1)
            for repeat in range(options.repeats)
        ]
        yield from _figures(count, pairs)
        best = min((run for run, _ in pairs), key=lambda run: run.foreign_share)
        is_in_time = is_in_time and best.percentile(99) <= _BAR_MS
        in_time = count if is_in_time else in_time
        is_lossless = is_lossless and not best.dropped
        lossless = count if is_lossless else lossless
    yield Measurement(f"engines with a p99 of at most {_BAR_MS:g} ms", "engines", [in_time])
    yield Measurement("engines without a dropped report", "engines", [lossless])


def _figures(count: int, pairs: Sequence[tuple[_Run, _Run]]) -> Iterable[Measurement]:
    label = "1 engine" if count == 1 else f"{count} engines"
    for side, runs in zip(("", ", bare stream"), zip(*pairs, strict=True), strict=True):
        bar = None if side else _P99_BARS_MS.get(count)
        for name, unit, values, at_most in (
            ("report to answer, p50", "ms", [one.percentile(50) for one in runs], None),
            ("report to answer, p99", "ms", [one.percentile(99) for one in runs], bar),
            ("processor time of a report", "us",
             [1e6 * one.processor / one.reports for one in runs], None),
            ("of the core, the server's", RATIO, [one.processor / one.seconds for one in runs],
             None),
            ("of the core, other programs'", RATIO, [one.foreign_share for one in runs], None),
            ("memory", "MB", [one.megabytes for one in runs], None),
            ("reports a message", "", [one.reports / one.messages for one in runs], None),
            ("reports dropped", "", [one.dropped for one in runs], None),
            ("generator late, p99", "ms", [one.lateness for one in runs], None),
        ):  # fmt: skip
            yield Measurement(f"{label}: {name}{side}", unit, values, at_most=at_most)
    for name, ratios, bars in (
        ("report to answer, p99,",
         [one.percentile(99) / bare.percentile(99) for one, bare in pairs],
         _P99_RATIO_BARS),
        ("processor time of a report",
         [one.processor / one.reports / (bare.processor / bare.reports) for one, bare in pairs],
         _PROCESSOR_RATIO_BARS),
    ):  # fmt: skip
        yield Measurement(
            f"{label}: {name} over the bare stream's", RATIO, ratios, at_most=bars.get(count)
        )


PARSER = command_line(__doc__, repeats=3, repeats_help="pairs of runs")
PARSER.add_argument("--engines", type=int, nargs="+", help="numbers to try, ascending")
PARSER.add_argument("--seconds", type=float, default=6.0, help="of one run")
PARSER.add_argument("--look-ms", type=float, default=1.0, help="between looks for reports")
PARSER.add_argument("--nice", type=int, default=0, help="of this process and the sidecar's")

if __name__ == "__main__":
    run(PARSER, measure)

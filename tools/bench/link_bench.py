"""What the link costs an engine's step: `python -m tools.bench.link_bench` (half a minute).

The engine's side is this process; agent and gRPC server are processes of their own, as in
production.  A decode step is stood in for by a wait that does not give up the processor, because
that is what a busy engine's thread does.  Report out + plan in is timed for every step, the steps
that find a new plan also by themselves.  Between the steps stand SGLang's adaptive policy, in its
process, with the same counts; and the floor: a bare send and an empty receive, with a plain process
waiting at the other end.  "warm" is the same code in a tight loop, on a socket pair that the
benchmark empties itself: what is left when no cache was lost and nobody had to be woken.  Then each
report is answered by a plan, and the time from the one to the other is taken.  The agent is a
process of its own and so takes nothing of the engine's interpreter; what it takes of a processor is
given for 200 steps a second.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from engine_shim.link import packets
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.packets import PlanPacket, ReportPacket, RowEntry
from engine_shim.link.plan_follower import PlanFollower, Source, StepChoice, safe_choice
from engine_shim.link.settings import LinkSettings
from engine_shim.link.supervisor import AgentSupervisor
from speculation.v1.engine_pb2 import DRAFTER_KIND_MTP, Drafter, EngineSpec
from speculation.v1.plan_pb2 import Plan, PlanRow
from speculation.v1.service_pb2 import (
    DecideRequest,
    DecideResponse,
    IntroduceRequest,
    IntroduceResponse,
    SteerRequest,
    SteerResponse,
)
from speculation.v1.service_pb2_grpc import (
    SpeculationServiceServicer,
    add_SpeculationServiceServicer_to_server,
)
from tools.bench.measurement import RATIO, Measurement, percentiles, run

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_GAMMA = 3
# As large as a report at gamma 3.
_PACKET = bytes(74)
# Drafts accepted by each of eight sequences: what SGLang's policy is told of the same step.
_ACCEPTED = [0, 0, 1, 1, 2, 2, 3, 3]
_THIRD = 1 / 3
_STEPS_PER_SECOND = 200


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Microseconds of each step, of several runs of one link."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{folder}/bench.sock"
        command = [sys.executable, "-m", "tools.bench.link_bench", "--serve", target]
        server = subprocess.Popen(command)
        try:
            yield from _measure(target, options)
        finally:
            server.terminate()
            server.wait()


def _measure(target: str, options: argparse.Namespace) -> Iterator[Measurement]:
    spec = EngineSpec(
        engine_id="bench",
        drafters=[Drafter(name="eagle3", kind=DRAFTER_KIND_MTP, gammas=[0, 1, 2, 3])],
        max_batch_size=_BUCKETS[-1],
    )
    settings = LinkSettings(sidecar=target, report_interval_ms=options.report_interval_ms)
    link = EngineLink.start(spec, settings, startup_gamma=_GAMMA)
    try:
        until = time.monotonic() + 20
        while link.choose(1).source is not Source.PLAN:
            if time.monotonic() > until:
                raise TimeoutError(f"no plan within 20 s: {link.status()}")
            time.sleep(0.01)
        pid = link.status().agent_pid
        assert pid is not None
        agent = psutil.Process(pid)
        runs, spent = [], []
        for repeat in range(options.repeats):
            before = agent.cpu_times()
            runs.append(_steps(link, options, 1 + repeat * options.steps))
            after = agent.cpu_times()
            took = after.user + after.system - before.user - before.system
            spent.append(1e6 * took / options.steps)
        whole = [[1e6 * t for t in run.wall] for run in runs]
        yield from percentiles("report out + plan in", "us", whole, {50.0: 10.0, 99.0: 50.0})
        for name, parts in (
            ("report out + plan in, own processor time", [run.own for run in runs]),
            ("report out + plan in, a new plan found", [run.with_plan for run in runs]),
            ("SGLang's adaptive policy in its process", [run.adaptive for run in runs]),
            ("floor: a bare send and receive", [run.floor for run in runs]),
            ("report out + plan in, warm", [_warm(spec) for _ in runs]),
        ):
            yield from percentiles(name, "us", [[1e6 * t for t in part] for part in parts])
        yield Measurement("agent's processor time a report", "us", spent)
        share = [each * _STEPS_PER_SECOND / 1e6 for each in spent]
        yield Measurement("agent's share of a processor, 200 steps/s", RATIO, share)
        first = 1 + options.repeats * options.steps
        trips = [
            [1e3 * t for t in _round_trips(link, first + r * options.steps, options.steps // 4)]
            for r in range(options.repeats)
        ]
        yield from percentiles("report to plan, a sidecar that only answers", "ms", trips)
        status = link.status()
        yield Measurement("agent, resident memory", "MB", [agent.memory_info().rss / 1e6])
        yield Measurement("reports dropped", "", [float(status.reports_dropped)], at_most=0)
    finally:
        link.close()


def _report(link: EngineLink, step: int, choice: StepChoice, plan_every: int) -> bool:
    # kv_tokens tells the server below after how many reports it shall send a plan.
    return link.report(
        ReportPacket(
            step,
            8,
            plan_every,
            0,
            _GAMMA,
            (2, 2, 2, 2),
            0.002,
            0,
            choice.epoch,
            choice.probe_id,
            choice.session,
        )
    )


@dataclass
class _Timings:
    """Seconds, one entry for each step; `own` is the calling thread's processor time."""

    wall: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    with_plan: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    adaptive: list[float] = field(default_factory=list)


def _steps(link: EngineLink, options: argparse.Namespace, first: int) -> _Timings:
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    timings, policy = _Timings(), AdaptiveSpeculativeParams(_GAMMA)
    choice = link.choose(8)
    clock = time.perf_counter
    due = clock()
    with _floor() as bare:
        for step in range(first, first + options.steps):
            cpu_begun = time.thread_time()
            begun = clock()
            _report(link, step, choice, options.plan_every)
            newer = link.choose(8)
            took = clock() - begun
            timings.own.append(time.thread_time() - cpu_begun)
            timings.wall.append(took)
            if newer.epoch != choice.epoch:
                timings.with_plan.append(took)
            choice = newer
            due = _busy_until(due + _THIRD / options.rate)
            begun = clock()
            policy.on_verify_complete(_ACCEPTED, 8)
            policy.get_steps_for_batch(8)
            timings.adaptive.append(clock() - begun)
            due = _busy_until(due + _THIRD / options.rate)
            begun = clock()
            bare.send(_PACKET, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            with contextlib.suppress(BlockingIOError):
                bare.recv(100, socket.MSG_DONTWAIT)
            timings.floor.append(clock() - begun)
            due = _busy_until(due + _THIRD / options.rate)
    return timings


class _NoAgent(AgentSupervisor):
    """Hands out one end of a socket pair; the benchmark holds the other."""

    def __init__(self, peer: socket.socket) -> None:
        super().__init__((), b"")
        self._fresh.append(peer)

    def stop(self) -> None:
        pass


def _warm(spec: EngineSpec, steps: int = 5000) -> list[float]:
    times = []
    arms = [(0, gamma) for gamma in spec.drafters[0].gammas]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(0)
    safe = safe_choice(_GAMMA)
    link = EngineLink(_NoAgent(ours), PlanFollower(arms, safe, 10.0))
    rows = tuple(RowEntry(bound, 0, _GAMMA, asleep=False, probe=None) for bound in _BUCKETS)
    plan = PlanPacket(1, 1, time.monotonic_ns(), 600_000, 1, 0, rows)
    with theirs, contextlib.closing(link):
        theirs.send(packets.encode_plan(plan))
        choice = link.choose(8)
        for step in range(1, steps + 1):
            begun = time.perf_counter()
            _report(link, step, choice, 1)
            choice = link.choose(8)
            times.append(time.perf_counter() - begun)
            theirs.recv(4096)
    return times


def _busy_until(due: float) -> float:
    while time.perf_counter() < due:
        pass
    return due


@contextlib.contextmanager
def _floor() -> Iterator[socket.socket]:
    """A socket with a process at its other end that only reads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [
        sys.executable,
        "-m",
        "tools.bench.link_bench",
        "--drain",
        str(theirs.fileno()),
    ]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]), ours:
        theirs.close()
        ours.settimeout(20)
        ours.recv(100)  # it is up
        ours.settimeout(0)
        yield ours


def _drain(fd: int) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with socket.socket(fileno=fd) as theirs:
        theirs.send(b"up")
        while theirs.recv(4096):
            pass


def _round_trips(link: EngineLink, first: int, count: int) -> list[float]:
    """Seconds from a report to the plan that answers it, at the engine."""
    times = []
    for step in range(first + 1, first + count + 1):
        choice = link.choose(8)
        begun = time.perf_counter()
        _report(link, step, choice, plan_every=1)
        while link.choose(8).epoch == choice.epoch:
            if time.perf_counter() - begun > 5:
                raise TimeoutError(f"no plan within 5 s: {link.status()}")
        times.append(time.perf_counter() - begun)
        time.sleep(0.001)
    return times


class _Sidecar(SpeculationServiceServicer):
    """The least sidecar that there can be: it counts reports and renews a plan of eight rows."""

    def __init__(self) -> None:
        self._reports = 0
        self._epoch = 0

    def _plan(self) -> Plan:
        self._epoch += 1
        rows = [PlanRow(max_batch_size=b, drafter="eagle3", gamma=_GAMMA) for b in _BUCKETS]
        return Plan(epoch=self._epoch, rows=rows, lease_ms=5000)

    async def Introduce(self, request: IntroduceRequest, context: Any) -> IntroduceResponse:
        return IntroduceResponse(session_id="bench", plan=self._plan())

    async def Steer(
        self, request_iterator: AsyncIterator[SteerRequest], context: Any
    ) -> AsyncIterator[SteerResponse]:
        async for request in request_iterator:
            before = self._reports
            self._reports += len(request.reports)
            every = request.reports[-1].kv_tokens if request.reports else 1
            if not request.reports or self._reports // every > before // every:
                yield SteerResponse(plan=self._plan())

    async def Decide(self, request: DecideRequest, context: Any) -> DecideResponse:
        raise NotImplementedError


async def _serve(target: str) -> None:
    server = grpc.aio.server()
    add_SpeculationServiceServicer_to_server(_Sidecar(), server)
    server.add_insecure_port(target)
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--drain"]:
        _drain(int(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(_serve(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="of one run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rate", type=float, default=500.0, help="steps per second")
    parser.add_argument("--plan-every", type=int, default=20, help="a plan after so many reports")
    parser.add_argument("--report-interval-ms", type=float, default=1.0)
    run(parser, measure, "tools.bench.link_bench")


if __name__ == "__main__":
    main()

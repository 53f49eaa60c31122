"""Measures the link's cost in a step: `python -m tools.bench.link_bench` (half a minute).

The engine's side is this process; agent and gRPC server are processes of their own, as in
production.  A decode step is stood in for by a wait that does not give up the processor, because
that is what a busy engine's thread does.  Report out + plan in is timed for every step, the steps
that find a new plan also by themselves.  Between the steps stand SGLang's adaptive policy, in its
process, with the same counts; and the floor: a bare send and an empty receive, with a plain process
waiting at the other end.  "warm" is the same code in a tight loop, on a socket pair that the
benchmark empties itself: what is left when no cache was lost and no process had to be woken.  The
largest common report (three groups, four proposals, two classes) is measured in this way, and plans
of eight rows and of 32 with rules, renewed and new.  Then each
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

from engine_shim.common.row_groups import add_group, add_proposals
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import ArrivedPlan, encode_plan, table_digest
from engine_shim.link.plan_follower import PlanFollower, Source, StepChoice, make_safe_default
from engine_shim.link.settings import LinkSettings
from engine_shim.link.supervisor import AgentSupervisor
from speculation.v1.engine_pb2 import DRAFTER_KIND_MTP, Drafter, EngineSpec, StepReport
from speculation.v1.plan_pb2 import MixtureRule, Plan, PlanRow
from speculation.v1.service_pb2 import (
    DecideRequest,
    DecideResponse,
    IntroduceRequest,
    IntroduceResponse,
    Received,
    SteerRequest,
    SteerResponse,
)
from speculation.v1.service_pb2_grpc import (
    SpeculationServiceServicer,
    add_SpeculationServiceServicer_to_server,
)
from tools.bench.measurement import RATIO, Measurement, command_line, percentiles, run

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_GAMMA = 3
# A drafter, a lookup and their mixture.
_NAMES = ("eagle3", "ngram", "eagle3+ngram")
# As large as a report at gamma 3.
_PACKET = bytes(74)
# Drafts accepted by each of eight sequences: what SGLang's policy receives of the same step.
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
        deadline = time.monotonic() + 20
        while link.choose(1).source is not Source.PLAN:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no plan within 20 s: {link.status()}")
            time.sleep(0.01)
        pid = link.status().agent_pid
        assert pid is not None
        agent = psutil.Process(pid)
        runs, agent_times = [], []
        for repeat in range(options.repeats):
            cpu_before = agent.cpu_times()
            runs.append(_steps(link, options, 1 + repeat * options.steps))
            cpu_after = agent.cpu_times()
            cpu_seconds = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
            agent_times.append(1e6 * cpu_seconds / options.steps)
        step_times = [[1e6 * t for t in run.wall] for run in runs]
        yield from percentiles("report out + plan in", "us", step_times, {50.0: 10.0, 99.0: 50.0})
        for name, parts in (
            ("report out + plan in, own processor time", [run.processor for run in runs]),
            ("report out + plan in, a new plan found", [run.with_plan for run in runs]),
            ("SGLang's adaptive policy in its process", [run.adaptive for run in runs]),
            ("floor: a bare send and receive", [run.floor for run in runs]),
            ("report out + plan in, warm", [_warm_steps() for _ in runs]),
            ("report of three groups out, warm", [_warm_reports() for _ in runs]),
            ("plan of 8 rows in, renewed, warm", [_warm_plans(8, is_new=False) for _ in runs]),
            ("plan of 8 rows in, new, warm", [_warm_plans(8, is_new=True) for _ in runs]),
            ("plan of 32 rows in, renewed, warm", [_warm_plans(32, is_new=False) for _ in runs]),
            ("plan of 32 rows in, new, warm", [_warm_plans(32, is_new=True) for _ in runs]),
        ):
            yield from percentiles(name, "us", [[1e6 * t for t in part] for part in parts])
        yield Measurement("agent's processor time a report", "us", agent_times)
        share = [microseconds * _STEPS_PER_SECOND / 1e6 for microseconds in agent_times]
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
    return link.report(lambda report: _fill(report, step, choice, plan_every))


def _fill(report: StepReport, step: int, choice: StepChoice, kv_tokens: int) -> None:
    report.step = step
    report.batch_size = 8
    report.kv_tokens = kv_tokens
    report.drafter = _NAMES[0]
    report.gamma = _GAMMA
    report.accepted_counts.extend((2, 2, 2, 2))
    report.step_seconds = 0.002
    report.plan_epoch = choice.epoch
    report.plan_session = choice.session
    if choice.probe_id:
        report.probe_id = choice.probe_id


def _fill_large(report: StepReport, step: int, choice: StepChoice) -> None:
    """Three groups, four proposals, two classes."""
    _fill(report, step, choice, 900)
    main, lookup, _ = _NAMES
    add_group(report, main, 3, (1, 0, 2, 1))
    add_group(report, lookup, 3, (0, 1, 1, 0))
    add_group(report, "", 0, (2,))
    add_proposals(report, lookup, 2, (1, 0, 0, 0), (0, 1, 0))
    add_proposals(report, lookup, 3, (0, 1, 0, 0), (0, 0, 1))
    add_proposals(report, lookup, 0, (3, 0, 0, 0))
    add_proposals(report, main, 0, (2, 1, 1, 0), (0, 1, 1))
    for label, counts in (("greedy json", (1, 1, 1, 0)), ("warm", (1, 0, 2, 1))):
        entry = report.classes.add()
        entry.label = label
        entry.accepted_counts.extend(counts)


@dataclass
class _Timings:
    """Seconds, one entry for each step; `processor` is the calling thread's processor time."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
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
            cpu_start = time.thread_time()
            start = clock()
            _report(link, step, choice, options.plan_every)
            newer = link.choose(8)
            elapsed = clock() - start
            timings.processor.append(time.thread_time() - cpu_start)
            timings.wall.append(elapsed)
            if newer.epoch != choice.epoch:
                timings.with_plan.append(elapsed)
            choice = newer
            due = _busy_until(due + _THIRD / options.rate)
            start = clock()
            policy.on_verify_complete(_ACCEPTED, 8)
            policy.get_steps_for_batch(8)
            timings.adaptive.append(clock() - start)
            due = _busy_until(due + _THIRD / options.rate)
            start = clock()
            bare.send(_PACKET, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            with contextlib.suppress(BlockingIOError):
                bare.recv(100, socket.MSG_DONTWAIT)
            timings.floor.append(clock() - start)
            due = _busy_until(due + _THIRD / options.rate)
    return timings


class _NoAgent(AgentSupervisor):
    """Hands out one end of a socket pair; the benchmark holds the other."""

    def __init__(self, peer: socket.socket) -> None:
        super().__init__((), b"")
        self._new_sockets.append(peer)

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def _local_link() -> Iterator[tuple[EngineLink, socket.socket]]:
    """A link, and the agent's end of its socket."""
    drafters = [Drafter(name=name, gammas=(0, 1, 2, 3)) for name in _NAMES]
    engine_socket, agent_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    engine_socket.settimeout(0)
    link = EngineLink(
        _NoAgent(engine_socket), PlanFollower(drafters, make_safe_default(_GAMMA), 10.0)
    )
    with agent_socket, contextlib.closing(link):
        yield link, agent_socket


def _warm_steps(steps: int = 5000) -> list[float]:
    times = []
    with _local_link() as (link, agent_socket):
        agent_socket.send(_packet(1, 8))
        choice = link.choose(8)
        for step in range(1, steps + 1):
            start = time.perf_counter()
            _report(link, step, choice, 1)
            choice = link.choose(8)
            times.append(time.perf_counter() - start)
            agent_socket.recv(4096)
    return times


def _warm_reports(steps: int = 5000) -> list[float]:
    times = []
    with _local_link() as (link, agent_socket):
        choice = link.choose(8)
        for step in range(1, steps + 1):
            start = time.perf_counter()
            link.report(lambda report, step=step: _fill_large(report, step, choice))  # type: ignore[misc]
            times.append(time.perf_counter() - start)
            agent_socket.recv(4096)
    return times


def _warm_plans(rows: int, *, is_new: bool, count: int = 2000) -> list[float]:
    times = []
    with _local_link() as (link, agent_socket):
        for epoch in range(1, count + 1):
            agent_socket.send(_packet(epoch, rows, shift=epoch if is_new else 0))
            start = time.perf_counter()
            choice = link.choose(8)
            times.append(time.perf_counter() - start)
            assert choice.epoch == epoch
    return times


def _packet(epoch: int, rows: int, shift: int = 0) -> bytes:
    """A plan as the agent sends it; one of more than eight rows has rules."""
    mixture = _NAMES[-1]
    plan = Plan(epoch=epoch, session=1, lease_ms=600_000)
    for place in range(rows):
        drafter = mixture if rows > len(_BUCKETS) and place % 2 else _NAMES[0]
        plan.rows.add(max_batch_size=4 * place + 1 + shift, drafter=drafter, gamma=_GAMMA)
    if rows > len(_BUCKETS):
        plan.rules.extend(
            MixtureRule(
                drafter=mixture,
                gamma=gamma,
                main_expected=1.5,
                free_expected=(0.5, 1.0, 1.5, 2.0),
                least_match=2,
                ratio_weight=0.1,
            )
            for gamma in (1, 2, 3)
        )
    return encode_plan(ArrivedPlan(plan, time.monotonic_ns(), table_digest(plan)))


def _busy_until(due: float) -> float:
    while time.perf_counter() < due:
        pass
    return due


@contextlib.contextmanager
def _floor() -> Iterator[socket.socket]:
    """A socket with a process at its other end that only reads."""
    local_socket, peer_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [
        sys.executable,
        "-m",
        "tools.bench.link_bench",
        "--drain",
        str(peer_socket.fileno()),
    ]
    with subprocess.Popen(command, pass_fds=[peer_socket.fileno()]), local_socket:
        peer_socket.close()
        local_socket.settimeout(20)
        local_socket.recv(100)  # it is up
        local_socket.settimeout(0)
        yield local_socket


def _drain(fd: int) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with socket.socket(fileno=fd) as peer_socket:
        peer_socket.send(b"up")
        while peer_socket.recv(4096):
            pass


def _round_trips(link: EngineLink, first: int, count: int) -> list[float]:
    """Seconds from a report to the plan that answers it, at the engine."""
    times = []
    for step in range(first + 1, first + count + 1):
        choice = link.choose(8)
        start = time.perf_counter()
        _report(link, step, choice, plan_every=1)
        while link.choose(8).epoch == choice.epoch:
            if time.perf_counter() - start > 5:
                raise TimeoutError(f"no plan within 5 s: {link.status()}")
        times.append(time.perf_counter() - start)
        time.sleep(0.001)
    return times


class _MinimalSidecar(SpeculationServiceServicer):
    """The least sidecar that there can be: it counts reports and renews a plan of eight rows.

    answers_all: it answers each message, and has two in flight as a sidecar has; otherwise it
    answers after as many reports as their kv_tokens say.
    """

    def __init__(self, *, answers_all: bool) -> None:
        self._answers_all = answers_all
        rows = [PlanRow(max_batch_size=b, drafter="eagle3", gamma=_GAMMA) for b in _BUCKETS]
        self._newest_plan = Plan(rows=rows, lease_ms=5000)

    def _plan(self) -> Plan:
        self._newest_plan.epoch += 1
        return self._newest_plan

    async def Introduce(self, request: IntroduceRequest, context: Any) -> IntroduceResponse:
        return IntroduceResponse(
            session_id="bench",
            plan=self._plan(),
            messages_in_flight_max=2 if self._answers_all else 0,
        )

    async def Steer(
        self, request_iterator: AsyncIterator[SteerRequest], context: Any
    ) -> AsyncIterator[SteerResponse]:
        received = Received()
        async for request in request_iterator:
            reports_before = received.reports
            received.reports += len(request.reports)
            every = 1 if self._answers_all or not request.reports else request.reports[-1].kv_tokens
            if not request.reports or received.reports // every > reports_before // every:
                yield SteerResponse(plan=self._plan(), received_so_far=received)

    async def Decide(self, request: DecideRequest, context: Any) -> DecideResponse:
        raise NotImplementedError


async def _serve(target: str, *, answers_all: bool) -> None:
    server = grpc.aio.server()
    servicer = _MinimalSidecar(answers_all=answers_all)
    add_SpeculationServiceServicer_to_server(servicer, server)
    server.add_insecure_port(target)
    await server.start()
    await server.wait_for_termination()


PARSER = command_line(__doc__, repeats=5)
PARSER.add_argument("--steps", type=int, default=2000, help="of one run")
PARSER.add_argument("--rate", type=float, default=500.0, help="steps per second")
PARSER.add_argument(
    "--plan-every", type=int, default=20, help="number of reports between two plans"
)
PARSER.add_argument("--report-interval-ms", type=float, default=1.0)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--drain"]:
        _drain(int(sys.argv[2]))
    elif sys.argv[1:2] == ["--serve"]:
        asyncio.run(_serve(sys.argv[2], answers_all="--all" in sys.argv))
    else:
        run(PARSER, measure)

"""Faults between an engine and its sidecar: the agent, the sockets, a proxy in between."""

import os
import signal
import time
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2

from engine_shim.link.plan_follower import Source
from lab.harness.processes import free_port
from tests.support.eventually import eventually
from tests.support.linked_engine import linked_engine
from tests.support.service_harness import health_stub
from tests.support.sidecar_process import sidecar_process
from tests.support.step_reports import send, step_report
from tools.faults.driving import (
    LEFT_ALONE,
    PATIENCE_SECONDS,
    PIN,
    PINNED_GAMMA,
    SAFE_GAMMA,
    SHORT,
    SHORT_GRACE_SECONDS,
    Scene,
    engines_at,
    scene,
)
from tools.faults.fault import ALONE, ON, Seen, fault
from tools.faults.proxy import Proxy

_DELAY_SECONDS = 1.0
_LOWER_GAMMA = PINNED_GAMMA - 2
_RENEWALS = 3
_DROPPED = 500
# More than buffers of 256 reports and of sockets hold.
_PILE_MEGABYTES = 16.0


def went_on(here: Scene, seen: Seen, since: float) -> None:
    """Checks that the engine was steered, or kept its plan, all the time."""
    drive = here.drive
    drive.wait_for_steps()
    ran = drive.since(since)
    safe = [one for one in ran if one.source is Source.SAFE_DEFAULT]
    seen.that("the plan goes on", not safe, drive.sources(since))
    gammas = {one.gamma for one in ran}
    seen.that(f"γ = {PINNED_GAMMA} in every step", gammas == {PINNED_GAMMA}, gammas)
    seen.figure("longest_step_seconds", drive.longest_step_seconds)


def left_alone(here: Scene, seen: Seen, since: float) -> None:
    """Checks that the engine went from its plan through the grace to the safe default."""
    sources = here.drive.sources(since)
    seen.that("plan, then grace, then safe default", sources[:3] == LEFT_ALONE, sources)
    ran = here.drive.since(since)
    held = {one.gamma for one in ran if one.source is not Source.SAFE_DEFAULT}
    safe = {one.gamma for one in ran if one.source is Source.SAFE_DEFAULT}
    seen.that(
        f"γ = {PINNED_GAMMA} while the plan is held, {SAFE_GAMMA} by default",
        (held, safe) == ({PINNED_GAMMA}, {SAFE_GAMMA}),
        (held, safe),
    )
    seen.figure("longest_step_seconds", here.drive.longest_step_seconds)


def steered_again(
    here: Scene, seen: Seen, moment: float, other_session_than: int | None = None
) -> None:
    """Checks that a plan steers again, under the override acknowledged before."""
    took = here.drive.wait_for(Source.PLAN, moment, other_session_than)
    seen.figure("steered_again_seconds", took)
    now = here.drive.now
    seen.that(f"steered again, at γ = {PINNED_GAMMA}", now.gamma == PINNED_GAMMA, now)
    in_force = here.operator.in_force()
    seen.that("the override is in force", PIN in in_force, in_force)


def stopped_and_continued(here: Scene, seen: Seen, pid: int) -> None:
    """Stops agent or sidecar until lease and grace are over, then continues it."""

    # The same two processes to the end: a new agent would have another id.
    processes = [psutil.Process(pid) for pid in (agent_of(here), here.sidecars.pid)]

    def megabytes() -> float:
        return sum(process.memory_info().rss for process in processes) / 1e6

    moment, before = time.monotonic(), megabytes()
    os.kill(pid, signal.SIGSTOP)
    here.drive.wait_for(Source.SAFE_DEFAULT, moment)
    here.drive.wait_for_steps()
    left_alone(here, seen, moment)
    moment = time.monotonic()
    os.kill(pid, signal.SIGCONT)
    steered_again(here, seen, moment)
    ran = {(one.source, one.gamma) for one in here.drive.since(moment)}
    wanted = {(Source.PLAN, PINNED_GAMMA), (Source.SAFE_DEFAULT, SAFE_GAMMA)}
    seen.that("no other plan ran", ran <= wanted, ran)
    # What arrived meanwhile must not stay in memory.
    grown = megabytes() - before
    seen.figure("grown_megabytes", grown)
    seen.that("nothing has piled up", grown < _PILE_MEGABYTES, grown)


def agent_of(here: Scene) -> int:
    """The agent's process id."""
    pid = here.drive.engine.link.status().agent_pid
    assert pid is not None
    return pid


def new_session(here: Scene) -> float:
    """Kills the agent; seconds until its successor's first plan."""
    moment, before = time.monotonic(), here.drive.now
    os.kill(agent_of(here), signal.SIGKILL)
    return here.drive.wait_for(Source.PLAN, moment, before.session)


@fault("agent-killed", f"{ON}; a new agent in a new session")
def agent_killed(place: Path, seen: Seen) -> None:
    """SIGKILL to the agent."""
    with scene(place) as here:
        moment, before = time.monotonic(), here.drive.now
        os.kill(agent_of(here), signal.SIGKILL)
        steered_again(here, seen, moment, before.session)
        went_on(here, seen, moment)
        starts = here.drive.engine.link.status().agent_starts
        seen.that("one new agent", starts == 2, starts)


@fault("agent-stopped", ALONE)
def agent_stopped(place: Path, seen: Seen) -> None:
    """SIGSTOP to the agent until the safe default runs, SIGCONT."""
    with scene(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as here:
        agent = agent_of(here)
        stopped_and_continued(here, seen, agent)
        seen.that("the same agent", agent_of(here) == agent, agent_of(here))


@fault("socket-buffers-full", "reports are dropped and counted, no step waits")
def buffers_full(place: Path, seen: Seen) -> None:
    """The agent is stopped and reads nothing; the engine steps as fast as it can."""
    with sidecar_process(place) as sidecar, linked_engine(sidecar.address) as engine:
        link = engine.link
        agent = link.status().agent_pid
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)
        made, longest = 0, 0.0
        while link.status().reports_dropped < _DROPPED:
            began = time.perf_counter()
            send(link, step_report(made + 1, (1, 3), kv_tokens=2048))
            link.choose(4)
            longest = max(longest, time.perf_counter() - began)
            made += 1
        seen.that(f"{_DROPPED} reports are dropped, none waits", made < 100_000, made)
        seen.figure("longest_report_and_choose_seconds", longest)
        os.kill(agent, signal.SIGCONT)

        def taken() -> bool:
            nonlocal made
            made += 1
            return send(link, step_report(made, (1, 3), kv_tokens=2048))

        def counted() -> bool:
            link.poll()
            status = engines_at(sidecar.address).engines[0]
            return status.dropped_reports + status.reports + status.rejected_reports == made

        eventually(taken, within=PATIENCE_SECONDS, what="a report is taken again")
        eventually(counted, within=PATIENCE_SECONDS, what="every report has come or is counted")
        seen.that("each report has come, or is counted as dropped, once the agent reads", True)


@fault("connections-reset", f"{ON}; a new session at once", quick=True)
def connections_reset(place: Path, seen: Seen) -> None:
    """A TCP proxy between agent and sidecar resets (RST) five times."""
    tcp = f"127.0.0.1:{free_port()}"
    with (
        Proxy(f"127.0.0.1:{free_port()}", tcp) as proxy,
        scene(place, "--tcp", tcp, address=proxy.address) as here,
    ):
        took, counts, began = [], [], time.monotonic()
        for _ in range(5):
            moment, before = time.monotonic(), here.drive.now
            counts.append(proxy.reset())
            took.append(here.drive.wait_for(Source.PLAN, moment, before.session))
        seen.that("introduced again after each of 5 resets", min(counts) >= 1, counts)
        seen.spread("new_session_seconds", took)
        went_on(here, seen, began)
        starts = here.drive.engine.link.status().agent_starts
        seen.that("the same agent", starts == 1, starts)


@fault("sidecar-slow", "it introduces itself, and is steered all along", quick=True)
def sidecar_slow(place: Path, seen: Seen) -> None:
    """A proxy between agent and sidecar: every byte to the agent 1 s late."""
    slow = f"unix:{place}/slow.sock"
    with Proxy(slow, f"unix:{place}/controller.sock") as proxy:
        proxy.delay_seconds = _DELAY_SECONDS
        began = time.monotonic()
        with scene(place, address=slow) as here:
            seen.figure("introduced_seconds", time.monotonic() - began)
            seen.that("it introduces itself", True)
            moment, link = time.monotonic(), here.drive.engine.link
            before = link.status()
            here.operator.pin("lower", gamma=_LOWER_GAMMA)
            eventually(
                lambda: here.drive.now.gamma == _LOWER_GAMMA,
                within=PATIENCE_SECONDS,
                what="the override reaches the engine",
            )
            seen.figure("override_to_engine_seconds", here.drive.now.at - moment)
            eventually(
                lambda: link.status().plans_taken >= before.plans_taken + _RENEWALS,
                within=PATIENCE_SECONDS,
                what="leases are renewed",
            )
            here.drive.wait_for_steps()
            sources = here.drive.sources(moment)
            seen.that("steered all along", Source.SAFE_DEFAULT not in sources, sources)
            seen.figure("leases_lost", link.status().lapses - before.lapses)


@fault(
    "socket-file-deleted",
    "the open stream steers on; health says so; a new agent finds it after a restart",
)
def socket_file_deleted(place: Path, seen: Seen) -> None:
    """rm of the sidecar's socket, then SIGKILL to the agent."""
    with scene(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as here:
        socket_file = place / "controller.sock"
        # A second name of the socket, to ask the sidecar after the first is deleted.
        hidden = place / "hidden.sock"
        hidden.hardlink_to(socket_file)
        moment, before = time.monotonic(), here.drive.now
        socket_file.unlink()
        here.drive.wait_for_steps(200)
        went_on(here, seen, moment)
        os.kill(agent_of(here), signal.SIGKILL)
        here.drive.wait_for(Source.SAFE_DEFAULT, moment)
        left_alone(here, seen, moment)
        health = _health(f"unix:{hidden}")
        seen.that("health is NOT_SERVING", health == "NOT_SERVING", health)
        log = here.sidecars.log.read_text()
        seen.that("the log says so", "sockets_lost" in log, log[-300:])
        steered_again(here, seen, here.sidecars.restart(), before.session)


def _health(address: str) -> str:
    """The health status of the whole process."""
    with grpc.insecure_channel(address) as channel:
        answer = health_stub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS
        )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

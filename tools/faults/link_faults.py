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
    LAPSE_SOURCES,
    PATIENCE_SECONDS,
    PIN,
    PINNED_GAMMA,
    SAFE_GAMMA,
    SHORT,
    SHORT_GRACE_SECONDS,
    LinkTestbed,
    list_engines,
    open_testbed,
)
from tools.faults.fault import LAPSE_EXPECTED, PLAN_CONTINUES, Observations, fault
from tools.faults.proxy import Proxy

_DELAY_SECONDS = 1.0
_LOWER_GAMMA = PINNED_GAMMA - 2
_RENEWALS = 3
_DROPPED = 500
# More than buffers of 256 reports and of sockets hold.
_PILE_MEGABYTES = 16.0


def check_plan_continues(testbed: LinkTestbed, observations: Observations, start: float) -> None:
    """Checks that the engine was steered, or kept its plan, all the time."""
    drive = testbed.drive
    drive.wait_for_steps()
    executed = drive.choices_since(start)
    safe_choices = [choice for choice in executed if choice.source is Source.SAFE_DEFAULT]
    observations.check("the plan continues", not safe_choices, drive.sources_since(start))
    gammas = {choice.gamma for choice in executed}
    observations.check(f"γ = {PINNED_GAMMA} in every step", gammas == {PINNED_GAMMA}, gammas)
    observations.figure("longest_step_seconds", drive.longest_step_seconds)


def check_fallback(testbed: LinkTestbed, observations: Observations, start: float) -> None:
    """Checks that the engine went from its plan through the grace to the safe default."""
    sources = testbed.drive.sources_since(start)
    observations.check("plan, then grace, then safe default", sources[:3] == LAPSE_SOURCES, sources)
    executed = testbed.drive.choices_since(start)
    held_gammas = {choice.gamma for choice in executed if choice.source is not Source.SAFE_DEFAULT}
    safe_gammas = {choice.gamma for choice in executed if choice.source is Source.SAFE_DEFAULT}
    observations.check(
        f"γ = {PINNED_GAMMA} while the plan is held, {SAFE_GAMMA} by default",
        (held_gammas, safe_gammas) == ({PINNED_GAMMA}, {SAFE_GAMMA}),
        (held_gammas, safe_gammas),
    )
    observations.figure("longest_step_seconds", testbed.drive.longest_step_seconds)


def check_steered_again(
    testbed: LinkTestbed,
    observations: Observations,
    moment: float,
    excluded_session: int | None = None,
) -> None:
    """Checks that a plan steers again, under the override acknowledged before."""
    seconds = testbed.drive.wait_for(Source.PLAN, moment, excluded_session)
    observations.figure("steered_again_seconds", seconds)
    now = testbed.drive.current
    observations.check(f"steered again, at γ = {PINNED_GAMMA}", now.gamma == PINNED_GAMMA, now)
    active_ids = testbed.operator.active_override_ids()
    observations.check("the override is in force", PIN in active_ids, active_ids)


def stop_and_continue(testbed: LinkTestbed, observations: Observations, pid: int) -> None:
    """Stops agent or sidecar until lease and grace are over, then continues it."""

    # The same two processes to the end: a new agent would have another id.
    processes = [psutil.Process(pid) for pid in (agent_pid(testbed), testbed.sidecars.pid)]

    def megabytes() -> float:
        return sum(process.memory_info().rss for process in processes) / 1e6

    moment, megabytes_before = time.monotonic(), megabytes()
    os.kill(pid, signal.SIGSTOP)
    testbed.drive.wait_for(Source.SAFE_DEFAULT, moment)
    testbed.drive.wait_for_steps()
    check_fallback(testbed, observations, moment)
    moment = time.monotonic()
    os.kill(pid, signal.SIGCONT)
    check_steered_again(testbed, observations, moment)
    executed = {(choice.source, choice.gamma) for choice in testbed.drive.choices_since(moment)}
    allowed = {(Source.PLAN, PINNED_GAMMA), (Source.SAFE_DEFAULT, SAFE_GAMMA)}
    observations.check("no other plan ran", executed <= allowed, executed)
    # What arrived meanwhile must not stay in memory.
    grown = megabytes() - megabytes_before
    observations.figure("grown_megabytes", grown)
    observations.check("nothing has piled up", grown < _PILE_MEGABYTES, grown)


def agent_pid(testbed: LinkTestbed) -> int:
    """The agent's process id."""
    pid = testbed.drive.engine.link.status().agent_pid
    assert pid is not None
    return pid


def replace_agent(testbed: LinkTestbed) -> float:
    """Kills the agent; seconds until its successor's first plan."""
    moment, choice_before = time.monotonic(), testbed.drive.current
    os.kill(agent_pid(testbed), signal.SIGKILL)
    return testbed.drive.wait_for(Source.PLAN, moment, choice_before.session)


@fault("agent-killed", f"{PLAN_CONTINUES}; a new agent in a new session")
def agent_killed(place: Path, observations: Observations) -> None:
    """SIGKILL to the agent."""
    with open_testbed(place) as testbed:
        moment, choice_before = time.monotonic(), testbed.drive.current
        os.kill(agent_pid(testbed), signal.SIGKILL)
        check_steered_again(testbed, observations, moment, choice_before.session)
        check_plan_continues(testbed, observations, moment)
        starts = testbed.drive.engine.link.status().agent_starts
        observations.check("one new agent", starts == 2, starts)


@fault("agent-stopped", LAPSE_EXPECTED)
def agent_stopped(place: Path, observations: Observations) -> None:
    """SIGSTOP to the agent until the safe default runs, SIGCONT."""
    with open_testbed(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as testbed:
        agent = agent_pid(testbed)
        stop_and_continue(testbed, observations, agent)
        observations.check("the same agent", agent_pid(testbed) == agent, agent_pid(testbed))


@fault("socket-buffers-full", "reports are dropped and counted, no step waits")
def buffers_full(place: Path, observations: Observations) -> None:
    """The agent is stopped and reads nothing; the engine steps as fast as it can."""
    with sidecar_process(place) as sidecar, linked_engine(sidecar.address) as engine:
        link = engine.link
        agent = link.status().agent_pid
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)
        sent_reports, longest_seconds = 0, 0.0
        while link.status().reports_dropped < _DROPPED:
            start = time.perf_counter()
            send(link, step_report(sent_reports + 1, (1, 3), kv_tokens=2048))
            link.choose(4)
            longest_seconds = max(longest_seconds, time.perf_counter() - start)
            sent_reports += 1
        observations.check(
            f"{_DROPPED} reports are dropped, none waits", sent_reports < 100_000, sent_reports
        )
        observations.figure("longest_report_and_choose_seconds", longest_seconds)
        os.kill(agent, signal.SIGCONT)

        def send_one() -> bool:
            nonlocal sent_reports
            sent_reports += 1
            return send(link, step_report(sent_reports, (1, 3), kv_tokens=2048))

        def is_accounted() -> bool:
            link.poll()
            status = list_engines(sidecar.address).engines[0]
            return status.dropped_reports + status.reports + status.rejected_reports == sent_reports

        eventually(
            send_one, timeout_seconds=PATIENCE_SECONDS, description="a report is taken again"
        )
        eventually(
            is_accounted,
            timeout_seconds=PATIENCE_SECONDS,
            description="every report has come or is counted",
        )
        observations.check(
            "each report has come, or is counted as dropped, once the agent reads", True
        )


@fault("connections-reset", f"{PLAN_CONTINUES}; a new session at once", quick=True)
def connections_reset(place: Path, observations: Observations) -> None:
    """A TCP proxy between agent and sidecar resets (RST) five times."""
    tcp = f"127.0.0.1:{free_port()}"
    with (
        Proxy(f"127.0.0.1:{free_port()}", tcp) as proxy,
        open_testbed(place, "--tcp", tcp, address=proxy.address) as testbed,
    ):
        durations, counts, start = [], [], time.monotonic()
        for _ in range(5):
            moment, choice_before = time.monotonic(), testbed.drive.current
            counts.append(proxy.reset())
            durations.append(testbed.drive.wait_for(Source.PLAN, moment, choice_before.session))
        observations.check("introduced again after each of 5 resets", min(counts) >= 1, counts)
        observations.spread("new_session_seconds", durations)
        check_plan_continues(testbed, observations, start)
        starts = testbed.drive.engine.link.status().agent_starts
        observations.check("the same agent", starts == 1, starts)


@fault("sidecar-slow", "it introduces itself, and is steered all along", quick=True)
def sidecar_slow(place: Path, observations: Observations) -> None:
    """A proxy between agent and sidecar: every byte to the agent 1 s late."""
    slow = f"unix:{place}/slow.sock"
    with Proxy(slow, f"unix:{place}/controller.sock") as proxy:
        proxy.delay_seconds = _DELAY_SECONDS
        start = time.monotonic()
        with open_testbed(place, address=slow) as testbed:
            observations.figure("introduced_seconds", time.monotonic() - start)
            observations.check("it introduces itself", True)
            moment, link = time.monotonic(), testbed.drive.engine.link
            status_before = link.status()
            testbed.operator.pin("lower", gamma=_LOWER_GAMMA)
            eventually(
                lambda: testbed.drive.current.gamma == _LOWER_GAMMA,
                timeout_seconds=PATIENCE_SECONDS,
                description="the override reaches the engine",
            )
            observations.figure(
                "override_to_engine_seconds", testbed.drive.current.seconds - moment
            )
            eventually(
                lambda: link.status().plans_taken >= status_before.plans_taken + _RENEWALS,
                timeout_seconds=PATIENCE_SECONDS,
                description="leases are renewed",
            )
            testbed.drive.wait_for_steps()
            sources = testbed.drive.sources_since(moment)
            observations.check("steered all along", Source.SAFE_DEFAULT not in sources, sources)
            observations.figure("leases_lost", link.status().lapses - status_before.lapses)


@fault(
    "socket-file-deleted",
    "the open stream steers on; health reports it; a new agent finds it after a restart",
)
def socket_file_deleted(place: Path, observations: Observations) -> None:
    """rm of the sidecar's socket, then SIGKILL to the agent."""
    with open_testbed(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as testbed:
        socket_file = place / "controller.sock"
        # A second name of the socket, to ask the sidecar after the first is deleted.
        hidden = place / "hidden.sock"
        hidden.hardlink_to(socket_file)
        moment, choice_before = time.monotonic(), testbed.drive.current
        socket_file.unlink()
        testbed.drive.wait_for_steps(200)
        check_plan_continues(testbed, observations, moment)
        os.kill(agent_pid(testbed), signal.SIGKILL)
        testbed.drive.wait_for(Source.SAFE_DEFAULT, moment)
        check_fallback(testbed, observations, moment)
        health = _health(f"unix:{hidden}")
        observations.check("health is NOT_SERVING", health == "NOT_SERVING", health)
        log = testbed.sidecars.log.read_text()
        observations.check("the log reports it", "sockets_lost" in log, log[-300:])
        check_steered_again(
            testbed, observations, testbed.sidecars.restart(), choice_before.session
        )


def _health(address: str) -> str:
    """The health status of the whole process."""
    with grpc.insecure_channel(address) as channel:
        answer = health_stub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS
        )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

"""Faults of the sidecar's process: killed, stopped, started twice, restarted again and again."""

import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from controller.util.exit_codes import Exit
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.sidecar_process import controller, sidecar_process
from tools.faults.driving import (
    PATIENCE_SECONDS,
    PIN,
    PINNED_GAMMA,
    SHORT,
    SHORT_GRACE_SECONDS,
    Operator,
    open_testbed,
)
from tools.faults.fault import LAPSE_EXPECTED, PLAN_CONTINUES, Observations, fault
from tools.faults.link_faults import (
    agent_pid,
    check_fallback,
    check_plan_continues,
    check_steered_again,
    stop_and_continue,
)

_STORM = 20
_CROWD = 64


@fault("sidecar-killed", LAPSE_EXPECTED)
def killed(place: Path, observations: Observations) -> None:
    """SIGKILL to the sidecar until the safe default runs, then started with the same state."""
    with open_testbed(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as testbed:
        moment, choice_before = time.monotonic(), testbed.drive.current
        testbed.sidecars.kill()
        testbed.drive.wait_for(Source.SAFE_DEFAULT, moment)
        check_fallback(testbed, observations, moment)
        check_steered_again(
            testbed, observations, testbed.sidecars.restart(), choice_before.session
        )
        observations.figure("start_to_serving_seconds", testbed.sidecars.current.seconds_to_serving)
        starts = testbed.drive.engine.link.status().agent_starts
        observations.check("the same agent", starts == 1, starts)


@fault("sidecar-stopped", LAPSE_EXPECTED)
def stopped(place: Path, observations: Observations) -> None:
    """SIGSTOP to the sidecar until the safe default runs, SIGCONT."""
    with open_testbed(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as testbed:
        stop_and_continue(testbed, observations, testbed.sidecars.pid)


@fault("two-sidecars", f"both refuse to start with their exit code; {PLAN_CONTINUES}")
def two_sidecars_at_one_address(place: Path, observations: Observations) -> None:
    """A second sidecar on the first one's socket, another on its state directory."""
    with open_testbed(place) as testbed:
        moment = time.monotonic()
        state = f"{place}/controller.sock.state"
        for code, text, *flags in (
            (
                Exit.TAKEN, "another sidecar is serving on", "--address",
                testbed.sidecars.current.address,
            ),
            (
                Exit.NO_STORE, "in use by another sidecar",
                "--address", f"unix:{place}/other.sock", "--state-directory", state,
            ),
        ):  # fmt: skip
            second = controller("serve", "--metrics-port", "0", *flags)
            observations.check(
                f"the second ends with {code.value}: “{text}”",
                second.returncode == code and text in second.stderr,
                (second.returncode, second.stderr[-300:]),
            )
        check_plan_continues(testbed, observations, moment)
        observations.check(
            "the override is in force", PIN in testbed.operator.active_override_ids()
        )


@fault("restart-storm", f"{PLAN_CONTINUES}; steered after each; the agent keeps no descriptor")
def storm(place: Path, observations: Observations) -> None:
    """The sidecar is killed and started 20 times in a row while the engine runs."""
    with open_testbed(place) as testbed:
        start_time = time.monotonic()
        agent = psutil.Process(agent_pid(testbed))
        descriptors, durations = [], []
        for _ in range(_STORM):
            descriptors_before = testbed.drive.current
            durations.append(
                testbed.drive.wait_for(
                    Source.PLAN, testbed.sidecars.restart(), descriptors_before.session
                )
            )
            descriptors.append(agent.num_fds())
        check_plan_continues(testbed, observations, start_time)
        observations.spread("steered_again_seconds", durations)
        observations.check(
            f"{_STORM} restarts leave the agent no more descriptors",
            max(descriptors[_STORM // 2 :]) <= max(descriptors[: _STORM // 2]),
            descriptors,
        )
        status = testbed.drive.engine.link.status()
        observations.check("the same agent", status.agent_starts == 1, status.agent_starts)
        observations.check(
            "the override is in force", PIN in testbed.operator.active_override_ids()
        )


@fault("introducing-crowd", "all are steered again under what was acknowledged")
def crowd(place: Path, observations: Observations) -> None:
    """The sidecar of 64 agents is killed and started."""
    with ExitStack() as engines:
        first = ExitStack()
        sidecar = first.enter_context(sidecar_process(place, log=place / "sidecar.log"))
        operator = Operator(sidecar.address)
        operator.pin()
        links = []
        for number in range(_CROWD):
            link = EngineLink.start(
                engine_spec(f"engine-{number}"), LinkSettings(sidecar=sidecar.address), 1
            )
            engines.callback(link.close)
            links.append(link)
        sessions = _wait_steered(links, set())
        first.close()
        start = time.monotonic()
        second_sidecar = engines.enter_context(sidecar_process(place, log=place / "sidecar.log"))
        fresh = _wait_steered(links, sessions)
        observations.figure("all_steered_again_seconds", time.monotonic() - start)
        observations.check(f"{_CROWD} engines are steered again", len(fresh) == _CROWD, len(fresh))
        gammas = {link.choose(4).gamma for link in links}
        observations.check(f"each at γ = {PINNED_GAMMA}", gammas == {PINNED_GAMMA}, gammas)
        memory = psutil.Process(second_sidecar.process.pid).memory_info().rss / 1e6
        observations.figure("sidecar_megabytes", memory)


def _wait_steered(links: list[EngineLink], old_sessions: set[int]) -> set[int]:
    """Sessions of all of them, once each has a plan of another one."""

    def sessions() -> set[int]:
        choices = [link.choose(4) for link in links]
        new = {c.session for c in choices if c.source is Source.PLAN} - old_sessions
        return new if len(new) == len(links) else set()

    return eventually(sessions, timeout_seconds=4 * PATIENCE_SECONDS, description="all are steered")

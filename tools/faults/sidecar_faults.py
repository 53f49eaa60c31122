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
    scene,
)
from tools.faults.fault import ALONE, ON, Seen, fault
from tools.faults.link_faults import (
    agent_of,
    left_alone,
    steered_again,
    stopped_and_continued,
    went_on,
)

_STORM = 20
_CROWD = 64


@fault("sidecar-killed", ALONE)
def killed(place: Path, seen: Seen) -> None:
    """SIGKILL to the sidecar until the safe default runs, then started with the same state."""
    with scene(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as here:
        moment, before = time.monotonic(), here.drive.now
        here.sidecars.kill()
        here.drive.wait_for(Source.SAFE_DEFAULT, moment)
        left_alone(here, seen, moment)
        steered_again(here, seen, here.sidecars.restart(), before.session)
        seen.figure("start_to_serving_seconds", here.sidecars.now.seconds_to_serving)
        starts = here.drive.engine.link.status().agent_starts
        seen.that("the same agent", starts == 1, starts)


@fault("sidecar-stopped", ALONE)
def stopped(place: Path, seen: Seen) -> None:
    """SIGSTOP to the sidecar until the safe default runs, SIGCONT."""
    with scene(place, environment=SHORT, grace_seconds=SHORT_GRACE_SECONDS) as here:
        stopped_and_continued(here, seen, here.sidecars.pid)


@fault("two-sidecars", f"both refuse to start with their exit code; {ON}")
def two_at_one_place(place: Path, seen: Seen) -> None:
    """A second sidecar on the first one's socket, another on its state directory."""
    with scene(place) as here:
        moment = time.monotonic()
        state = f"{place}/controller.sock.state"
        for code, text, *flags in (
            (Exit.TAKEN, "another sidecar is serving on", "--address", here.sidecars.now.address),
            (
                Exit.NO_STORE, "in use by another sidecar",
                "--address", f"unix:{place}/other.sock", "--state-directory", state,
            ),
        ):  # fmt: skip
            second = controller("serve", "--metrics-port", "0", *flags)
            seen.that(
                f"the second ends with {code.value}: “{text}”",
                second.returncode == code and text in second.stderr,
                (second.returncode, second.stderr[-300:]),
            )
        went_on(here, seen, moment)
        seen.that("the override is in force", PIN in here.operator.in_force())


@fault("restart-storm", f"{ON}; steered after each; the agent keeps no descriptor")
def storm(place: Path, seen: Seen) -> None:
    """The sidecar is killed and started 20 times in a row while the engine runs."""
    with scene(place) as here:
        began = time.monotonic()
        agent = psutil.Process(agent_of(here))
        descriptors, took = [], []
        for _ in range(_STORM):
            before = here.drive.now
            took.append(here.drive.wait_for(Source.PLAN, here.sidecars.restart(), before.session))
            descriptors.append(agent.num_fds())
        went_on(here, seen, began)
        seen.spread("steered_again_seconds", took)
        seen.that(
            f"{_STORM} restarts leave the agent no more descriptors",
            max(descriptors[_STORM // 2 :]) <= max(descriptors[: _STORM // 2]),
            descriptors,
        )
        status = here.drive.engine.link.status()
        seen.that("the same agent", status.agent_starts == 1, status.agent_starts)
        seen.that("the override is in force", PIN in here.operator.in_force())


@fault("introducing-crowd", "all are steered again under what was acknowledged")
def crowd(place: Path, seen: Seen) -> None:
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
        sessions = _steered(links, set())
        first.close()
        began = time.monotonic()
        again = engines.enter_context(sidecar_process(place, log=place / "sidecar.log"))
        fresh = _steered(links, sessions)
        seen.figure("all_steered_again_seconds", time.monotonic() - began)
        seen.that(f"{_CROWD} engines are steered again", len(fresh) == _CROWD, len(fresh))
        gammas = {link.choose(4).gamma for link in links}
        seen.that(f"each at γ = {PINNED_GAMMA}", gammas == {PINNED_GAMMA}, gammas)
        memory = psutil.Process(again.process.pid).memory_info().rss / 1e6
        seen.figure("sidecar_megabytes", memory)


def _steered(links: list[EngineLink], before: set[int]) -> set[int]:
    """Sessions of all of them, once each has a plan of one that is none of those."""

    def sessions() -> set[int]:
        chosen = [link.choose(4) for link in links]
        new = {c.session for c in chosen if c.source is Source.PLAN} - before
        return new if len(new) == len(links) else set()

    return eventually(sessions, within=4 * PATIENCE_SECONDS, what="all are steered")

"""Faults beside the real SGLang while it answers: every token is plain decoding's."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias

from lab.harness.background_thread import BackgroundThread
from tests.support.engine import EAGLE3, ROOT, EngineProcess, serving
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import LENGTHS, PROMPTS
from tools.faults.driving import PIN, PINNED_GAMMA, SHORT, Sidecars
from tools.faults.fault import Fault, Injection, Seen, fault, said_of
from tools.faults.proxy import Proxy

PATIENCE_SECONDS = 120.0
# What the engine starts with, hence its safe default.
SAFE_GAMMA = 3
_STORM = 20
_PAIRS = 9
_TRAINER_FILE = "tests/system/engine/test_engine_online.py"
# It learns first, so that there is something to go on with.
_TRAINER = (
    f"{_TRAINER_FILE}::test_it_learns_what_it_serves_and_never_changes_a_token",
    f"{_TRAINER_FILE}::test_a_trainer_that_is_killed_takes_nothing_with_it",
)

_EXACT = "tokens exact"
_SAFE = f"plan, grace, safe default, then steered again; {_EXACT}"

Tokens = Sequence[Sequence[int]]


class Traffic(BackgroundThread):
    """The prompts again and again on a thread while the context is open."""

    def __init__(self, engine: EngineProcess, plain: Tokens) -> None:
        super().__init__("traffic", PATIENCE_SECONDS)
        self._engine, self._plain = engine, plain
        self.answers = self.wrong = 0
        self.failed = ""

    def __enter__(self) -> Self:
        super().__enter__()
        self.wait()
        return self

    def wait(self) -> None:
        """Until an answer that was asked for after now."""
        # The next one may have been under way.
        enough = self.answers + 2
        eventually(lambda: self.failed or self.answers >= enough, what="the engine answers")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                answers = self._engine.generate(PROMPTS, LENGTHS)
            except OSError as error:
                self.failed = repr(error)
                return
            self.wrong += [answer.tokens for answer in answers] != list(self._plain)
            self.answers += 1


class Stage:
    """One steered engine for all faults, behind a proxy; its sidecar comes and goes."""

    def __init__(
        self, engine: EngineProcess, sidecars: Sidecars, proxy: Proxy, plain: Tokens
    ) -> None:
        self.engine, self.sidecars, self.proxy, self.plain = engine, sidecars, proxy, plain

    @property
    def link(self) -> dict[str, Any]:
        """The state of the link, as the engine reports it."""
        found: dict[str, Any] = self.engine.internal_state()["speculation_controller"]
        return found

    def wait_source(self, source: str) -> dict[str, Any]:
        """Waits until choices come from the source; something must run steps meanwhile."""

        def reached() -> dict[str, Any] | None:
            link = self.link
            return link if link["source"] == source else None

        return eventually(reached, what=f"steps by {source}")

    def wait_steered(self) -> float:
        """Seconds until steps run under the pin."""
        began = time.monotonic()

        def steered() -> bool:
            self.engine.generate(PROMPTS[:1], [4])
            state = self.engine.internal_state()
            link, gamma = state["speculation_controller"], state["speculative_num_steps"]
            return (link["source"], link["sidecar"], gamma) == ("PLAN", "STEERING", PINNED_GAMMA)

        eventually(steered, what="steered under the pin")
        return time.monotonic() - began

    def agent(self) -> int:
        """The agent's process id."""
        return int(self.link["agent_pid"])


def plain_tokens(folder: Path) -> list[list[int]]:
    """The answers of an engine without speculation."""
    with serving(folder) as engine:
        return [answer.tokens for answer in engine.generate(PROMPTS, LENGTHS)]


@contextmanager
def staged(folder: Path, plain: Tokens) -> Iterator[Stage]:
    """An engine that is steered under an acknowledged pin."""
    address = f"unix:{folder}/proxy.sock"
    with contextlib.closing(Sidecars(folder, environment=SHORT)) as sidecars:
        sidecars.operator.pin()
        variables = {
            "SPECULATION_SIDECAR": address,
            "SPECULATION_GRACE_SECONDS": "1",
            # At its usual niceness a busy machine would starve the agent and hide the fault.
            "SPECULATION_AGENT_NICE": "0",
        }
        with (
            Proxy(address, sidecars.now.address) as proxy,
            serving(folder / "engine", EAGLE3, variables) as engine,
        ):
            stage = Stage(engine, sidecars, proxy, plain)
            stage.wait_steered()
            yield stage


@contextmanager
def on_stage() -> Iterator[Callable[[], Stage]]:
    """A stage that is set up when it is first asked for."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ExitStack() as stack:

        @functools.cache
        def stage() -> Stage:
            plain = plain_tokens(Path(name) / "plain")
            return stack.enter_context(staged(Path(name), plain))

        yield stage


_OnStage: TypeAlias = Callable[[Stage, Seen], None]
# By name: what is expected, and what injects it.
_ON_STAGE: dict[str, tuple[str, _OnStage]] = {}
# Those that are among the tests.
QUICK: list[str] = []


def _on_stage(name: str, expected: str, *, quick: bool = False) -> Callable[[_OnStage], _OnStage]:
    """Registers a function as a fault; its docstring says what it injects."""

    def keep(inject: _OnStage) -> _OnStage:
        _ON_STAGE[name] = (expected, inject)
        if quick:
            QUICK.append(f"engine-{name}")
        return inject

    return keep


@contextmanager
def _answering(stage: Stage, seen: Seen) -> Iterator[Traffic]:
    """Sends requests while the block runs; then checks their answers and the pin."""
    with Traffic(stage.engine, stage.plain) as traffic:
        yield traffic
        traffic.wait()
    seen.that(
        f"{traffic.answers} answers, every token as by plain decoding",
        not traffic.failed and not traffic.wrong,
        traffic.failed or f"{traffic.wrong} differ",
    )
    in_force = stage.sidecars.operator.in_force()
    seen.that("the override is in force", PIN in in_force, in_force)


def _left_alone(stage: Stage, seen: Seen, traffic: Traffic) -> None:
    """Checks that the safe default runs and the engine still answers."""
    stage.wait_source("SAFE_DEFAULT")
    traffic.wait()
    state = stage.engine.internal_state()
    gamma, source = state["speculative_num_steps"], state["speculation_controller"]["source"]
    seen.that(
        f"safe default, γ = {SAFE_GAMMA}",
        (gamma, source) == (SAFE_GAMMA, "SAFE_DEFAULT"),
        (gamma, source),
    )


@_on_stage("agent-killed", f"steered again; {_EXACT}", quick=True)
def _agent_killed(stage: Stage, seen: Seen) -> None:
    """SIGKILL to the agent."""
    with _answering(stage, seen) as traffic:
        before = stage.link
        os.kill(stage.agent(), signal.SIGKILL)
        eventually(lambda: stage.link["agent_starts"] > before["agent_starts"], what="a new agent")
        seen.figure("steered_again_seconds", stage.wait_steered())
        traffic.wait()
        lapses = stage.link["lapses"] - before["lapses"]
        seen.figure("leases_lost", lapses)
        seen.that("a new agent, and steered again", True)


def _stopped(stage: Stage, seen: Seen, pid: int) -> None:
    """SIGSTOP to a process, and SIGCONT once the safe default runs."""
    with _answering(stage, seen) as traffic:
        os.kill(pid, signal.SIGSTOP)
        try:
            _left_alone(stage, seen, traffic)
        finally:
            os.kill(pid, signal.SIGCONT)
        seen.figure("steered_again_seconds", stage.wait_steered())


@_on_stage("agent-stopped", _SAFE)
def _agent_stopped(stage: Stage, seen: Seen) -> None:
    """SIGSTOP to the agent, SIGCONT."""
    _stopped(stage, seen, stage.agent())


@_on_stage("sidecar-stopped", _SAFE)
def _sidecar_stopped(stage: Stage, seen: Seen) -> None:
    """SIGSTOP to the sidecar, SIGCONT."""
    _stopped(stage, seen, stage.sidecars.pid)


@_on_stage("sidecar-killed", _SAFE, quick=True)
def _sidecar_killed(stage: Stage, seen: Seen) -> None:
    """SIGKILL to the sidecar, then started with the same state."""
    with _answering(stage, seen) as traffic:
        stage.sidecars.kill()
        _left_alone(stage, seen, traffic)
        began = stage.sidecars.restart()
        stage.wait_steered()
        seen.figure("steered_again_seconds", time.monotonic() - began)


@_on_stage("sidecar-slow", f"steered; {_EXACT}")
def _sidecar_slow(stage: Stage, seen: Seen) -> None:
    """A proxy: every byte to the agent 1 s late, connected anew."""
    with _answering(stage, seen) as traffic:
        stage.proxy.delay_seconds = 1.0
        try:
            stage.proxy.reset()
            seen.figure("introduced_seconds", stage.wait_steered())
            traffic.wait()
            source = stage.link["source"]
            seen.that("steered by plans", source == "PLAN", source)
        finally:
            stage.proxy.delay_seconds = 0.0
    stage.wait_steered()


@_on_stage("connections-reset", f"steered again; {_EXACT}")
def _connections_reset(stage: Stage, seen: Seen) -> None:
    """A proxy closes all connections, five times."""
    with _answering(stage, seen):
        took = []
        for _ in range(5):
            stage.proxy.reset()
            took.append(stage.wait_steered())
        seen.spread("steered_again_seconds", took)


@_on_stage("restart-storm", f"steered after each; {_EXACT}")
def _storm(stage: Stage, seen: Seen) -> None:
    """The sidecar is killed and started 20 times in a row."""
    with _answering(stage, seen):
        starts = stage.link["agent_starts"]
        took = []
        for _ in range(_STORM):
            began = stage.sidecars.restart()
            stage.wait_steered()
            took.append(time.monotonic() - began)
        seen.spread("steered_again_seconds", took)
        more = stage.link["agent_starts"] - starts
        seen.that(f"steered after each of {_STORM} restarts, by the same agent", not more, more)


@_on_stage("dead-sidecar-throughput", f"as many tokens a second (bar 0.99, not asserted); {_EXACT}")
def _dead_over_safe(stage: Stage, seen: Seen) -> None:
    """The sidecar killed, and in turn alive with the safe default's γ pinned."""

    def tokens_per_second() -> float:
        began = time.perf_counter()
        answers = stage.engine.generate(PROMPTS, LENGTHS)
        wrong[0] += [answer.tokens for answer in answers] != list(stage.plain)
        return sum(LENGTHS) / (time.perf_counter() - began)

    def dead() -> float:
        stage.sidecars.kill()
        with Traffic(stage.engine, stage.plain):
            stage.wait_source("SAFE_DEFAULT")
        return tokens_per_second()

    def pinned() -> float:
        stage.sidecars.restart()
        stage.wait_steered()
        # Of two pins the lower one counts; an id is not taken again.
        name = f"safe-{time.monotonic_ns()}"
        stage.sidecars.operator.pin(name, SAFE_GAMMA)
        eventually(at_safe_gamma, what="the other pin")
        try:
            return tokens_per_second()
        finally:
            stage.sidecars.operator.clear(name)

    def at_safe_gamma() -> bool:
        stage.engine.generate(PROMPTS[:1], [4])
        return bool(stage.engine.internal_state()["speculative_num_steps"] == SAFE_GAMMA)

    wrong = [0]
    ratios = []
    for pair in range(_PAIRS):
        first, second = (dead, pinned) if pair % 2 else (pinned, dead)
        one, other = first(), second()
        ratios.append(one / other if first is dead else other / one)
    stage.sidecars.restart()
    stage.wait_steered()
    seen.spread("tokens_per_second_over_the_safe_defaults", ratios)
    seen.that("every token as by plain decoding", not wrong[0], wrong[0])


@fault("engine-trainer-killed", f"it serves on with what was learnt; {_EXACT}")
def _trainer_killed(_: Path, seen: Seen) -> None:
    """Real SGLang: SIGKILL to the trainer of online updates."""
    command = [sys.executable, "-m", "pytest", "-q", *_TRAINER]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seen.that(f"{_TRAINER[-1]} passes", run.returncode == 0, run.stdout[-500:])


def engine_faults(stage: Callable[[], Stage]) -> tuple[Fault, ...]:
    """The faults that are injected beside the real SGLang while it serves requests."""

    def on(inject: _OnStage) -> Injection:
        return lambda _, seen: inject(stage(), seen)

    found = (
        Fault(f"engine-{name}", f"real SGLang: {said_of(inject)}", expected, on(inject))
        for name, (expected, inject) in _ON_STAGE.items()
    )
    return (*found, _trainer_killed)

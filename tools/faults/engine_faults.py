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
from tests.support.engine import EAGLE3, ROOT, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import LENGTHS, PROMPTS
from tools.faults.driving import PIN, PINNED_GAMMA, SHORT, Sidecars
from tools.faults.fault import Fault, Injection, Observations, describe_injection, fault
from tools.faults.proxy import Proxy

PATIENCE_SECONDS = 120.0
# What the engine starts with, hence its safe default.
SAFE_GAMMA = 3
_STORM = 20
_PAIRS = 9
_TRAINER_FILE = "tests/system/engine/test_engine_online.py"
# It learns first, so that there is a state to continue from.
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
        """Waits for an answer to a request that is sent after this call."""
        # The next one may have been under way.
        target_answers = self.answers + 2
        eventually(
            lambda: self.failed or self.answers >= target_answers, description="the engine answers"
        )

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
        link_state: dict[str, Any] = self.engine.internal_state()["speculation_controller"]
        return link_state

    def wait_source(self, source: str) -> dict[str, Any]:
        """Waits until choices come from the source; something must run steps meanwhile."""

        def read_reached() -> dict[str, Any] | None:
            link = self.link
            return link if link["source"] == source else None

        return eventually(read_reached, description=f"steps by {source}")

    def wait_steered(self) -> float:
        """Seconds until steps run under the pin."""
        start = time.monotonic()

        def is_steered() -> bool:
            self.engine.generate(PROMPTS[:1], [4])
            state = self.engine.internal_state()
            link, gamma = state["speculation_controller"], state["speculative_num_steps"]
            return (link["source"], link["sidecar"], gamma) == ("PLAN", "STEERING", PINNED_GAMMA)

        eventually(is_steered, description="steered under the pin")
        return time.monotonic() - start

    def agent(self) -> int:
        """The agent's process id."""
        return int(self.link["agent_pid"])


def plain_tokens(folder: Path) -> list[list[int]]:
    """The answers of an engine without speculation."""
    with running_engine(folder) as engine:
        return [answer.tokens for answer in engine.generate(PROMPTS, LENGTHS)]


@contextmanager
def open_stage(folder: Path, expected_tokens: Tokens) -> Iterator[Stage]:
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
            Proxy(address, sidecars.current.address) as proxy,
            running_engine(folder / "engine", EAGLE3, variables) as engine,
        ):
            stage = Stage(engine, sidecars, proxy, expected_tokens)
            stage.wait_steered()
            yield stage


@contextmanager
def lazy_stage() -> Iterator[Callable[[], Stage]]:
    """A stage that is set up when it is first asked for."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ExitStack() as stack:

        @functools.cache
        def stage() -> Stage:
            plain = plain_tokens(Path(name) / "plain")
            return stack.enter_context(open_stage(Path(name), plain))

        yield stage


_StageInjection: TypeAlias = Callable[[Stage, Observations], None]
# By name: what is expected, and what injects it.
_STAGE_FAULTS: dict[str, tuple[str, _StageInjection]] = {}
# Those that are among the tests.
QUICK: list[str] = []


def _stage_fault(
    name: str, expected: str, *, quick: bool = False
) -> Callable[[_StageInjection], _StageInjection]:
    """Registers a function as a fault; its docstring says what it injects."""

    def register(inject: _StageInjection) -> _StageInjection:
        _STAGE_FAULTS[name] = (expected, inject)
        if quick:
            QUICK.append(f"engine-{name}")
        return inject

    return register


@contextmanager
def _run_traffic(stage: Stage, observations: Observations) -> Iterator[Traffic]:
    """Sends requests while the block runs; then checks their answers and the pin."""
    with Traffic(stage.engine, stage.plain) as traffic:
        yield traffic
        traffic.wait()
    observations.check(
        f"{traffic.answers} answers, every token as by plain decoding",
        not traffic.failed and not traffic.wrong,
        traffic.failed or f"{traffic.wrong} differ",
    )
    active_ids = stage.sidecars.operator.active_override_ids()
    observations.check("the override is in force", PIN in active_ids, active_ids)


def _check_safe_default(stage: Stage, observations: Observations, traffic: Traffic) -> None:
    """Checks that the safe default runs and the engine still answers."""
    stage.wait_source("SAFE_DEFAULT")
    traffic.wait()
    state = stage.engine.internal_state()
    gamma, source = state["speculative_num_steps"], state["speculation_controller"]["source"]
    observations.check(
        f"safe default, γ = {SAFE_GAMMA}",
        (gamma, source) == (SAFE_GAMMA, "SAFE_DEFAULT"),
        (gamma, source),
    )


@_stage_fault("agent-killed", f"steered again; {_EXACT}", quick=True)
def _agent_killed(stage: Stage, observations: Observations) -> None:
    """SIGKILL to the agent."""
    with _run_traffic(stage, observations) as traffic:
        link_before = stage.link
        os.kill(stage.agent(), signal.SIGKILL)
        eventually(
            lambda: stage.link["agent_starts"] > link_before["agent_starts"],
            description="a new agent",
        )
        observations.figure("steered_again_seconds", stage.wait_steered())
        traffic.wait()
        lapses = stage.link["lapses"] - link_before["lapses"]
        observations.figure("leases_lost", lapses)
        observations.check("a new agent, and steered again", True)


def _stop_and_continue(stage: Stage, observations: Observations, pid: int) -> None:
    """SIGSTOP to a process, and SIGCONT once the safe default runs."""
    with _run_traffic(stage, observations) as traffic:
        os.kill(pid, signal.SIGSTOP)
        try:
            _check_safe_default(stage, observations, traffic)
        finally:
            os.kill(pid, signal.SIGCONT)
        observations.figure("steered_again_seconds", stage.wait_steered())


@_stage_fault("agent-stopped", _SAFE)
def _agent_stopped(stage: Stage, observations: Observations) -> None:
    """SIGSTOP to the agent, SIGCONT."""
    _stop_and_continue(stage, observations, stage.agent())


@_stage_fault("sidecar-stopped", _SAFE)
def _sidecar_stopped(stage: Stage, observations: Observations) -> None:
    """SIGSTOP to the sidecar, SIGCONT."""
    _stop_and_continue(stage, observations, stage.sidecars.pid)


@_stage_fault("sidecar-killed", _SAFE, quick=True)
def _sidecar_killed(stage: Stage, observations: Observations) -> None:
    """SIGKILL to the sidecar, then started with the same state."""
    with _run_traffic(stage, observations) as traffic:
        stage.sidecars.kill()
        _check_safe_default(stage, observations, traffic)
        start_time = stage.sidecars.restart()
        stage.wait_steered()
        observations.figure("steered_again_seconds", time.monotonic() - start_time)


@_stage_fault("sidecar-slow", f"steered; {_EXACT}")
def _sidecar_slow(stage: Stage, observations: Observations) -> None:
    """Delays every byte to the agent by 1 s in a proxy, and then connects it again."""
    with _run_traffic(stage, observations) as traffic:
        stage.proxy.delay_seconds = 1.0
        try:
            stage.proxy.reset()
            observations.figure("introduced_seconds", stage.wait_steered())
            traffic.wait()
            source = stage.link["source"]
            observations.check("steered by plans", source == "PLAN", source)
        finally:
            stage.proxy.delay_seconds = 0.0
    stage.wait_steered()


@_stage_fault("connections-reset", f"steered again; {_EXACT}")
def _connections_reset(stage: Stage, observations: Observations) -> None:
    """A proxy closes all connections, five times."""
    with _run_traffic(stage, observations):
        durations = []
        for _ in range(5):
            stage.proxy.reset()
            durations.append(stage.wait_steered())
        observations.spread("steered_again_seconds", durations)


@_stage_fault("restart-storm", f"steered after each; {_EXACT}")
def _restart_storm(stage: Stage, observations: Observations) -> None:
    """The sidecar is killed and started 20 times in a row."""
    with _run_traffic(stage, observations):
        starts = stage.link["agent_starts"]
        durations = []
        for _ in range(_STORM):
            start_time = stage.sidecars.restart()
            stage.wait_steered()
            durations.append(time.monotonic() - start_time)
        observations.spread("steered_again_seconds", durations)
        extra_starts = stage.link["agent_starts"] - starts
        observations.check(
            f"steered after each of {_STORM} restarts, by the same agent",
            not extra_starts,
            extra_starts,
        )


@_stage_fault(
    "dead-sidecar-throughput", f"as many tokens a second (bar 0.99, not asserted); {_EXACT}"
)
def _dead_sidecar_throughput(stage: Stage, observations: Observations) -> None:
    """The sidecar killed, and in turn alive with the safe default's γ pinned."""

    def tokens_per_second() -> float:
        start = time.perf_counter()
        answers = stage.engine.generate(PROMPTS, LENGTHS)
        wrong[0] += [answer.tokens for answer in answers] != list(stage.plain)
        return sum(LENGTHS) / (time.perf_counter() - start)

    def measure_dead() -> float:
        stage.sidecars.kill()
        with Traffic(stage.engine, stage.plain):
            stage.wait_source("SAFE_DEFAULT")
        return tokens_per_second()

    def measure_pinned() -> float:
        stage.sidecars.restart()
        stage.wait_steered()
        # Of two pins the lower one counts; an id is not taken again.
        name = f"safe-{time.monotonic_ns()}"
        stage.sidecars.operator.pin(name, SAFE_GAMMA)
        eventually(is_at_safe_gamma, description="the other pin")
        try:
            return tokens_per_second()
        finally:
            stage.sidecars.operator.clear(name)

    def is_at_safe_gamma() -> bool:
        stage.engine.generate(PROMPTS[:1], [4])
        return bool(stage.engine.internal_state()["speculative_num_steps"] == SAFE_GAMMA)

    wrong = [0]
    ratios = []
    for pair in range(_PAIRS):
        first, second = (
            (measure_dead, measure_pinned) if pair % 2 else (measure_pinned, measure_dead)
        )
        first_rate, second_rate = first(), second()
        ratios.append(
            first_rate / second_rate if first is measure_dead else second_rate / first_rate
        )
    stage.sidecars.restart()
    stage.wait_steered()
    observations.spread("tokens_per_second_over_the_safe_defaults", ratios)
    observations.check("every token as by plain decoding", not wrong[0], wrong[0])


@fault("engine-trainer-killed", f"it serves on with what was learnt; {_EXACT}")
def _trainer_killed(_: Path, observations: Observations) -> None:
    """Sends SIGKILL to the trainer of online updates of a real SGLang."""
    command = [sys.executable, "-m", "pytest", "-q", *_TRAINER]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    observations.check(f"{_TRAINER[-1]} passes", run.returncode == 0, run.stdout[-500:])


def engine_faults(stage: Callable[[], Stage]) -> tuple[Fault, ...]:
    """The faults that are injected beside the real SGLang while it serves requests."""

    def bind_stage(inject: _StageInjection) -> Injection:
        return lambda _, seen: inject(stage(), seen)

    staged_faults = (
        Fault(
            f"engine-{name}",
            f"real SGLang: {describe_injection(inject)}",
            expected,
            bind_stage(inject),
        )
        for name, (expected, inject) in _STAGE_FAULTS.items()
    )
    return (*staged_faults, _trainer_killed)

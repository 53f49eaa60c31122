"""Measures the time from a report to the plan that it changed: 1, 8 and 64 engines on a sidecar.

    python -m tools.bench.latency_bench

A real `controller serve`, and for each engine the real link with its agent's process, at 200 steps
a second.  The rule is SGLang's moving average, because it can be followed from outside: the same
reports, folded once more afterwards, say which of them changed the draft length.  Taken is the time
from handing that report to the link until the link hands out the new draft length; the engines are
looked at in turn, about every 0.3 ms.  "planned at each report" lifts the planner's pause (70 ms)
between two plans, and so is the way alone; "at the usual pace" has that pause in it.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.settings import PlannerSettings
from controller.wire.engines import engine_from_proto
from controller.wire.reports import report_from_proto
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from speculation.v1.engine_pb2 import DRAFTER_KIND_MTP, Drafter, EngineSpec, StepReport
from tests.support.eventually import eventually
from tests.support.step_reports import send, step_report
from tools.bench.measurement import Measurement, command_line, percentiles, run
from tools.bench.serving import quiet_sidecar

_GAMMAS = (0, 1, 3, 5, 7)
_STARTUP_GAMMA = 3
# All drafts are accepted for this many steps, then all rejected for as many.
_PHASE_STEPS = 40
_STEP_SECONDS = 0.005
_POLL_SECONDS = 0.0002
# Engines whose reports are folded once more.
_REPLAYED_ENGINES_MAX = 8
_POLICY = "sglang-ema"


@dataclass
class _Engine:
    link: EngineLink
    due: float = 0.0
    gamma: int = _STARTUP_GAMMA
    step: int = 0
    reports: list[StepReport] = field(default_factory=list)
    send_times: list[float] = field(default_factory=list)
    # When a draft length came that is not the one before, and which.
    changes: list[tuple[float, int]] = field(default_factory=list)

    def poll(self, now: float) -> None:
        """Reports the step that is due, and notes a new draft length."""
        choice = self.link.choose(1)
        if choice.gamma != self.gamma:
            self.gamma = choice.gamma
            self.changes.append((time.perf_counter(), choice.gamma))
        if now < self.due:
            return
        self.due += _STEP_SECONDS
        self.step += 1
        counts = [0] * (self.gamma + 1)
        counts[0 if self.step // _PHASE_STEPS % 2 else self.gamma] = 1
        self.send_times.append(time.perf_counter())
        report = step_report(self.step, counts, choice, kv_tokens=512, step_seconds=_STEP_SECONDS)
        send(self.link, report)
        self.reports.append(report)


@dataclass(frozen=True)
class _Case:
    """One measured case.  interval_ms: of the agent's polls; 0: reports wake it; None: default."""

    engines: int
    at_each_report: bool
    interval_ms: float | None = None

    def __str__(self) -> str:
        engines = "1 engine" if self.engines == 1 else f"{self.engines} engines"
        way = "planned at each report" if self.at_each_report else "at the usual pace"
        if self.interval_ms is not None:
            way += f", looked for each {self.interval_ms:g} ms" if self.interval_ms else ", waking"
        return f"report to plan, {engines}, {way}"


_CASES = (
    _Case(1, at_each_report=True),
    _Case(8, at_each_report=True),
    _Case(8, at_each_report=True, interval_ms=0.0),
    _Case(1, at_each_report=False),
    _Case(8, at_each_report=False),
    _Case(64, at_each_report=False),
    _Case(64, at_each_report=False, interval_ms=50.0),
)


def _spec(number: int) -> EngineSpec:
    drafter = Drafter(name="eagle3", kind=DRAFTER_KIND_MTP, gammas=_GAMMAS)
    return EngineSpec(engine_id=f"engine-{number}", drafters=[drafter], max_batch_size=64)


@contextlib.contextmanager
def _quiet_agents() -> Iterator[None]:
    """Processes that start meanwhile print nothing: they have this process's stderr."""
    saved_stderr = os.dup(2)
    with Path(os.devnull).open("wb") as devnull_file:
        os.dup2(devnull_file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


@contextlib.contextmanager
def _engines(case: _Case, address: str) -> Iterator[list[_Engine]]:
    with contextlib.ExitStack() as stack:
        engines = []
        for number in range(case.engines):
            settings = LinkSettings(sidecar=address)
            if case.interval_ms is not None:
                settings = settings.model_copy(update={"report_interval_ms": case.interval_ms})
            with _quiet_agents():
                link = EngineLink.start(_spec(number), settings, startup_gamma=_STARTUP_GAMMA)
            stack.callback(link.close)
            engines.append(_Engine(link))
        for engine in engines:
            eventually(
                lambda link=engine.link: link.choose(1).source is Source.PLAN,  # type: ignore[misc]
                timeout_seconds=120.0,
                description="every engine has a plan",
            )
        yield engines


def _play(engines: Sequence[_Engine], seconds: float) -> None:
    start = time.perf_counter()
    for number, engine in enumerate(engines):
        # Not all at the same instant.
        engine.due = start + _STEP_SECONDS * number / len(engines)
    while (now := time.perf_counter()) < start + seconds:
        for engine in engines:
            engine.poll(now)
        time.sleep(_POLL_SECONDS)


def _delays(engine: _Engine) -> list[float]:
    """Seconds from each report that changed the draft length to the new one."""
    clock = VirtualClock()
    settings = PlannerSettings(policy=_POLICY, replan_seconds=1e-6)
    core = EngineController(engine_from_proto(_spec(0)), settings, None, clock)
    core.current_plan()
    gamma, expected_changes = _STARTUP_GAMMA, []
    for report, send_time in zip(engine.reports, engine.send_times, strict=True):
        clock.advance(_STEP_SECONDS)
        core.observe(report_from_proto(report))
        core.next_plan()
        planned_gamma = core.current_plan().row_for(1).arm.gamma
        if planned_gamma != gamma:
            gamma = planned_gamma
            expected_changes.append((send_time, planned_gamma))
    delays = []
    for change_time, planned_gamma in engine.changes:
        caused = [
            send_time
            for send_time, turned in expected_changes
            if turned == planned_gamma and send_time <= change_time
        ]
        if caused:
            delays.append(change_time - caused[-1])
    return delays


def _seconds_to_plan(case: _Case, seconds: float) -> list[float]:
    variables = {"CONTROLLER_PLANNER__POLICY": _POLICY}
    if case.at_each_report:
        variables["CONTROLLER_PLANNER__REPLAN_SECONDS"] = "0.000001"
    with quiet_sidecar(variables) as sidecar, _engines(case, sidecar.address) as engines:
        _play(engines, seconds)
        dropped = sum(engine.link.status().reports_dropped for engine in engines)
    if dropped:
        raise RuntimeError(f"{dropped} reports were dropped: this machine cannot keep up")
    return [delay for engine in engines[:_REPLAYED_ENGINES_MAX] for delay in _delays(engine)]


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """p50, p99, p99.9 in milliseconds."""
    for case in _CASES:
        runs = [
            [1e3 * delay for delay in _seconds_to_plan(case, options.seconds)]
            for _ in range(options.repeats)
        ]
        bars = {99.0: 5.0} if case.at_each_report and case.engines == 8 else None
        yield from percentiles(str(case), "ms", runs, bars)


PARSER = command_line(__doc__, repeats=3)
PARSER.add_argument("--seconds", type=float, default=15.0, help="of one run")

if __name__ == "__main__":
    run(PARSER, measure)

"""Counts the calls of folding a report, evaluating a plan and handling a message.

    python -m tools.bench.calls_bench

Exit code 1 if a count is more than a fifth above its number in `calls.json`, which `--write`
replaces.  Counts do not depend on the processor or its load, so a test can refuse a regression.

The shapes of the core are those of `growth_bench`.  A message takes the way of a real one from the
servicer to the answers, but gRPC is left out: a context hands over parsed messages and drops the
answers.  What the core does of it is left out too.

Two numbers are counted.  "own": calls of this project's functions.  "outside": calls by them of
anything else, in C or in Python; numpy's operators, ufuncs and types are not among them, because
`sys.setprofile` does not see them.  Calls within other packages are not counted, and comprehensions
are not counted as functions: Python 3.11 calls them, later versions do not.  The numbers of Python
3.11, 3.12 and 3.13 are therefore equal.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import grpc.aio
import structlog

import controller
from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.settings import PlannerSettings
from controller.service.rpc import steering, streams
from controller.service.rpc.steering import SpeculationServicer
from controller.service.sessions.registry import SessionRegistry
from controller.service.state.profile_registry import ProfileRegistry
from controller.wire.engines import engine_from_proto
from speculation.v1 import service_pb2
from tests.support.service_harness import engine_message, report_message
from tools.bench.growth_bench import LARGE_PLAN_SHAPE, PLAN_SHAPE, REPORTS_SHAPE, Shape
from tools.bench.serving import make_messages

NUMBERS_PATH = Path(__file__).with_name("calls.json")
# The most that a count may be, over its number.
_FACTOR_MAX = 1.2
_FOLDER = str(Path(controller.__file__).parent)
_CORE_FOLDER = str(Path(_FOLDER, "core"))
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}
_WARM_UP_REPORTS = 200
_REPORTS = 100
_PLANS = 10
_MESSAGES = 40
_STEP_SECONDS = 0.005
_DRAFT_COUNTS = ([2, 2, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2])


@dataclass
class Calls:
    """Calls of this project's functions, and calls by them of anything else."""

    own: float = 0.0
    outside: float = 0.0

    def per(self, count: int) -> "Calls":
        """Returns the calls of one of `count` equal parts."""
        return Calls(round(self.own / count, 1), round(self.outside / count, 1))


class _CallCounter:
    """Counts the calls of the functions in `folder`, but not in `left_out`."""

    def __init__(self, folder: str = _FOLDER, left_out: str = "<none>") -> None:
        self.calls = Calls()
        self._folder, self._left_out = folder, left_out
        self._is_own_by_code: dict[CodeType, bool] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the calls of the block."""
        self.start()
        try:
            yield
        finally:
            sys.setprofile(None)

    def start(self) -> None:
        """Counts until `sys.setprofile(None)`."""
        sys.setprofile(self._count)

    def _is_own(self, frame: FrameType) -> bool:
        code = frame.f_code
        is_own = self._is_own_by_code.get(code)
        if is_own is None:
            path = code.co_filename
            is_own = path.startswith(self._folder) and not path.startswith(self._left_out)
            self._is_own_by_code[code] = is_own
        return is_own

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "c_call":
            self.calls.outside += self._is_own(frame)
        elif event == "call" and frame.f_code.co_name not in _COMPREHENSIONS:
            if self._is_own(frame):
                self.calls.own += 1
            elif frame.f_back is not None:
                self.calls.outside += self._is_own(frame.f_back)


def count_fold(shape: Shape) -> Calls:
    """Returns the calls of folding a report, on average."""
    clock, counter = VirtualClock(), _CallCounter()
    core = shape.make_core(clock)
    for report in shape.make_reports(_WARM_UP_REPORTS + _REPORTS):
        clock.advance(report.step_seconds)
        if report.step <= _WARM_UP_REPORTS:
            core.observe(report)
        else:
            with counter.counting():
                core.observe(report)
        if report.step % shape.reports_per_plan == 0:
            core.next_plan()
    return counter.calls.per(_REPORTS)


def count_plan(shape: Shape) -> Calls:
    """Returns the calls of evaluating the plan, on average."""
    clock, counter = VirtualClock(), _CallCounter()
    core = shape.make_core(clock)
    plans = 0
    for report in shape.make_reports(_WARM_UP_REPORTS + _PLANS * shape.reports_per_plan):
        clock.advance(report.step_seconds)
        core.observe(report)
        if report.step % shape.reports_per_plan == 0 and report.step > _WARM_UP_REPORTS:
            with counter.counting():
                core.next_plan()
            plans += 1
    return counter.calls.per(plans)


class _MessageContext:
    """Stands in for gRPC's context of a stream: hands over messages, and drops the answers.

    seconds: virtual time between two messages.  begin: called before the last _MESSAGES.
    """

    def __init__(
        self,
        messages: Sequence[service_pb2.SteerRequest],
        clock: VirtualClock,
        seconds: float,
        begin: Callable[[], None],
    ) -> None:
        self._messages, self._clock, self._seconds, self._begin = messages, clock, seconds, begin
        self._read_count = 0

    def peer(self) -> str:
        """Names the client."""
        return "unix:"

    async def read(self) -> Any:
        """Returns the next message, once the one before it is answered."""
        for _ in range(4):
            await asyncio.sleep(0)
        if self._read_count == len(self._messages) - _MESSAGES:
            self._begin()
        if self._read_count == len(self._messages):
            return grpc.aio.EOF
        self._clock.advance(self._seconds)
        self._read_count += 1
        return self._messages[self._read_count - 1]

    async def write(self, answer: Any) -> None:
        """Drops the answer."""


def _read_stopped_clock() -> float:
    return 0.0


class _TimelessLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands still: only what is due at once is called."""

    def time(self) -> float:
        """Returns the same seconds always."""
        return _read_stopped_clock()


def count_message(reports_per_message: int) -> Calls:
    """Returns the service's calls to handle a message, plans and answers included, on average."""
    clock, counter = VirtualClock(), _CallCounter(left_out=_CORE_FOLDER)
    registry = SessionRegistry(
        lambda spec, profile: EngineController(spec, PlannerSettings(), profile, clock),
        ProfileRegistry(),
        clock,
    )
    engine = engine_message("engine-0", gammas=(0, 1, 2, 3, 5, 7), max_batch_size=64)
    session = registry.introduce(engine_from_proto(engine))
    report_count = _WARM_UP_REPORTS + _MESSAGES * reports_per_message
    reports = [
        report_message(
            step, batch_size=8, gamma=5, accepted_counts=_DRAFT_COUNTS[step % 3], plan_epoch=1,
            plan_session=session.tag, delivered_tokens=20,
        )
        for step in range(1, report_count + 1)
    ]  # fmt: skip
    messages = make_messages(session.session_id, reports, reports_per_message)
    seconds = _STEP_SECONDS * reports_per_message
    context: Any = _MessageContext(messages, clock, seconds, counter.start)
    with (
        mock.patch.object(steering, "monotonic", _read_stopped_clock),
        mock.patch.object(streams, "monotonic", _read_stopped_clock),
        asyncio.Runner(loop_factory=_TimelessLoop) as runner,
    ):
        try:
            runner.run(SpeculationServicer(registry).Steer(context, context))
        finally:
            sys.setprofile(None)
    if session.counters.reports != report_count:
        raise RuntimeError(f"not every report was folded: {session.counters}")
    return counter.calls.per(_MESSAGES)


def count_all() -> dict[str, Calls]:
    """Returns the calls of everything that is counted, by its name."""
    return {
        "fold a report: batch 16, 6 arms": count_fold(REPORTS_SHAPE),
        "fold a report: gamma up to 16, 8 classes": count_fold(LARGE_PLAN_SHAPE),
        "evaluate a plan: 6 arms, 16 buckets": count_plan(REPORTS_SHAPE),
        "evaluate a plan: 7 gammas, 2 drafters, 16 buckets": count_plan(PLAN_SHAPE),
        "evaluate a plan: gamma up to 16, 8 classes, 64 buckets": count_plan(LARGE_PLAN_SHAPE),
        "handle a message of 8 reports": count_message(8),
        "handle a message of 1 report": count_message(1),
    }


def find_regressions(counted: dict[str, Calls], numbers: dict[str, Any]) -> list[str]:
    """Returns a text for each count that is more than a fifth above its number."""
    return [
        f"{name}: {count:g} {kind} calls, {numbers[name][kind]:g} before"
        for name, calls in counted.items()
        for kind, count in asdict(calls).items()
        if count > _FACTOR_MAX * numbers[name][kind]
    ]


def main() -> int:
    """The command line; 1 if a count is too high."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"replace {NUMBERS_PATH.name}")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    counted = count_all()
    numbers = {} if options.write else json.loads(NUMBERS_PATH.read_text())
    for name, calls in counted.items():
        before = numbers.get(name)
        note = "" if before is None else f"   before: {before['own']:g}, {before['outside']:g}"
        print(f"{name:56} own {calls.own:8g}   outside {calls.outside:8g}{note}")
    if options.write:
        values = {name: asdict(calls) for name, calls in counted.items()}
        NUMBERS_PATH.write_text(json.dumps(values, indent=1) + "\n")
        return 0
    regressions = find_regressions(counted, numbers)
    for regression in regressions:
        print(f"more than a fifth above: {regression}", file=sys.stderr)
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())

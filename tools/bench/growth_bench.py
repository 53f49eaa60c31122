"""Measures how work grows with draft lengths, drafters, classes, buckets and engines.

    python -m tools.bench.growth_bench

The first ones are of the core alone: processor time to fold a report, and to evaluate the plan
(which happens at most every 70 ms an engine, whatever its rate).  Three shapes have a bar; then one
dimension at a time is changed from gamma up to 7, one drafter, no classes and 8 buckets.  Engines:
a real sidecar gets the same number of reports in all, from 1 to 256 engines, 8 a message; its
processor time for each, and its memory.  `--core` leaves the engines out.

`calls_bench` counts the calls of the same shapes.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import psutil

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import ClassCounts, StepReport
from tests.support.service_harness import engine_message, report_message
from tools.bench.measurement import Measurement, command_line, run
from tools.bench.serving import (
    introduce,
    make_messages,
    processor_seconds,
    quiet_sidecar,
    send,
)

_ACCEPTANCE = 0.75
_STEP_SECONDS = 0.01
_REPORTS_OF_ALL_ENGINES = 16_384
_REPORTS_A_MESSAGE = 8


@dataclass(frozen=True)
class Shape:
    """An engine and its reports.

    batch_size: of all reports; None for batches of every size.  reports_per_plan: reports that are
    folded between two plans.
    """

    gammas: Sequence[int] = range(8)
    drafters: int = 1
    classes: int = 0
    buckets: int = 8
    batch_size: int | None = None
    reports_per_plan: int = 1

    def make_core(self, clock: VirtualClock) -> EngineController:
        """Makes a core that plans whenever it is asked to."""
        sizes = tuple(range(1, self.buckets + 1))
        drafters = tuple(
            DrafterSpec(f"drafter-{i}", DrafterKind.MTP, tuple(self.gammas))
            for i in range(self.drafters)
        )
        fingerprint = Fingerprint("target", engine="virtual", graph_batch_sizes=sizes)
        spec = EngineSpec("engine-0", fingerprint, drafters, self.buckets)
        return EngineController(spec, PlannerSettings(replan_seconds=1e-6), None, clock)

    def make_reports(self, steps: int) -> Iterator[StepReport]:
        """Yields reports of every drafter in turn, each sequence of a class of its own turn."""
        rng = random.Random(0)
        gamma_max = self.gammas[-1]
        for step in range(1, steps + 1):
            size = self.batch_size or 1 + step % self.buckets
            gamma = gamma_max if step % 4 else self.gammas[len(self.gammas) // 2]
            of_class: dict[str, list[int]] = {}
            counts = [0] * (gamma + 1)
            for sequence in range(size):
                accepted = 0
                while accepted < gamma and rng.random() < _ACCEPTANCE:
                    accepted += 1
                counts[accepted] += 1
                if self.classes:
                    label = f"class-{(step + sequence) % self.classes}"
                    of_class.setdefault(label, [0] * (gamma + 1))[accepted] += 1
            yield StepReport(
                step, size, 512 * size, f"drafter-{step % self.drafters}", gamma, tuple(counts),
                _STEP_SECONDS * (1 + 0.05 * gamma),
                classes=tuple(ClassCounts(name, tuple(part)) for name, part in of_class.items()),
            )  # fmt: skip


REPORTS_SHAPE = Shape((0, 1, 2, 3, 5, 7), buckets=16, batch_size=16, reports_per_plan=8)
PLAN_SHAPE = Shape((0, 1, 2, 3, 4, 5, 7), drafters=2, buckets=16)
LARGE_PLAN_SHAPE = Shape(range(17), classes=8, buckets=64)

# How the figures name each, and bars in microseconds: to fold a report, to evaluate the plan.
_SHAPES = (
    ("batch 16, 6 arms, 8 a message", REPORTS_SHAPE, 25.0, None),
    ("7 gammas, 2 drafters, 16 buckets", PLAN_SHAPE, None, 150.0),
    ("64 buckets, gamma up to 16, 8 classes", LARGE_PLAN_SHAPE, None, 400.0),
    *((f"gamma up to {n}", Shape(range(n + 1)), None, None) for n in (4, 8, 16)),
    *((f"drafters {n}", Shape(drafters=n), None, None) for n in (1, 2, 4)),
    *((f"classes {n}", Shape(classes=n), None, None) for n in (1, 8, 32)),
    *((f"buckets {n}", Shape(buckets=n), None, None) for n in (8, 16, 32, 64)),
)
_ENGINES = (1, 4, 16, 64, 256)


def _core_microseconds(shape: Shape, steps: int) -> tuple[float, float]:
    """Returns this thread's time to fold a report, and the median to evaluate the plan."""
    clock = VirtualClock()
    core = shape.make_core(clock)
    core.current_plan()
    folding, evaluations = 0.0, []
    for report in shape.make_reports(steps):
        clock.advance(report.step_seconds)
        start = time.thread_time()
        core.observe(report)
        folded = time.thread_time()
        folding += folded - start
        if report.step % shape.reports_per_plan == 0:
            core.next_plan()
            evaluations.append(time.thread_time() - folded)
    return 1e6 * folding / steps, 1e6 * statistics.median(evaluations)


def _engines(count: int) -> tuple[float, float]:
    """Microseconds of the sidecar's processor a report, and its megabytes."""
    reports_per_engine = _REPORTS_OF_ALL_ENGINES // count
    with quiet_sidecar() as sidecar, grpc.insecure_channel(sidecar.address) as channel:
        sessions = [introduce(channel, engine_message(f"engine-{i}")) for i in range(count)]
        process = psutil.Process(sidecar.process.pid)
        processor_before = processor_seconds(process.pid)
        for session_id in sessions:
            reports = [report_message(step) for step in range(1, reports_per_engine + 1)]
            send(channel, make_messages(session_id, reports, _REPORTS_A_MESSAGE))
        processor_used = processor_seconds(process.pid) - processor_before
        return 1e6 * processor_used / _REPORTS_OF_ALL_ENGINES, process.memory_info().rss / 1e6


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Microseconds and megabytes along each dimension."""
    for name, shape, fold_bar, plan_bar in _SHAPES:
        runs = [_core_microseconds(shape, options.steps) for _ in range(options.repeats)]
        fold, evaluate = zip(*runs, strict=True)
        yield Measurement(f"{name}: fold a report", "us", fold, at_most=fold_bar)
        yield Measurement(f"{name}: evaluate the plan", "us", evaluate, at_most=plan_bar)
    for count in () if options.core else _ENGINES:
        engine_runs = [_engines(count) for _ in range(options.repeats)]
        processor, memory = zip(*engine_runs, strict=True)
        yield Measurement(f"engines {count}: processor a report", "us", processor)
        yield Measurement(f"engines {count}: memory of the sidecar", "MB", memory)


PARSER = command_line(__doc__, repeats=5)
PARSER.add_argument("--steps", type=int, default=3000, help="reports to a core")
PARSER.add_argument("--core", action="store_true", help="only the core, without engines")

if __name__ == "__main__":
    run(PARSER, measure)

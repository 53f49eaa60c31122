"""Measures how work grows with draft lengths, drafters, classes, buckets and engines.

    python -m tools.bench.growth_bench

The first four are of the core alone: processor time to fold a report, and to evaluate the plan
(which happens at most every 70 ms an engine, whatever its rate), with one dimension changed at a
time from gamma up to 7, one drafter, no classes and 8 buckets.  Engines: a real sidecar gets the
same number of reports in all, from 1 to 256 engines, 8 a message; its processor time for each, and
its memory.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Iterator
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
class _Shape:
    gamma_max: int = 7
    drafters: int = 1
    classes: int = 0
    buckets: int = 8

    def spec(self) -> EngineSpec:
        sizes = tuple(range(1, self.buckets + 1))
        drafters = tuple(
            DrafterSpec(f"drafter-{i}", DrafterKind.MTP, tuple(range(self.gamma_max + 1)))
            for i in range(self.drafters)
        )
        fingerprint = Fingerprint("target", engine="virtual", graph_batch_sizes=sizes)
        return EngineSpec("engine-0", fingerprint, drafters, self.buckets)


# Of _Shape's fields: how the figures name each, and its values.
_GROWTH = {
    "gamma_max": ("gamma up to", (4, 8, 16)),
    "drafters": ("drafters", (1, 2, 4)),
    "classes": ("classes", (1, 8, 32)),
    "buckets": ("buckets", (8, 16, 32, 64)),
}
_ENGINES = (1, 4, 16, 64, 256)


def _reports(shape: _Shape, steps: int) -> Iterator[StepReport]:
    """Batches of every size, every drafter in turn, each sequence of a class of its own turn."""
    rng = random.Random(0)
    for step in range(1, steps + 1):
        size = 1 + step % shape.buckets
        gamma = shape.gamma_max if step % 4 else shape.gamma_max // 2
        of_class: dict[str, list[int]] = {}
        counts = [0] * (gamma + 1)
        for sequence in range(size):
            accepted = 0
            while accepted < gamma and rng.random() < _ACCEPTANCE:
                accepted += 1
            counts[accepted] += 1
            if shape.classes:
                label = f"class-{(step + sequence) % shape.classes}"
                of_class.setdefault(label, [0] * (gamma + 1))[accepted] += 1
        yield StepReport(
            step, size, 512 * size, f"drafter-{step % shape.drafters}", gamma, tuple(counts),
            _STEP_SECONDS * (1 + 0.05 * gamma),
            classes=tuple(ClassCounts(name, tuple(part)) for name, part in of_class.items()),
        )  # fmt: skip


def _core_microseconds(shape: _Shape, steps: int) -> tuple[float, float]:
    """Returns this thread's time to fold a report, and the median to evaluate the plan."""
    clock = VirtualClock()
    core = EngineController(shape.spec(), PlannerSettings(replan_seconds=1e-6), None, clock)
    core.current_plan()
    folding, evaluations = 0.0, []
    for report in _reports(shape, steps):
        clock.advance(report.step_seconds)
        start = time.thread_time()
        core.observe(report)
        folded = time.thread_time()
        core.next_plan()
        evaluations.append(time.thread_time() - folded)
        folding += folded - start
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
    for field, (name, values) in _GROWTH.items():
        for value in values:
            shape = _Shape(**{field: value})
            runs = [_core_microseconds(shape, options.steps) for _ in range(options.repeats)]
            fold, evaluate = zip(*runs, strict=True)
            yield Measurement(f"{name} {value}: fold a report", "us", fold)
            yield Measurement(f"{name} {value}: evaluate the plan", "us", evaluate)
    for count in _ENGINES:
        engine_runs = [_engines(count) for _ in range(options.repeats)]
        processor, memory = zip(*engine_runs, strict=True)
        yield Measurement(f"engines {count}: processor a report", "us", processor)
        yield Measurement(f"engines {count}: memory of the sidecar", "MB", memory)


PARSER = command_line(__doc__, repeats=5)
PARSER.add_argument("--steps", type=int, default=3000, help="reports to a core")

if __name__ == "__main__":
    run(PARSER, measure)

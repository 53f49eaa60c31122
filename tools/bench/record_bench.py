"""Measures the cost of recording a report: folding and planning with it, and without.

    python -m tools.bench.record_bench

The same reports at the same times go through a plain core and one on tape, in turn; the recorder's
thread writes to a temporary directory meanwhile, so its share of the interpreter is in the figure.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from controller.core.clock import VirtualClock
from controller.core.engine.checkpoint import capture_state
from controller.core.engine.engine_controller import EngineController
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.core.training.selective_training import TrainingSettings
from controller.recording.recorded_controller import QUEUE_MAX, RecordedController
from controller.recording.recorder import Recorder
from controller.wire.reports import report_to_proto
from speculation.v1 import engine_pb2
from tests.support.virtual_engine import engine_spec, gpu_step_seconds, make_engine, profile_of
from tools.bench.measurement import RATIO, Measurement, command_line, run

STEPS = 4000


Steps = list[tuple[float, StepReport, engine_pb2.StepReport]]


def reports() -> Steps:
    """Returns an engine's reports in virtual time, with their times and their messages."""
    engine = make_engine()
    for batch_size, acceptance in ((4, 0.8), (16, 0.5), (64, 0.7), (8, 0.3)):
        engine.run(STEPS // 4, batch_size, [acceptance] * 7)
    return [
        (report_time, report, report_to_proto(report)) for report_time, report in engine.reports
    ]


def seconds(core: EngineController, clock: VirtualClock, steps: Steps) -> float:
    """Returns this thread's processor time for folding all reports, with a plan after each."""
    core.current_plan()
    start = time.thread_time()
    for report_time, report, message in steps:
        clock.advance(report_time - clock.now())
        if isinstance(core, RecordedController):
            core.observe(report, message)
        else:
            core.observe(report)
        core.next_plan()
    return time.thread_time() - start


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Times of the two, their ratios, and what lies on disk."""
    assert STEPS * 2 < QUEUE_MAX
    steps, spec = reports(), engine_spec()
    profile, settings = profile_of(spec, gpu_step_seconds), PlannerSettings()
    plain, recorded, whole_process, openings, sizes = [], [], [], [], []
    for _ in range(options.repeats):
        clock = VirtualClock()
        plain.append(seconds(EngineController(spec, settings, profile, clock), clock, steps))
        with tempfile.TemporaryDirectory() as directory:
            start = time.process_time()
            recorder = Recorder(Path(directory), 64_000_000, lambda _: None)
            recorder.open()
            clock = VirtualClock()
            core = recorder.create_core(spec, settings, profile, clock, TrainingSettings())
            recorded.append(seconds(core, clock, steps))
            recorder.close()
            whole_process.append(time.process_time() - start)
            sizes.append(sum(path.stat().st_size for path in Path(directory).glob("*.record")))
        start = time.thread_time()
        capture_state(core)
        openings.append(time.thread_time() - start)
    yield Measurement("a report folded and planned", "us", [1e6 * s / STEPS for s in plain])
    for name, recorded_times in (
        ("the steering thread", recorded),
        ("with the recorder's thread", whole_process),
    ):
        ratios = [b / a for a, b in zip(plain, recorded_times, strict=True)]
        yield Measurement(f"recorded over not recorded, {name}", RATIO, ratios)
    yield Measurement("on disk a report, plans included", "bytes", [s / STEPS for s in sizes])
    yield Measurement("a new segment's opening state", "ms", [1e3 * s for s in openings])


PARSER = command_line(__doc__, repeats=15)

if __name__ == "__main__":
    run(PARSER, measure)

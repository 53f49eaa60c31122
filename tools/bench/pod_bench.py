"""Measures what the sidecar's containers need: memory and processor time, serving and measuring.

    python -m tools.bench.pod_bench --engines 1

A real `controller serve`, with agents of their own that report as many steps a second as engines
would; then a real `controller profile` on an engine that answers at once.
"""

import argparse
import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.support.clockwork_engine import ClockworkEngine
from tests.support.linked_engine import LinkedEngine, linked_engine
from tests.support.service_harness import ENVIRONMENT
from tests.support.sidecar_process import CONTROLLER, sidecar_process
from tools.bench.measurement import Measurement, command_line, run

_MEGABYTE = 1e6


def pace(engine: LinkedEngine, steps_per_second: float, deadline: float) -> None:
    """Steps at that rate."""
    due = time.monotonic()
    while due < deadline:
        engine.run(1)
        due += 1 / steps_per_second
        time.sleep(max(0.0, due - time.monotonic()))


def measure_serving(engines: int, steps_per_second: float, seconds: float) -> dict[str, float]:
    """Memory and cores of the sidecar."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sidecar = stack.enter_context(sidecar_process(Path(folder)))
        process = psutil.Process(sidecar.process.pid)
        linked = [
            stack.enter_context(linked_engine(sidecar.address, f"engine-{number}"))
            for number in range(engines)
        ]
        deadline = time.monotonic() + seconds
        threads = [
            threading.Thread(target=pace, args=(engine, steps_per_second, deadline))
            for engine in linked
        ]
        steps_before = [engine.step for engine in linked]
        start, cpu_before = time.monotonic(), process.cpu_times()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed, now = time.monotonic() - start, process.cpu_times()
        steps = sum(engine.step for engine in linked) - sum(steps_before)
        return {
            "steps_per_second": steps / elapsed / engines,
            "megabytes": process.memory_info().rss / _MEGABYTE,
            "cores": (now.user + now.system - cpu_before.user - cpu_before.system) / elapsed,
        }


def measure_profiling(seconds: float) -> dict[str, float]:
    """Largest memory, and cores, of `controller profile`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        sidecar_process(Path(folder)) as sidecar,
        ClockworkEngine(sidecar.address) as engine,
    ):
        command = [
            *CONTROLLER, "profile", "--sidecar", sidecar.address, "--engine-url", engine.url,
            "--output", f"{folder}/profile.json", "--budget", str(seconds),
        ]  # fmt: skip
        with subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            start, largest, cpu_seconds = time.monotonic(), 0, 0.0
            while child.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(child.pid)
                    largest = max(largest, process.memory_info().rss)
                    cpu_seconds = sum(process.cpu_times()[:2])
                time.sleep(0.05)
        assert child.returncode == 0
        return {
            "megabytes": largest / _MEGABYTE,
            "cores": cpu_seconds / (time.monotonic() - start),
        }


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Megabytes and cores."""
    served = [
        measure_serving(options.engines, options.steps, options.seconds)
        for _ in range(options.repeats)
    ]
    engines_text = f"engines of {options.steps:g} steps/s: {options.engines}"
    yield Measurement(
        "steps/s of each engine", "1/s", [figures["steps_per_second"] for figures in served]
    )
    yield Measurement(
        f"sidecar, {engines_text}, memory", "MB", [figures["megabytes"] for figures in served]
    )
    yield Measurement(
        f"sidecar, {engines_text}, processor", "cores", [figures["cores"] for figures in served]
    )
    measured = [measure_profiling(5.0) for _ in range(options.repeats)]
    yield Measurement(
        "controller profile, memory", "MB", [figures["megabytes"] for figures in measured]
    )
    yield Measurement(
        "controller profile, processor", "cores", [figures["cores"] for figures in measured]
    )


PARSER = command_line(__doc__, repeats=3)
PARSER.add_argument("--engines", type=int, default=1)
PARSER.add_argument("--steps", type=float, default=200.0, help="a second, of each engine")
PARSER.add_argument("--seconds", type=float, default=20.0, help="of one run")

if __name__ == "__main__":
    run(PARSER, measure)

"""What the sidecar's containers need: memory and processor time, serving and measuring.

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


def pace(engine: LinkedEngine, steps_per_second: float, until: float) -> None:
    """Steps at that rate."""
    due = time.monotonic()
    while due < until:
        engine.run(1)
        due += 1 / steps_per_second
        time.sleep(max(0.0, due - time.monotonic()))


def serving(engines: int, steps_per_second: float, seconds: float) -> dict[str, float]:
    """Memory and cores of the sidecar."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sidecar = stack.enter_context(sidecar_process(Path(folder)))
        process = psutil.Process(sidecar.process.pid)
        linked = [
            stack.enter_context(linked_engine(sidecar.address, f"engine-{number}"))
            for number in range(engines)
        ]
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=pace, args=(engine, steps_per_second, until))
            for engine in linked
        ]
        before = [engine.step for engine in linked]
        began, spent = time.monotonic(), process.cpu_times()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed, now = time.monotonic() - began, process.cpu_times()
        steps = sum(engine.step for engine in linked) - sum(before)
        return {
            "steps_per_second": steps / elapsed / engines,
            "megabytes": process.memory_info().rss / _MEGABYTE,
            "cores": (now.user + now.system - spent.user - spent.system) / elapsed,
        }


def profiling(seconds: float) -> dict[str, float]:
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
            began, largest, spent = time.monotonic(), 0, 0.0
            while child.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(child.pid)
                    largest = max(largest, process.memory_info().rss)
                    spent = sum(process.cpu_times()[:2])
                time.sleep(0.05)
        assert child.returncode == 0
        return {
            "megabytes": largest / _MEGABYTE,
            "cores": spent / (time.monotonic() - began),
        }


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Megabytes and cores."""
    served = [
        serving(options.engines, options.steps, options.seconds) for _ in range(options.repeats)
    ]
    of = f"engines of {options.steps:g} steps/s: {options.engines}"
    yield Measurement("steps/s of each engine", "1/s", [one["steps_per_second"] for one in served])
    yield Measurement(f"sidecar, {of}, memory", "MB", [one["megabytes"] for one in served])
    yield Measurement(f"sidecar, {of}, processor", "cores", [one["cores"] for one in served])
    measured = [profiling(5.0) for _ in range(options.repeats)]
    yield Measurement("controller profile, memory", "MB", [one["megabytes"] for one in measured])
    yield Measurement("controller profile, processor", "cores", [one["cores"] for one in measured])


PARSER = command_line(__doc__, repeats=3)
PARSER.add_argument("--engines", type=int, default=1)
PARSER.add_argument("--steps", type=float, default=200.0, help="a second, of each engine")
PARSER.add_argument("--seconds", type=float, default=20.0, help="of one run")

if __name__ == "__main__":
    run(PARSER, measure)

"""What the sidecar's containers need: memory and processor time, serving and measuring.

    python -m tests.bench.pod_bench --engines 1

A real `controller serve`, with agents of their own that report as many steps a second as engines
would; then a real `controller profile` on an engine that answers at once.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.controller.cli.linked_engine import LinkedEngine, linked_engine
from tests.controller.cli.sidecar_process import CONTROLLER, sidecar_process
from tests.controller.profiling.clockwork_engine import ClockworkEngine
from tests.controller.service.harness import ENVIRONMENT

_MEGABYTE = 1e6


def pace(engine: LinkedEngine, steps_per_second: float, until: float) -> None:
    """Steps at that rate."""
    due = time.monotonic()
    while due < until:
        engine.run(1)
        due += 1 / steps_per_second
        time.sleep(max(0.0, due - time.monotonic()))


def serving(engines: int, steps_per_second: float, seconds: float) -> dict[str, Any]:
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
            "engines": engines,
            "steps_per_second_each": round(steps / elapsed / engines),
            "sidecar_megabytes": round(process.memory_info().rss / _MEGABYTE),
            "sidecar_cores": round(
                (now.user + now.system - spent.user - spent.system) / elapsed, 3
            ),
        }


def profiling(seconds: float) -> dict[str, Any]:
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
            "profile_megabytes": round(largest / _MEGABYTE),
            "profile_cores": round(spent / (time.monotonic() - began), 3),
        }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--steps", type=float, default=200.0, help="a second, of each engine")
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    found = serving(given.engines, given.steps, given.seconds) | profiling(5.0)
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

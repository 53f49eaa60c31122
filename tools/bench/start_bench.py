"""Measures the start of a sidecar and of the command line, and the memory of 64 engines.

    python -m tools.bench.start_bench

Start to SERVING: from the process's creation until its health service reports it.  Import: what
`import controller.cli` takes inside a fresh interpreter, and the whole of `controller
version` beside that of an interpreter that does nothing.  Memory: resident, of a sidecar to which
64 engines have introduced themselves and reported 200 steps each.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable

import grpc
import psutil

from tests.support.service_harness import ENVIRONMENT, engine_message, report_message
from tests.support.sidecar_process import CONTROLLER
from tools.bench.measurement import Measurement, command_line, run
from tools.bench.serving import introduce, make_messages, quiet_sidecar, send

_ENGINES = 64
_REPORTS = 200
_IMPORT = """
import time
began = time.perf_counter()
import controller.cli
print(time.perf_counter() - began)
"""


def _serving_and_memory() -> tuple[float, float]:
    """Seconds, and megabytes."""
    reports = [report_message(step) for step in range(1, _REPORTS + 1)]
    with quiet_sidecar() as sidecar:
        with grpc.insecure_channel(sidecar.address) as channel:
            for number in range(_ENGINES):
                engine = engine_message(
                    f"engine-{number}", gammas=(0, 1, 2, 3, 5, 7), max_batch_size=64
                )
                send(channel, make_messages(introduce(channel, engine), reports, _REPORTS))
        resident = psutil.Process(sidecar.process.pid).memory_info().rss
        return sidecar.seconds_to_serving, resident / 1e6


def _import_seconds() -> float:
    """Returns the seconds of the import in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], env=ENVIRONMENT, capture_output=True, check=True
    )
    return float(done.stdout)


def _command_seconds(command: list[str]) -> float:
    """Seconds of a command's life."""
    start = time.perf_counter()
    subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True)
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """The figures, by name."""
    runs = [_serving_and_memory() for _ in range(options.repeats)]
    serving, memory = zip(*runs, strict=True)
    yield Measurement("sidecar, start to SERVING", "s", serving, at_most=1.0)
    yield Measurement(f"sidecar, memory with {_ENGINES} engines", "MB", memory, at_most=150.0)
    imports = [_import_seconds() for _ in range(options.repeats)]
    yield Measurement("command line, import", "s", imports, at_most=0.3)
    bare = [_command_seconds([sys.executable, "-c", ""]) for _ in range(options.repeats)]
    version = [_command_seconds([*CONTROLLER, "version"]) for _ in range(options.repeats)]
    yield Measurement("controller version, whole", "s", version)
    yield Measurement("a bare interpreter, whole", "s", bare)


PARSER = command_line(__doc__, repeats=9)

if __name__ == "__main__":
    run(PARSER, measure)

"""A course of events leaves the same trace every time, however busy the machine is."""

import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[3]


def trace(output: Path, hash_seed: int, garbage: int) -> list[str]:
    """In a process whose sets are in another order, and whose garbage goes at other times."""
    options = ["--output", str(output), "--examples", "4", "--garbage", str(garbage)]
    subprocess.run(
        [sys.executable, "-m", "tests.system.concurrency.traces", *options],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f".{os.pathsep}proto", "PYTHONHASHSEED": str(hash_seed)},
    )
    return output.read_text().splitlines()


def test_the_same_course_of_events_leaves_the_same_trace_on_a_busy_machine(tmp_path: Path):
    calm = trace(tmp_path / "calm", hash_seed=1, garbage=700)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        beset = trace(tmp_path / "busy", hash_seed=2, garbage=40)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert len(calm) > 1000
    pairs = enumerate(zip_longest(calm, beset))
    assert next((pair for pair in pairs if pair[1][0] != pair[1][1]), None) is None

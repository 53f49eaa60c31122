"""The emulated GPU answers, warns, refuses and counts as a real one does."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lab.cpu_engine.environment import emulated_cuda_env

pytest.importorskip("sglang")
_PROBE = Path(__file__).with_name("emulated_cuda_probe.py")


@cache
def read_report() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(_PROBE)],
        env=emulated_cuda_env(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_nobody_takes_it_for_a_gpu() -> None:
    assert "emulated" in read_report()["name"]
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        env=emulated_cuda_env(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "emulated" in listed.stdout


def test_it_has_the_capability_of_an_h100() -> None:
    assert read_report()["capability"] == [9, 0]


def test_tensors_know_where_they_are() -> None:
    assert read_report()["devices"] == ["cuda:0", "cuda:0", "cuda:0", "cpu", "cpu"]
    assert read_report()["parameter"] == "cuda:0"
    assert read_report()["copy_is_a_copy"]


def test_memory_is_counted() -> None:
    assert read_report()["taken"] == 1 << 20
    assert read_report()["given_back"]


def test_what_a_gpu_cannot_reach_is_refused() -> None:
    assert "Expected all tensors to be on the same device" in read_report()["mixture"]
    assert "can't convert cuda:0 device type tensor to numpy" in read_report()["numpy"]


def test_waits_are_warned_of_and_nothing_else() -> None:
    assert read_report()["warnings"] == {
        "item": 1, "list": 1, "blocking": 1, "mask": 1, "stream": 1,
        "host item": 0, "pinned": 0, "add": 0,
    }  # fmt: skip


def test_a_graph_replays_the_devices_work_alone() -> None:
    # The capture itself computes, which no GPU does.
    before, after = read_report()["replayed"]
    assert after == before + 2
    assert read_report()["host_work"] == 1


def test_a_capture_refuses_a_wait() -> None:
    assert "operation not permitted when stream is capturing" in read_report()["capture"]


def test_the_library_normalises_halves_only() -> None:
    assert "failed to dispatch data type Float" in read_report()["float32_norm"]
    assert read_report()["bfloat16_norm"] == "none"


def test_kernels_in_torch_write_what_the_interpreted_ones_write() -> None:
    *wide, halves = zip(read_report()["in_torch"], read_report()["interpreted"], strict=True)
    assert len(wide) == 4
    for written, interpreted in wide:
        assert written == pytest.approx(interpreted, rel=1e-4, abs=1e-5)
    # A bfloat16 has eight bits, and each value is rounded twice.
    written, interpreted = halves
    assert written == pytest.approx(interpreted, abs=2**-6 * max(map(abs, interpreted)))

"""What benchmarks have in common."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service_harness import ENVIRONMENT
from tools.bench.__main__ import BENCHES, Bench
from tools.bench.measurement import Measurement, percentiles, show
from tools.bench.pairs import ratios

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("bars", "holds"),
    [
        ({"at_most": 2.0}, True),
        ({"at_most": 1.9}, False),
        ({"at_least": 2.0}, True),
        ({"at_least": 2.1}, False),
        ({}, None),
    ],
)
def test_the_median_is_held_against_the_bar(bars: dict[str, float], holds: bool | None) -> None:
    result = Measurement("a", "s", [9.0, 1.0, 2.0], **bars).as_json("run it")
    assert (result["value"], result["spread"], result["repeats"]) == (2.0, [1.0, 9.0], 3)
    assert result["holds"] is holds
    assert result["command"] == "run it"
    assert (result["bar"] is None) == (holds is None)


def test_percentiles_are_of_each_run() -> None:
    runs = [[float(v) for v in range(1001)], [2.0 * v for v in range(1001)]]
    measurements = percentiles("call", "us", runs, {99.0: 1500.0})
    assert [one.name for one in measurements] == ["call, p50", "call, p99", "call, p99.9"]
    assert list(measurements[0].repeats) == [500.0, 1000.0]
    assert measurements[1].repeats[0] == pytest.approx(990.0)
    assert [one.holds for one in measurements] == [None, True, None]


def test_pairs_stand_side_by_side_in_turn() -> None:
    asked: list[str] = []

    def measure(side: str) -> float:
        asked.append(side)
        return {"one": 3.0, "other": 2.0}[side]

    assert ratios("one", "other", measure, 3) == [1.5, 1.5, 1.5]
    assert asked == ["one", "other", "other", "one", "one", "other", "other", "one"]


def test_what_missed_its_bar_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Measurement("slow", "s", [2.0], at_most=1.0).as_json(""),
        Measurement("fast", "s", [0.5], at_most=1.0).as_json(""),
    ]
    show(results)
    slow, fast = (
        line for line in capsys.readouterr().out.splitlines() if "slow" in line or "fast" in line
    )
    assert "NO" in slow
    assert "yes" in fast


@pytest.mark.slow
def test_all_of_them_are_run_and_written_down(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", "--quick", "--only", "start", "fold"]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "build/bench/result.json").read_text())
    assert len({one["name"] for one in results}) == len(results) > 8
    for one in results:
        assert one["spread"][0] <= one["value"] <= one["spread"][1]
        assert one["command"].startswith("python -m tools.bench.")
        assert "--json" not in one["command"]
    (memory,) = [one for one in results if "64 engines" in one["name"]]
    assert memory["unit"] == "MB"
    assert memory["value"] > 20
    assert not (tmp_path / "build/bench/part.json").exists()


def test_one_that_fails_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", "--quick", "--only", "fold"]
    # A unix socket cannot have so long a path.
    environment = ENVIRONMENT | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
    }
    (tmp_path / ("long" * 30)).mkdir()
    environment["TMPDIR"] = str(tmp_path / ("long" * 30))
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "failed: python -m tools.bench.fold_bench" in done.stderr


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: f"{bench.name} {bench.arguments}")
def test_what_all_of_them_are_called_with_is_taken(bench: Bench) -> None:
    """An option that a benchmark does not have ends it with 2."""
    module = importlib.import_module(f"tools.bench.{bench.name}_bench")
    for arguments in (bench.quick, bench.arguments):
        module.PARSER.parse_args(arguments.split())

"""The queue of docs/gpu.md, typed as it stands there, on SGLang's CUDA paths with an emulated GPU.

The kit's installation has a test of its own; here its job runs from a folder that stands for the
installed kit.  CI plays run 1; the others are nightly.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.core.cost.profile import Profile
from lab.gpu_check.shapes import EMULATED, Device
from lab.gpu_check.small_engines import arms
from tests.support.engine import ROOT, install_plugin, run_lab, start_with_engines
from tests.system.engine import sabotage
from tests.unit.docs.test_gpu_queue import RUNS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

KIT = "/opt/speculation-kit"
EMULATION = "EMULATED_CUDA=1"


class Queue:
    """Runs commands of the queue, each once.

    A plugin beside has every step wait for the device, which the check has to notice.
    """

    def __init__(self, folder: Path) -> None:
        self._kit, self.results, self._written = folder / "kit", folder / "out", folder / "check"
        self._kit.mkdir()
        shutil.copy(ROOT / "scripts" / "gpu_kit" / "job.sh", self._kit)
        waits = install_plugin(
            folder / "waits", f"{sabotage.__name__}:wait_for_the_device", "waits"
        )
        path = f"export PYTHONPATH={ROOT}:{ROOT / 'proto'}:{waits} PYTHONUNBUFFERED=1\n"
        (self._kit / "env.sh").write_text(path)
        self._results: dict[int, dict[str, Any]] = {}

    def result(self, number: int) -> dict[str, Any]:
        """What a run has left in its folder of results."""
        if number not in self._results:
            self._results[number] = self._run(RUNS[number])
        return self._results[number]

    def page(self, name: str) -> str:
        return (self.results / f"{name}.page.md").read_text()

    def _run(self, command: str) -> dict[str, Any]:
        variables = {
            "LAB_EMULATED_CUDA": "1",
            "OUT": str(self.results),
            "KIT_RESULTS": str(self._written),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        typed = ["bash", "-c", command.replace(KIT, str(self._kit))]
        with start_with_engines(typed, variables, imported_with=(EMULATION,)) as process:
            output, _ = process.communicate()
        print(output)
        assert process.returncode == 0, output
        name = command.split()[3]
        assert (self.results / f"{name}.tgz").exists()
        document: dict[str, Any] = json.loads((self.results / f"{name}.json").read_text())
        return document


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Queue:
    return Queue(tmp_path_factory.mktemp("queue"))


def test_run_1_compares_every_token(queue: Queue):
    result = queue.result(1)
    assert result["device"] == Device.EMULATED.value
    assert result["left_out"] == {}
    assert "lost" not in result
    exact = result["exact"]
    assert (exact["wrong"], exact["rounding"]) == (0, 0)
    assert exact["tokens"] > 0
    assert len(exact["arms"]) > 3  # plans come for every few steps on a busy machine
    # A drafter that wakes lets another one run in its place, at the same length.
    names, gammas = zip(*arms(Device.EMULATED), strict=True)
    assert {tuple(arm.split()) for arm in exact["arms"]} <= {
        (name, str(gamma)) for name in names for gamma in gammas
    }


def test_run_1_counts_what_rounding_decides_in_bfloat16(queue: Queue):
    counts = queue.result(1)["rounding"]
    assert set(counts) == {"plain-bfloat16", "fixed-bfloat16", "exact-bfloat16"}
    for counts_of_policy in counts.values():
        assert 0 <= counts_of_policy["differing"] <= counts_of_policy["answers"]
        assert counts_of_policy["answers"] > 0


def test_run_1_replays_graphs_alone_and_watches_for_synchronisations(queue: Queue):
    graphs = queue.result(1)["graphs"]
    ran = {(arm["drafter"], arm["gamma"]) for arm in graphs["arms"]}
    assert ran >= set(EMULATED.arms())
    assert sum(arm["eager_steps"] for arm in graphs["arms"]) == 0
    assert set(graphs["passes"]) == {"verification", "draft", "draft_extend", "block"}
    assert graphs["without_graphs"] == []
    assert graphs["syncs"]["steps"] > 0
    assert graphs["syncs"]["shim"] == {}
    (place,) = graphs["syncs"]["others"]
    assert place.startswith(sabotage.__file__)
    assert abs(graphs["syncs"]["others"][place] - graphs["syncs"]["steps"]) <= 1
    for state in graphs["prepared"].values():
        assert state["device_bytes"] > 0
        assert state["predicted_bytes"] > 0


def test_run_1_measures_a_profile_that_a_sidecar_takes(queue: Queue):
    document = queue.result(1)["costs"]["short"]["profile"]
    profile = Profile.from_json(json.dumps(document))
    cells = {(cell.drafter, cell.gamma, cell.batch_size) for cell in profile.cells}
    assert cells == {(*arm, size) for arm in EMULATED.arms() for size in EMULATED.batch_sizes}


def test_run_1_loses_no_request_with_its_sidecar(queue: Queue):
    outage = queue.result(1)["outage"]
    assert (outage["wrong"], outage["lost"]) == (0, [])
    assert outage["answers"] > 0
    assert outage["source_meanwhile"] != "PLAN"
    assert outage["lapses"] > 0


def test_run_1_has_a_page_with_a_verdict_for_each_part(queue: Queue):
    queue.result(1)
    text = queue.page("exact")
    for line in (
        "(no GPU: emulated CUDA)", "| exact | passed |", "| outage | passed |",
        "| costs | measured |", "| graphs | passed |", "| rounding | measured |", "B=2",
    ):  # fmt: skip
        assert line in text


@pytest.mark.nightly
def test_run_2_compares_every_policy(queue: Queue):
    result = queue.result(2)
    assert result["left_out"] == {}
    ran = [(arm["drafter"], arm["gamma"]) for arm in result["arms"]["arms"]]
    assert ran == list(EMULATED.arms())
    for arm in result["arms"]["arms"]:
        assert arm["steps"] > 0
        p = result["acceptance"][arm["drafter"]]
        # As the curve says, of a few dozen draws.
        most = sum(p**k for k in range(arm["gamma"] + 1))
        assert 1 <= arm["acceptance_length"] <= arm["gamma"] + 1
        assert arm["acceptance_length"] == pytest.approx(most, rel=0.5)
    assert {"sglang-adaptive", "off"} < set(result["arms"]["over"])
    assert set(result["asleep"]) == {str(load.concurrency) for load in EMULATED.loads}
    assert result["switches"]["change"]["switches"] > 0
    assert result["switches"]["wake"]["switches"] > 0


@pytest.mark.nightly
def test_run_2_prices_the_shim_in_a_step_and_on_the_thread(queue: Queue):
    overhead = queue.result(2)["overhead"]["overlap"]
    assert set(overhead) == {str(size) for size in EMULATED.batch_sizes}
    for row in overhead.values():
        assert row["step_microseconds_without"]["median"] > 0
        assert 0 < row["shim_microseconds"]["p50"] <= row["shim_microseconds"]["p99"]


@pytest.mark.nightly
def test_run_3_plays_the_day_with_every_policy(queue: Queue):
    result = queue.result(3)
    assert result["complete"], result["stopped"]
    policies = [run["policy"] for run in result["runs"]]
    assert {"off", "sglang-adaptive", "steered"} < set(policies)
    assert len(policies) == 4
    assert result["not_played"] == {}


@pytest.mark.nightly
def test_a_drafter_learns_while_it_serves(tmp_path: Path):
    """Run 5 of the queue will have this part; its command does not exist yet."""
    done = run_lab(
        "lab.gpu_check", "--emulated", "--parts", "learning", "--output", str(tmp_path),
        imported_with=(EMULATION,),
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0
    learning = json.loads((tmp_path / "result.json").read_text())["learning"]
    assert learning["wrong"] == 0
    assert learning["online"]["updates"] > 0
    assert learning["syncs"]["steps"] > 0
    assert learning["syncs"]["shim"] == {}

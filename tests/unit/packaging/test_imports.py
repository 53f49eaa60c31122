"""The layers of `.importlinter` hold, a broken one is found, and the sidecar loads no engine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE_SIDE = {"engine_shim", "sglang", "torch", "transformers", "vllm"}
PACKAGES = ("controller", "simulator", "engine_shim", "trainer", "lab", "tools")
LINT = Path(sys.executable).with_name("lint-imports")


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT, "--no-logo", "--no-cache"],
        cwd=tree,
        env={"PYTHONPATH": f"{tree}:{tree / 'proto'}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages, to break."""
    copy = tmp_path_factory.mktemp("tree")
    only_code = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.npy", "tokenizer.json")
    for name in (*PACKAGES, "proto"):
        shutil.copytree(ROOT / name, copy / name, ignore=only_code)
    shutil.copy(ROOT / ".importlinter", copy)
    return copy


def test_the_layers_hold(tree: Path):
    done = lint(tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("controller/core/clock.py", "from controller.wire import reports", "sidecar"),
        ("controller/core/cost/table.py", "import grpc", "numpy"),
        ("controller/recording/segments.py", "import controller.service.server", "sidecar"),
        ("controller/profiling/fit.py", "import controller.service.server", "sidecar"),
        ("controller/service/net/limits.py", "import controller.service.rpc.streams", "service"),
        ("simulator/engine.py", "import simulator.peers.static", "simulat"),
        ("controller/core/cost/table.py", "import controller.core.planning.planner", "core"),
        ("controller/cli/doctor.py", "import lab.papers.tide", "lab"),
        ("controller/cli/simulator.py", "from simulator.commands import advise", "imported there"),
        ("engine_shim/link/errors.py", "import controller.core.errors", "shim"),
        ("engine_shim/common/status.py", "import engine_shim.sglang.hooks", "shim"),
        ("engine_shim/common/process.py", "import torch", "share"),
        ("engine_shim/sglang/api/transfer.py", "import engine_shim.sglang.hooks", "plugin"),
        ("engine_shim/vllm/vllm_api.py", "import engine_shim.preflight.verdict", "shim"),
        ("trainer/checkpoint.py", "import trainer.worker", "trainer"),
        ("engine_shim/sglang/drafters/dual.py", "import engine_shim.sglang.learning", "plugin"),
        ("lab/harness/processes.py", "import lab.demo.run", "lab"),
        ("lab/harness/measured.py", "import tools.bench.measurement", "tools"),
    ],
)
def test_an_arrow_that_runs_back_is_found(tree: Path, module: str, line: str, contract: str):
    path = tree / module
    before = path.read_text()
    path.write_text(before + f"\n{line}\n")
    try:
        done = lint(tree)
    finally:
        path.write_text(before)
    assert done.returncode == 1, done.stdout
    broken = [row for row in done.stdout.splitlines() if row.endswith(" BROKEN")]
    assert any(contract in row for row in broken), broken


@pytest.mark.parametrize("module", ["controller.cli", "controller.service.server"])
def test_what_the_sidecar_loads_brings_no_engine_in(module: str):
    code = f"import {module}, sys; print(*sorted({ENGINE_SIDE!r} & sys.modules.keys()))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []

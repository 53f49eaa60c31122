"""The real SpecForge, from the package index: trains what was exported, on the CPU."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.installed_wheel import fetch_wheel

# Newest on the index, and what its offline trainer imports that .venv does not hold.  Without its
# dependencies: it pins a torch and an SGLang for CUDA.
PACKAGES = {
    "specforge": "0.2.0",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "multiprocess": "0.70.19",
    "pandas": "3.1.1",
    "pyarrow": "26.0.1",
}
# torch's FSDP refuses to work without a GPU; NO_SHARD is SpecForge's word for DDP, with gloo.
ON_CPU = (
    "deployment.trainer.nproc_per_node=1",
    "training.fsdp_sharding=NO_SHARD",
    "training.log_interval=1",
    "data.dataloader_num_workers=0",
)
# Enough for a drafter that has much to learn from a dozen samples to show it.
PASSES = (
    "training.num_epochs=6",
    "training.batch_size=4",
    "training.learning_rate=0.002",
    "training.lr_scheduler=constant",
    "training.warmup_ratio=0",
)
_RUNNER = Path(__file__).with_name("specforge_on_cpu.py")


@cache
def package_paths() -> tuple[Path, ...]:
    """The unpacked packages.  Skips the test, loudly, where the index does not have them."""
    try:
        return tuple(fetch_wheel(package, version) for package, version in PACKAGES.items())
    except subprocess.CalledProcessError as error:
        reason = f"SPECFORGE'S TRAINER WAS NOT TESTED: {' '.join(error.cmd[-1:])} cannot be had"
        print(f"\n*** {reason} ***", file=sys.__stderr__)
        pytest.skip(reason)


@dataclass(frozen=True)
class Run:
    """A run of the trainer from the folder of an export, and the export of what it has trained.

    overrides: of the exported configuration.  form: what `specforge export --to` is given.
    """

    exported: Path
    form: str
    overrides: tuple[str, ...] = ()

    @property
    def trained_folder(self) -> Path:
        """The folder of the trained drafter."""
        return self.exported / "trained"

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        # As it is on a machine with GPUs: resolved, and not run.
        plan = ["train", "--config", "specforge.json", "--plan"]
        nodes = ["deployment.trainer.nnodes=2", "deployment.trainer.master_addr=trainer-0"]
        second = [*plan, "--node-rank", "1", *nodes]
        train = ["train", "--config", "specforge.json", *ON_CPU, *self.overrides]
        export = ["export", "--to", self.form, "--checkpoint", "runs"]
        export += ["--draft-config", "draft/config.json", "--output-dir", "trained"]
        return [(str(self.exported), words) for words in (plan, second, train, export)]


def train_runs(*runs: Run, kernel: bool) -> list[list[dict[str, Any]]]:
    """Trains and exports in one process; returns what the trainer logs of each step of each run.

    kernel: whether the EAGLE3 loss is the Triton kernel, interpreted.
    """
    paths = (*package_paths(), os.environ.get("PYTHONPATH", ""))
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_INTERPRET": str(int(kernel)),
        "TORCH_COMPILE_DISABLE": "1",
    }
    commands = [command for run in runs for command in run.commands]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(_RUNNER), json.dumps(commands)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert not done.returncode, done.stderr[-3000:]
    logged: list[list[dict[str, Any]]] = []
    for line in done.stdout.splitlines():
        if line.startswith("step "):
            step, _, metrics = line.removeprefix("step ").partition(": ")
            if step == "1":
                logged.append([])
            logged[-1].append(ast.literal_eval(metrics))
    assert len(logged) == len(runs), done.stdout[-3000:]
    return logged

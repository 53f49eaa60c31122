"""Shim and sidecar of different versions: today's with the oldest that speak the contract."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.harness.sidecar import SidecarHandle
from tests.support.eventually import eventually
from tests.support.sidecar_process import CONTROLLER, sidecar_process, wait_until_serving
from tools.faults import engine_program
from tools.faults.driving import PATIENCE_SECONDS, PINNED_GAMMA, Operator
from tools.faults.fault import CannotInjectError, Observations, fault

_ROOT = Path(__file__).resolve().parents[2]
_STEPS = 300
_EXPECTED = "steered, reports taken, none refused"
# By which engine_program introduces itself.
_ENGINE_ID = "of-another-version"


@fault("older-shim", _EXPECTED, quick=True)
def old_shim(place: Path, observations: Observations) -> None:
    """Link and agent of the oldest commit that has them, at today's sidecar."""
    with _oldest_tree(place, observations) as tree, sidecar_process(place) as sidecar:
        Operator(sidecar.address).pin()
        with _engine(sidecar.address, tree) as engine:
            state = _run_until_steered(engine)
            observations.check(
                f"steered under the pin, at γ = {PINNED_GAMMA}",
                state["gamma"] == PINNED_GAMMA,
                state,
            )
            _check_reports(sidecar.address, observations)


@fault("older-sidecar", _EXPECTED, quick=True)
def old_sidecar(place: Path, observations: Observations) -> None:
    """Today's link and agent, with a lookup, at the sidecar of that commit."""
    address = f"unix:{place}/controller.sock"
    with _oldest_tree(place, observations) as tree:
        command = [*CONTROLLER, "serve", "--address", address, "--metrics-port", "0"]
        with (
            (place / "sidecar.log").open("w") as log,
            subprocess.Popen(
                command, cwd=tree, env=_environment(tree), stderr=log, text=True
            ) as process,
        ):
            try:
                wait_until_serving(address, process)
                with _engine(address, _ROOT, "plain") as engine:
                    state = _run_until_steered(engine)
                    observations.check("steered by a plan", state["source"] == "plan", state)
                    _check_reports(address, observations)
            finally:
                process.kill()


def _check_reports(address: str, observations: Observations) -> None:
    """Checks that the engine's reports are taken and none is refused."""
    with SidecarHandle(address, _ENGINE_ID) as sidecar:
        eventually(lambda: sidecar.status().reports >= _STEPS, description="reports are taken")
        rejected = sidecar.status().rejected_reports
    observations.check("its reports are taken, none is refused", rejected == 0, rejected)


def _run_until_steered(engine: "subprocess.Popen[str]") -> dict[str, Any]:
    """The engine's state `_STEPS` steps after a plan began to steer it."""
    start = time.monotonic()
    while _run_steps(engine, 10)["source"] != "plan":
        assert time.monotonic() - start < PATIENCE_SECONDS, "no plan comes"
    return _run_steps(engine, _STEPS)


def _run_steps(engine: "subprocess.Popen[str]", steps: int) -> dict[str, Any]:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(f"{steps}\n")
    engine.stdin.flush()
    reply: dict[str, Any] = json.loads(engine.stdout.readline())
    return reply


@contextmanager
def _engine(address: str, tree: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, str(Path(engine_program.__file__)), address, *words]
    with subprocess.Popen(
        command,
        # `python -m`, by which it starts its agent, looks there first.
        cwd=tree,
        env=_environment(tree),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def _environment(tree: Path) -> Mapping[str, str]:
    """Variables that make a process run the tree's own code, whatever is installed."""
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("CONTROLLER_", "SPECULATION"))
    }
    return variables | {"PYTHONPATH": os.pathsep.join([str(tree / "proto"), str(tree)])}


@contextmanager
def _oldest_tree(place: Path, observations: Observations) -> Iterator[Path]:
    """The first commit that has an agent, checked out; its contract only grew since."""
    added = ["log", "--diff-filter=A", "--format=%H", "--", "engine_shim/link/agent.py"]
    shallow = _git("rev-parse", "--is-shallow-repository")
    commits = _git(*added).split()
    if shallow != "false" or not commits:
        raise CannotInjectError("older versions need the whole history of the repository")
    tree = place / "oldest"
    _git("worktree", "add", "--detach", str(tree), commits[-1])
    observations.figure("oldest_commit", commits[-1][:7])
    try:
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() if run.returncode == 0 else ""

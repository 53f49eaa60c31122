"""The Dockerfiles, by a linter, and against the rest of this tree."""

import fnmatch
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from controller.settings.settings import DEFAULT_ADDRESS
from engine_shim.sglang.api.versions import TESTED
from tests.unit.deploy.manifests import ROOT, containers, pod

DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    with path.open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    return [(item["instruction"], item["value"]) for item in structure]


def test_all_three_are_here():
    assert [path.name for path in FILES] == [
        "demo.Dockerfile", "sglang.Dockerfile", "sidecar.Dockerfile"
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_linter_finds_no_fault(path: Path):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_base_is_pinned_and_the_user_is_the_one_of_the_pod(path: Path):
    instruction_list = instructions(path)
    spec = containers("single")
    user = pod("single")["securityContext"]["runAsUser"]
    if path.name != "sidecar.Dockerfile":
        user = spec["sglang"]["securityContext"]["runAsUser"]
    assert [value for name, value in instruction_list if name == "USER"] == [f"{user}:{user}"]
    bases = [value for name, value in instruction_list if name == "FROM"]
    for base in bases:
        assert base.startswith(("python:3.11.13-slim", "${SGLANG_IMAGE}"))
    arguments = [value for name, value in instruction_list if name == "ARG"]
    if path.name == "sglang.Dockerfile":
        assert arguments == [f"SGLANG_IMAGE=lmsysorg/sglang:v{TESTED[-1]}"]


def test_the_context_holds_what_the_wheel_is_made_from():
    kept = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]  # fmt: skip
    for needed in ("controller", "engine_shim", "lab", "proto", "profiles", "pyproject.toml",
                   "README.md", "LICENSE", "requirements"):  # fmt: skip
        assert any(fnmatch.fnmatch(needed, pattern) for pattern in kept), needed
        assert (ROOT / needed).exists()


def test_the_sidecar_serves_where_the_shim_looks_for_it():
    values_by_instruction = dict(instructions(DOCKER / "sidecar.Dockerfile"))
    assert values_by_instruction["ENTRYPOINT"] == '["controller"]'
    assert values_by_instruction["CMD"] == '["serve"]'
    assert DEFAULT_ADDRESS == "unix:/run/speculation/controller.sock"

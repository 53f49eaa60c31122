"""What the images install: locked as pyproject.toml asks, by hash, and installed as they do it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import controller
from tests.unit.packaging.environments import ROOT, closure, environment, installed, run

LOCKS = ROOT / "requirements" / "lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIM = tomllib.loads((ROOT / "engine_shim" / "pyproject.toml").read_text())
PROJECT_VERSION = controller.__version__
ASKED = {
    "sidecar": PROJECT["project"]["dependencies"],
    "engine": SHIM["project"]["dependencies"],
    "build": PROJECT["build-system"]["requires"],
}
ENTRY = re.compile(r"([a-z0-9-]+)==([^ \\]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def entries(name: str) -> dict[str, str]:
    """Name and version of every package; fails for a lock that holds anything else."""
    head, _, body = (LOCKS / f"{name}.txt").read_text().partition("\n")
    assert head.startswith("# `make lock`")
    pinned_entries = ENTRY.findall(body)
    assert "".join(f"{n}=={v}{hashes}\n" for n, v, hashes in pinned_entries) == body
    pins = {n: v for n, v, _ in pinned_entries}
    assert len(pins) == len(pinned_entries)
    return pins


@pytest.mark.parametrize("name", ASKED)
def test_every_dependency_is_locked_within_its_bounds(name: str):
    pins = entries(name)
    for requirement in map(Requirement, ASKED[name]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("name", ["sidecar", "engine"])
def test_what_is_locked_is_what_the_tests_run_with_and_all_of_it(name: str):
    constraints = dict(
        line.split("==") for line in (ROOT / "requirements" / "constraints.txt").read_text().split()
        if "==" in line
    )  # fmt: skip
    tested = {canonicalize_name(package): version for package, version in constraints.items()}
    pins = entries(name)
    assert pins.items() <= tested.items()
    needed = closure([Requirement(text).name for text in ASKED[name]])
    assert {canonicalize_name(it.name) for it in needed} == set(pins)


def steps(dockerfile: str, places: dict[str, Path]) -> list[str]:
    """What its RUN instructions do, with these places for those of the image."""
    with (ROOT / "deploy" / "docker" / dockerfile).open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    commands = []
    for item in structure:
        if item["instruction"] == "RUN":
            command = re.sub(r"--mount=\S+|--no-cache-dir", "", item["value"])
            for name, place in places.items():
                command = re.sub(rf"(?<![\w/])/{name}(?=[/\s]|$)", str(place), command)
            commands.append(command)
    return commands


def carry_out(step: str, python: Path, tmp_path: Path) -> None:
    """Runs a step in an environment: there `pip` means this one."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    shim = tmp_path / "bin" / "pip"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {python} "$@"\n')
    shim.chmod(0o755)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", step],
        env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


packaging = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "run").mkdir()
    return {"source": ROOT, "wheels": tmp_path / "wheels", "lock": LOCKS, "run": tmp_path / "run"}


class TestImages:
    """The steps of the Dockerfiles, in environments of their own."""

    pytestmark = packaging

    def test_the_sidecars_image_holds_the_lock_the_wheel_and_nothing_else(
        self, tmp_path: Path, places: dict[str, Path]
    ):
        build, install = steps("sidecar.Dockerfile", places)
        carry_out(build, environment(tmp_path / "build"), tmp_path)
        python = environment(tmp_path / "sidecar")
        carry_out(install, python, tmp_path)
        own = {"speculation-controller": PROJECT_VERSION}
        assert installed(python) == entries("sidecar") | own
        assert "Usage" in run(tmp_path / "sidecar" / "bin" / "controller", "serve", "--help")

    def test_sglangs_image_gets_what_it_has_not_and_keeps_what_it_has(
        self, tmp_path: Path, places: dict[str, Path], sglang_environment: Path, shim_wheel: Path,
        trainer_wheel: Path,
    ):  # fmt: skip
        places["wheels"] = tmp_path / "both"
        places["wheels"].mkdir()
        for built in (shim_wheel, trainer_wheel):
            shutil.copy(built, places["wheels"])
        # Versions of its own, under names as their authors write them.
        (packages,) = (tmp_path / "sglang" / "lib").glob("python3*/site-packages")
        for name, version in (("pydantic_settings", "2.7.0"), ("PyYAML", "6.0.2")):
            for old in packages.glob(f"{name}-*.dist-info"):
                shutil.rmtree(old)
            metadata = packages / f"{name}-{version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
            files = (metadata / "METADATA", metadata / "RECORD")
            files[1].write_text("".join(f"{file.relative_to(packages)},,\n" for file in files))
        before = installed(sglang_environment)
        assert {"pydantic-settings": "2.7.0", "pyyaml": "6.0.2"}.items() <= before.items()
        *_, install = steps("sglang.Dockerfile", places)
        carry_out(install, sglang_environment, tmp_path)
        after = installed(sglang_environment)
        assert before.items() <= after.items()
        added = dict(after.items() - before.items())
        assert added.pop("speculation-controller-shim") == PROJECT_VERSION
        assert added.pop("speculation-controller-trainer") == PROJECT_VERSION
        assert added.items() <= entries("engine").items()
        assert "structlog" in added
        assert not {"redis", "rich", "typer", "prometheus-client"} & added.keys()
        assert not list(places["run"].iterdir())

    def test_a_file_that_is_not_the_one_that_was_locked_is_not_installed(
        self, tmp_path: Path, places: dict[str, Path]
    ):
        text = (LOCKS / "build.txt").read_text()
        forged = tmp_path / "forged"
        forged.mkdir()
        (forged / "build.txt").write_text(re.sub(r"sha256:\w", "sha256:0", text))
        step = steps("sidecar.Dockerfile", places)[0].replace(str(LOCKS), str(forged))
        with pytest.raises(AssertionError, match="DO NOT MATCH THE HASHES"):
            carry_out(step, environment(tmp_path / "build"), tmp_path)

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_every_package_has_a_locked_wheel_for_both_machines(self, machine: str, tmp_path: Path):
        run(
            sys.executable, "-m", "uv", "pip", "install", "--no-config", "--dry-run",
            "--require-hashes", "--only-binary", ":all:", "--python", sys.executable,
            "--python-version", "3.11.13", "--python-platform", f"{machine}-manylinux_2_31",
            "--target", tmp_path, *(f"--requirements={LOCKS / name}.txt" for name in ASKED),
        )  # fmt: skip

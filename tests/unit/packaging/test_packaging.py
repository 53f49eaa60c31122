"""The project as it is installed: what the wheel holds, and what it does to its environment."""

import json
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.packaging.environments import (
    ROOT,
    closure,
    environment,
    installed,
    pinned,
    pip,
    run,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What sglang 0.5.23 asks of gRPC on a GPU host, by way of its smg-grpc-servicer 0.14.
SGLANG_GRPC_FLOOR = [
    "grpcio==1.81.1",
    "grpcio-health-checking==1.81.1",
    "grpcio-reflection==1.81.1",
    "protobuf==6.33.5",
]

pytestmark = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.timeout(600)]


def lower_bounds() -> list[str]:
    """The dependencies, each at the lowest version that pyproject.toml admits."""
    return [dependency.replace(">=", "==") for dependency in PROJECT["dependencies"]]


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("package", ["controller", "engine_shim", "speculation"])
def test_the_wheel_is_typed(contents: set[str], package: str):
    assert f"{package}/py.typed" in contents


def test_the_wheel_holds_the_stubs_and_their_types(contents: set[str]):
    stubs = {f"speculation/v1/{name}_pb2.py" for name in ("engine", "plan", "service")}
    stubs.add("speculation/v1/service_pb2_grpc.py")
    assert stubs | {f"{name}i" for name in stubs} <= contents


def test_the_wheel_holds_every_file_of_its_packages(contents: set[str]):
    ignored = re.compile(r"__pycache__|\.pyc$")
    files = {
        str(path.relative_to(ROOT))
        for package in ("controller", "engine_shim")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not ignored.search(str(path))
    }
    assert files <= contents


def test_the_wheel_declares_its_command_and_its_plugin(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        metadata = f"speculation_controller-{wheel.name.split('-')[1]}.dist-info"
        entry_points = archive.read(f"{metadata}/entry_points.txt").decode()
    assert "controller = controller.cli:main" in entry_points
    assert "[sglang.srt.plugins]" in entry_points


@pytest.mark.parametrize("end", ["lowest", "newest"])
def test_both_ends_of_the_dependency_range_work(end: str, wheel: Path, tmp_path: Path):
    python = environment(tmp_path / "venv")
    pip(python, "install", "--no-compile", wheel, *(lower_bounds() if end == "lowest" else []))
    versions = json.loads(run(python, ROOT / "tests" / "workshop" / "round_trip.py"))
    if end == "lowest":
        assert f"grpcio=={versions['grpcio']}" in lower_bounds()
        assert f"protobuf=={versions['protobuf']}" in lower_bounds()
    else:
        assert int(versions["protobuf"].split(".")[0]) >= 7
    assert not {"torch", "sglang", "matplotlib", "scipy", "pandas"} & installed(python).keys()
    assert "--health-port" in run(tmp_path / "venv" / "bin" / "controller", "serve", "--help")
    print(end, versions)


def test_the_sidecars_image_is_as_small_as_the_page_says(wheel: Path):
    """The packages of its lock, as they lie here; no extras, no bytecode."""
    with (ROOT / "deploy" / "docker" / "sidecar.Dockerfile").open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    install = [item["value"] for item in structure if item["instruction"] == "RUN"][-1]
    assert install.count("--no-compile") == install.count("pip install") == 2
    with zipfile.ZipFile(wheel) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    names = [Requirement(text).name for text in PROJECT["dependencies"]]
    for distribution in closure(names):
        assert distribution.name != "torch"
        for path in distribution.files or []:
            if path.suffix != ".pyc":
                size += Path(str(distribution.locate_file(path))).stat().st_size
    page = (ROOT / "docs" / "deploy.md").read_text()
    (said,) = re.findall(r"it installs (\d+) MB of packages", page)
    assert size / 1e6 == pytest.approx(float(said), rel=0.1)


def would_install(python: Path, tmp_path: Path, *arguments: str) -> dict[str, str]:
    report = tmp_path / "report.json"
    pip(python, "install", "--dry-run", "--report", report, *arguments)
    entries: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    metadata = [entry["metadata"] for entry in entries]
    return {canonicalize_name(entry["name"]): entry["version"] for entry in metadata}


def test_installing_into_sglangs_environment_changes_none_of_its_packages(
    sglang_environment: Path, wheel: Path, tmp_path: Path
):
    before = installed(sglang_environment)
    assert pinned().items() <= before.items()
    assert "speculation-controller" not in before
    new = would_install(sglang_environment, tmp_path, f"{wheel}[engine]")
    assert new.keys() & before.keys() == set()
    assert {"speculation-controller", "grpcio", "structlog"} <= new.keys()


def test_an_older_grpc_that_sglang_came_with_stays(
    sglang_environment: Path, wheel: Path, tmp_path: Path
):
    pip(sglang_environment, "install", *SGLANG_GRPC_FLOOR)
    before = installed(sglang_environment)
    new = would_install(sglang_environment, tmp_path, f"{wheel}[engine]")
    assert new.keys() & before.keys() == set()

"""The wheels: what they hold, on what they run, and what they do to their environments."""

import json
import re
import subprocess
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import controller
from lab.harness.scripted_sidecar import ScriptedSidecar
from simulator.scenarios.scenario_file import standard_scenarios
from tests.support.link_messages import plan
from tests.unit.packaging.environments import (
    ROOT,
    closure,
    environment,
    installed,
    pinned,
    pip,
    run,
)
from tools.faults import engine_program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIM = tomllib.loads((ROOT / "engine_shim" / "pyproject.toml").read_text())["project"]
TRAINER = tomllib.loads((ROOT / "trainer" / "pyproject.toml").read_text())["project"]
SIMULATOR = tomllib.loads((ROOT / "simulator" / "pyproject.toml").read_text())["project"]

# What sglang 0.5.23 asks of gRPC on a GPU host, by way of its smg-grpc-servicer 0.14.
SGLANG_GRPC_FLOOR = [
    "grpcio==1.81.1",
    "grpcio-health-checking==1.81.1",
    "grpcio-reflection==1.81.1",
    "protobuf==6.33.5",
]

pytestmark = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.timeout(600)]

# The lowest versions never change; the newest ones are what the package index has today.
ENDS = ("lowest", pytest.param("newest", marks=pytest.mark.nightly))


def lower_bounds(project: dict[str, Any]) -> list[str]:
    """The dependencies, each at the lowest version that its pyproject.toml admits."""
    return [dependency.replace(">=", "==") for dependency in project["dependencies"]]


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files(*folders: str) -> set[str]:
    """What lies in these folders of the tree, without what running leaves and what explains."""
    ignored = re.compile(r"__pycache__|\.pyc$|\.md$|pyproject\.toml$|hatch_build\.py$")
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not ignored.search(str(path))
    }


def contract() -> set[str]:
    return {name.removeprefix("proto/") for name in files("proto/speculation")}


def test_the_sidecars_wheel_holds_its_package_and_the_contract_and_no_more(wheel: Path):
    held = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert held - {"controller/profiles/README.md"} == files("controller") | contract()
    assert {"controller/py.typed", "speculation/py.typed"} <= held


def test_the_sidecars_wheel_holds_the_licence_of_the_chart_library_too(wheel: Path):
    name = "-".join(wheel.name.split("-")[:2])
    texts = {path for path in contents(wheel) if "/licenses/" in path}
    assert texts == {
        f"{name}.dist-info/licenses/LICENSE",
        f"{name}.dist-info/licenses/controller/page/vendor/uplot/LICENSE",
    }
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{name}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0 AND MIT" in metadata


def test_the_shims_wheel_holds_its_package_and_the_contract_and_no_more(shim_wheel: Path):
    held = {name for name in contents(shim_wheel) if ".dist-info/" not in name}
    held = {name for name in held if not name.endswith(".md")}
    assert held == files("engine_shim") | contract() | {"engine_shim/LICENSE"}
    assert {"engine_shim/py.typed", "speculation/py.typed"} <= held


def test_the_trainers_wheel_holds_its_package_and_no_more(trainer_wheel: Path):
    held = {name for name in contents(trainer_wheel) if ".dist-info/" not in name}
    assert held == files("trainer") | {"trainer/LICENSE"}
    assert "trainer/py.typed" in held


def test_the_simulators_wheel_holds_its_package_and_the_scenarios_and_no_more(
    simulator_wheel: Path,
):
    held = {name for name in contents(simulator_wheel) if ".dist-info/" not in name}
    assert held == files("simulator") | {"simulator/LICENSE"}
    assert "simulator/py.typed" in held
    assert sum(name.endswith(".yaml") for name in held) == len(standard_scenarios())


def test_the_contract_comes_with_its_types():
    stubs = {f"speculation/v1/{name}_pb2.py" for name in ("engine", "plan", "service")}
    stubs.add("speculation/v1/service_pb2_grpc.py")
    assert stubs | {f"{name}i" for name in stubs} <= contract()


def test_each_wheel_declares_its_own_entry_point_and_all_have_one_version(
    wheel: Path, shim_wheel: Path, simulator_wheel: Path, trainer_wheel: Path
):
    def declared(path: Path) -> str:
        name = "-".join(path.name.split("-")[:2])
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"{name}.dist-info/entry_points.txt").decode()

    assert "controller = controller.cli:main" in declared(wheel)
    assert "sglang.srt.plugins" not in declared(wheel)
    assert "[sglang.srt.plugins]" in declared(shim_wheel)
    assert "[console_scripts]\nspeculation-would-steer = engine_shim." in declared(shim_wheel)
    assert "speculation-trainer = trainer.__main__:main" in declared(trainer_wheel)
    for built in (wheel, shim_wheel, simulator_wheel, trainer_wheel):
        assert built.name.split("-")[1] == controller.__version__
    assert f"speculation-controller-shim=={controller.__version__}" in TRAINER["dependencies"]
    assert SIMULATOR["dependencies"] == [f"speculation-controller=={controller.__version__}"]


def test_the_sidecar_names_the_simulators_commands_and_has_them_once_it_is_installed(
    wheel: Path, simulator_wheel: Path, tmp_path: Path
):
    python = environment(tmp_path / "venv")
    command = tmp_path / "venv" / "bin" / "controller"
    pip(python, "install", "--no-compile", wheel)
    assert {"simulate", "convert", "advise"} <= set(run(command, "--help").split())
    asked = ("advise", "--pool", "H100:8:6.76:2.44")
    for words in (("simulate", "--suite", "standard"), ("convert", "a", "b", "--force"), asked):
        refused = subprocess.run(
            [command, *words], capture_output=True, text=True, check=False, cwd="/"
        )
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == (
            f"controller {words[0]}: the simulator is not installed: "
            "pip install speculation-controller-simulator\n"
        )
    assert "pip install speculation-controller-simulator" in run(command, "simulate", "--help")
    pip(python, "install", "--no-compile", "--no-deps", simulator_wheel)
    assert "pays from a speedup" in run(command, *asked)
    assert run(command, "simulate", "--dump-scenario", "bursts").startswith("name: bursts")
    line = (
        "--acceptance geometric:0.7 --cost h100-llama3.1-8b --concurrency 1 --tokens 50 --seeds 1"
    )
    assert "oracle" in run(command, "simulate", *line.split())
    assert "matplotlib" not in installed(python)


@pytest.mark.parametrize("end", ENDS)
def test_both_ends_of_the_sidecars_dependency_range_work(end: str, wheel: Path, tmp_path: Path):
    python = environment(tmp_path / "venv")
    lowest = lower_bounds(PROJECT)
    pip(python, "install", "--no-compile", wheel, *(lowest if end == "lowest" else []))
    versions = json.loads(run(python, ROOT / "tests" / "unit" / "packaging" / "round_trip.py"))
    if end == "lowest":
        assert f"grpcio=={versions['grpcio']}" in lowest
        assert f"protobuf=={versions['protobuf']}" in lowest
    else:
        assert int(versions["protobuf"].split(".")[0]) >= 7
    assert not {"torch", "sglang", "matplotlib", "scipy", "pandas"} & installed(python).keys()
    command = tmp_path / "venv" / "bin" / "controller"
    assert "--health-port" in run(command, "serve", "--help")
    run(python, ROOT / "tests" / "unit" / "packaging" / "sidecar_calls.py", command)
    print(end, versions)


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["lowest", "newest"])
def test_the_shims_link_works_at_both_ends_of_its_dependency_range(
    end: str, shim_wheel: Path, tmp_path: Path
):
    """The link, installed from the wheel alone, introduces an engine and follows the plan."""
    python = environment(tmp_path / "venv")
    lowest = lower_bounds(SHIM)
    pip(python, "install", "--no-compile", shim_wheel, *(lowest if end == "lowest" else []))
    packages = installed(python)
    assert not {"redis", "rich", "typer", "prometheus-client", "torch", "sglang"} & packages.keys()
    for engine, name in (("sglang", "SGLang"), ("vllm", "vLLM")):
        asked = [str(tmp_path / "venv/bin/speculation-would-steer"), engine, "--", "MODEL"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, cwd="/")
        assert (answer.returncode, answer.stdout) == (2, "")
        assert f"{name} is not installed in this environment" in answer.stderr
    with ScriptedSidecar(f"unix:{tmp_path}/sidecar.sock", plans_once=True) as sidecar:
        sidecar.first_plan = lambda: plan(1, 2)
        output = run(python, engine_program.__file__, sidecar.target, stdin_text="1000\n1000\n")
    last = json.loads(output.splitlines()[-1])
    assert last == {"source": "plan", "gamma": 2}


def test_the_trainer_runs_from_its_wheel_beside_the_shim_and_torch(
    shim_wheel: Path, trainer_wheel: Path, tmp_path: Path
):
    python = environment(tmp_path / "venv")
    pip(python, "install", "--no-compile", "--no-deps", shim_wheel, trainer_wheel)
    # What both need, torch foremost, as it is installed here; this clone stays off the path.
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import engine_shim, trainer; print(engine_shim, trainer)")
    assert where.count(str(packages)) == 2
    command = tmp_path / "venv" / "bin" / "speculation-trainer"
    for task in ("attend", "export", "import", "sd2"):
        assert f"usage: speculation-trainer {task}" in run(command, task, "--help")
    asked = [str(command), "import", str(tmp_path / "none"), "--signals", str(tmp_path)]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False, cwd="/")
    assert answer.returncode == 2, answer.stderr


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
    (documented_megabytes,) = re.findall(r"it installs (\d+) MB of packages", page)
    assert size / 1e6 == pytest.approx(float(documented_megabytes), rel=0.1)


def would_install(python: Path, tmp_path: Path, *arguments: str) -> dict[str, str]:
    report = tmp_path / "report.json"
    pip(python, "install", "--dry-run", "--report", report, *arguments)
    entries: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    metadata = [entry["metadata"] for entry in entries]
    return {canonicalize_name(entry["name"]): entry["version"] for entry in metadata}


def test_installing_into_sglangs_environment_changes_none_of_its_packages(
    sglang_environment: Path, shim_wheel: Path, tmp_path: Path
):
    before = installed(sglang_environment)
    assert pinned().items() <= before.items()
    assert "speculation-controller-shim" not in before
    new = would_install(sglang_environment, tmp_path, str(shim_wheel))
    assert new.keys() & before.keys() == set()
    assert {"speculation-controller-shim", "grpcio", "structlog"} <= new.keys()


def test_an_older_grpc_that_sglang_came_with_stays(
    sglang_environment: Path, shim_wheel: Path, tmp_path: Path
):
    pip(sglang_environment, "install", *SGLANG_GRPC_FLOOR)
    before = installed(sglang_environment)
    new = would_install(sglang_environment, tmp_path, str(shim_wheel))
    assert new.keys() & before.keys() == set()

import sys
from pathlib import Path

import pytest

from tests.unit.packaging.environments import ROOT, closure, environment, pinned, pip


def _built(project: Path, directory: Path) -> Path:
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", directory, project)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sidecar's."""
    return _built(ROOT, tmp_path_factory.mktemp("sidecar-wheel"))


@pytest.fixture(scope="session")
def shim_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim's."""
    return _built(ROOT / "engine_shim", tmp_path_factory.mktemp("shim-wheel"))


@pytest.fixture(scope="session")
def trainer_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainer's."""
    return _built(ROOT / "trainer", tmp_path_factory.mktemp("trainer-wheel"))


@pytest.fixture(scope="session")
def simulator_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulator's."""
    return _built(ROOT / "simulator", tmp_path_factory.mktemp("simulator-wheel"))


@pytest.fixture
def sglang_environment(tmp_path: Path) -> Path:
    """Interpreter of an environment that looks to pip like one with SGLang and without us.

    It holds the metadata of SGLang, torch, the pinned packages and all that they require, as they
    are installed here, and none of their gigabytes.
    """
    python = environment(tmp_path / "sglang")
    (packages,) = (tmp_path / "sglang" / "lib").glob("python3*/site-packages")
    for distribution in closure(["sglang", "torch", *pinned()]):
        name = distribution.name.replace("-", "_")
        metadata = packages / f"{name}-{distribution.version}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(distribution.read_text("METADATA") or "")
        (metadata / "RECORD").touch()
        (metadata / "INSTALLER").write_text("pip\n")
    return python

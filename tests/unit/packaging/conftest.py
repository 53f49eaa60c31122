import sys
from pathlib import Path

import pytest

from tests.unit.packaging.environments import ROOT, closure, environment, pinned, pip


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", directory, ROOT)
    (built,) = directory.glob("*.whl")
    return built


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

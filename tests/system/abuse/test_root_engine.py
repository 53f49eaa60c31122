"""An engine's container whose process is root: it has the engines' socket and is no operator."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from controller.util.exit_codes import Exit
from tests.support.service_harness import ENVIRONMENT, PATIENCE_SECONDS
from tests.support.sidecar_process import CONTROLLER, sidecar_process

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root"
)


def override(address: str, author: str, *around: str) -> "subprocess.CompletedProcess[str]":
    words = ("override", "set", "--address", address, "--fleet", "--gamma", "0", "--reason", "r",
             "--author", author, "--allow-no-effect")  # fmt: skip
    return subprocess.run(
        [*around, *CONTROLLER, *words], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip


def test_root_in_the_engines_container_is_no_operator(tmp_path: Path):
    # Short names: a socket's path has 107 bytes at most.
    operators, engines = tmp_path / "o", tmp_path / "e"
    for folder in (operators, engines):
        folder.mkdir()
    # The engine's container: the directory of the operators' socket is not mounted there.
    script = f'mount -t tmpfs none {operators} && exec "$@"'
    container = ("unshare", "--mount", "sh", "-c", script, "sh")
    with sidecar_process(
        engines, environment={"CONTROLLER_OPERATORS_DIRECTORY": str(operators)}
    ) as sidecar:
        refused = override(sidecar.address, "engine", *container)
        assert refused.returncode == Exit.NO_SIDECAR, refused.stderr
        # Where the directory is, the commands find the socket without being told.
        taken = override(sidecar.address, "ann")
        assert taken.returncode == 0, taken.stderr
        listed = subprocess.run(
            [*CONTROLLER, "override", "log", "--address", sidecar.address],
            env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS,
        ).stdout  # fmt: skip
        assert "ann" in listed
        assert "engine" not in listed.partition("\n")[2]

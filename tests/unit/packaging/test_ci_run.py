"""CI fails where vLLM's environment cannot be made, and not where its wheel cannot run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# As the real one, which ends with 2 whatever its command ended with.
MAKE = """#!/bin/sh
echo "make $*" >>made
[ "$1" != setup-vllm ] || scripts/setup_vllm.sh || exit 2
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("set_up", "is_made", "passes"),
    [("exit 0", True, True), ("exit 3", False, True), ("exit 1", False, False)],
    ids=["made", "the wheel cannot run", "pip failed"],
)
def test_ci_fails_where_the_environment_of_vllm_cannot_be_made(
    tmp_path: Path, set_up: str, is_made: bool, passes: bool
) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "build").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    script(tmp_path / "bin" / "make", MAKE)
    script(tmp_path / "scripts" / "setup_vllm.sh", f"#!/bin/sh\n{set_up}\n")
    if is_made:
        script(tmp_path / ".venv-vllm" / ".made-from", "")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(tmp_path / ".ci" / "run")], env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    assert ("VLLM WAS NOT TESTED" in done.stdout) is not is_made
    assert ("tests/system/vllm tests/" in (tmp_path / "made").read_text()) is is_made

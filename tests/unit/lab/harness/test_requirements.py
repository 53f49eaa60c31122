import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("lab.demo", "aiohttp"),
        ("lab.learning", "matplotlib"),
        ("lab.gpu_check", "aiohttp"),
        ("lab.cpu_engine.serve", "SGLang"),
        ("lab.cpu_engine.models.make", "torch"),
    ],
)
def test_a_command_without_its_packages_names_them_and_says_what_to_do(command: str, module: str):
    # -S: without site-packages, as in an environment that has only the clone on its path.
    done = subprocess.run(
        [sys.executable, "-S", "-m", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{command} needs" in done.stderr
    assert module in done.stderr
    assert "make setup" in done.stderr

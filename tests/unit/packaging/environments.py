"""Virtual environments, and what is installed in them."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str | Path, stdin_text: str | None = None) -> str:
    """Output of a command, which finds no module of this tree unless it is installed.

    Fails the test with everything the command printed when it fails.
    stdin_text: for its standard input.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        input=stdin_text, capture_output=True, text=True, check=False, cwd="/", env=variables,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(python: Path | str, *arguments: str | Path) -> str:
    """Runs this environment's pip on another one, which needs none of its own then."""
    own = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    return run(*own, "--python", python, *arguments)


def environment(path: Path) -> Path:
    """The interpreter of a new virtual environment."""
    venv.create(path)
    return path / "bin" / "python"


def installed(python: Path) -> dict[str, str]:
    """Name and version of every package in the environment of that interpreter."""
    (packages,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    distributions = importlib.metadata.distributions(path=[str(packages)])
    return {canonicalize_name(one.name): one.version for one in distributions}


def closure(names: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions of these names and what they require, as installed here."""
    seen: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or one of those that need a GPU
        yield distribution
        if name == "sglang":
            continue  # installed without its requirements
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)


def pinned() -> dict[str, str]:
    """Name and version of SGLang's pinned packages."""
    lines = (ROOT / "requirements" / "sglang-cpu.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}

"""Writes requirements/lock: what the images install, pinned, with the hash of every file.

sidecar.txt: what the sidecar needs.  engine.txt: what the shim needs beside SGLang, of which the
image installs what SGLang's has not.  build.txt: what the wheel of this project is built with.
Versions are those of requirements/constraints.txt, which is what the tests run with; it does not
hold those of build.txt, which stay as they are until `--upgrade`.
"""

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
SHIM = ROOT / "engine_shim" / "pyproject.toml"
LOCKS = ROOT / "requirements" / "lock"

# One lock holds for all of these, or none is written: the oldest Python and the newest.
_KINDS = (("x86_64", "3.11.13"), ("aarch64", "3.13"))
_GLIBC = "manylinux_2_31"
_HEAD = "# `make lock` writes it, and the images install it by its hashes.\n"
_FORM = (
    "--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate",
    "--no-emit-index-url", "--no-config", "--quiet",
)  # fmt: skip


class LockError(Exception):
    """Nothing was written; the message says why."""


def inputs(folder: Path, *, upgrade: bool) -> dict[str, tuple[list[str | Path], str]]:
    """Of every lock: the compiler's arguments, and what it reads from its standard input."""
    constraints: list[str | Path] = ["--constraints", ROOT / "requirements" / "constraints.txt"]
    before = folder / "build.txt"
    kept: list[str | Path] = ["--constraints", before] if before.exists() and not upgrade else []
    requires = tomllib.loads(PROJECT.read_text())["build-system"]["requires"]
    return {
        "sidecar": ([PROJECT, *constraints], ""),
        "engine": ([SHIM, *constraints], ""),
        "build": (["-", *constraints, *kept], "\n".join(requires)),
    }


def compiled(name: str, arguments: list[str | Path], said: str) -> str:
    """The lock's text.

    Raises LockError, also when two kinds of machine or Python would need different ones.
    """
    found = []
    for machine, python in _KINDS:
        kind = ("--python-platform", f"{machine}-{_GLIBC}", "--python-version", python)
        done = subprocess.run(
            [sys.executable, "-m", "uv", "pip", "compile", *arguments, *_FORM, *kind],
            input=said, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise LockError(f"{name}, {machine}, Python {python}: {done.stderr.strip()}")
        found.append(done.stdout)
    if len(set(found)) > 1:
        raise LockError(f"{name}: not the same packages for {_KINDS}")
    return _HEAD + found[0]


def main() -> int:
    """Exit code 1 when a lock cannot be made: then none is written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take newer tools for the build")
    parser.add_argument("--folder", type=Path, default=LOCKS, help="where the locks are")
    options = parser.parse_args()
    wanted = inputs(options.folder, upgrade=options.upgrade)
    try:
        texts = {name: compiled(name, *given) for name, given in wanted.items()}
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (options.folder / f"{name}.txt").write_text(text)
        print(f"lock: {name}.txt: {text.count('==')} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())

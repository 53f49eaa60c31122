"""Compares the newest version of each engine with what the plugins use: `make upstream`.

It fetches the newest wheels from the package index (0.4 GB for both), reads them without running
anything, and prints what has changed since the newest known version.  The exit code is 1 if
something has.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "proto")]

from engine_shim.sglang.api import versions  # noqa: E402
from engine_shim.vllm import vllm_api  # noqa: E402
from scripts.vllm_signatures import TABLE, surface  # noqa: E402
from tests.support.installed_wheel import Wheel, fetched  # noqa: E402
from tests.unit.engine_shim.sglang.api import contracts  # noqa: E402


def newest(package: str) -> str:
    """Returns the newest version on the package index."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    done = subprocess.run(
        [*command, "--ignore-installed", "--report", "-", package],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (found,) = json.loads(done.stdout)["install"]
    version: str = found["metadata"]["version"]
    return version


def moved_in_sglang(wheel: Wheel) -> Iterator[str]:
    """Yields what differs between a version and the newest one that is tested."""
    for target, expected in (contracts.HOOKS | contracts.USED).items():
        found = _ask(wheel.parameters, target)
        if found != expected:
            yield f"{target} takes ({found}), and not ({expected})"
    for target, (digest, why) in contracts.SAME_CODE.items():
        if _ask(wheel.digest, target) != digest:
            yield f"{target} has other code: {why}"
    for target, fields in contracts.ATTRIBUTES.items():
        found = _ask(wheel.fields, target)
        missing = fields if isinstance(found, str) else fields - found
        if missing:
            yield f"{target} has no {', '.join(sorted(missing))}"


def moved_in_vllm(wheel: Wheel) -> Iterator[str]:
    """Yields what differs between a version and the one that is tested."""
    table: list[dict[str, Any]] = json.loads(TABLE.read_text())
    (known,) = (row for row in table if vllm_api.TESTED[-1] in row["versions"])
    for kind, found in surface(wheel).items():
        if not isinstance(found, dict):
            if found != known[kind]:
                yield f"{kind}: {found}, and not {known[kind]}"
            continue
        for target, has in found.items():
            if has != known[kind][target]:
                yield f"{kind} of {target}: {has}, and not {known[kind][target]}"


def _ask(question: Callable[[str], Any], target: str) -> Any:
    """Asks a wheel; returns the reason as a text if it has no such name."""
    try:
        return question(target)
    except AssertionError as error:
        return f"nothing: {error}"


def main() -> int:
    """Returns 1 if something has changed."""
    engines: dict[str, tuple[tuple[str, ...], Callable[[Wheel], Iterator[str]]]] = {
        "sglang": (versions.TESTED, moved_in_sglang),
        "vllm": ((*vllm_api.READ, *vllm_api.TESTED), moved_in_vllm),
    }
    code = 0
    for package, (known, moved) in engines.items():
        version = newest(package)
        print(f"{package} {version}: {'known' if version in known else 'NEW'}")
        for line in moved(Wheel(version, fetched(package, version))):
            print(f"  {line}")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())

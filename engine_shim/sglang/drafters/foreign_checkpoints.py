"""Recognises checkpoints of drafters that SGLang cannot run, by what is in their config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine_shim.steering.errors import UnsupportedEngineError

_INSTEAD: Final = (
    "use an EAGLE, EAGLE3 or DFlash checkpoint that was trained for this target, or NEXTN with a "
    "target that has a predictor of its own"
)


class _Kind(NamedTuple):
    """One kind of drafter.

    fields: any of them that is set in config.json, or in its `eagle_config`, names it.  words: any
    of them does, in its architectures, model_type or spd_type, in lower case.  instead: what to
    use.
    """

    name: str
    fields: tuple[str, ...]
    words: tuple[str, ...]
    instead: str = _INSTEAD


# The first that fits counts.
_KINDS: Final = (
    _Kind("P-EAGLE drafter", ("parallel_drafting", "ptd_token_id"), ("peagle", "p_eagle")),
    _Kind("PARD drafter", ("pard_token", "pard_token_id"), ("pard",)),
    _Kind("set of Medusa heads", ("medusa_num_heads", "medusa_num_layers"), ("medusa",)),
    _Kind("set of Hydra heads", ("hydra_num_heads", "hydra_num_layers"), ("hydra",)),
    _Kind("recurrent drafter", (), ("redrafter", "recurrentdrafter", "recurrent_drafter")),
    _Kind("set of Clover heads", (), ("clover",)),
    _Kind("MLP speculator", ("n_predict", "speculator_width"), ("mlpspeculator", "mlp_speculator")),
    _Kind(
        "checkpoint in the format of vLLM's Speculators, which SGLang does not read",
        ("speculators_model_type", "speculators_config"),
        ("eagle3speculator", "eaglespeculator"),
        "use the same drafter in SGLang's format, whose config.json has a model_type and names "
        "LlamaForCausalLMEagle3 or DFlashDraftModel",
    ),
    _Kind(
        "checkpoint in vLLM's EAGLE format",
        (),
        ("eaglellama", "eagle3llama", "eagle3qwen", "eaglemistral", "eaglecohere", "eagleminicpm"),
        "if its weights are named as SGLang's LlamaForCausalLMEagle3 (or LlamaForCausalLMEagle) "
        "names them, write that name into the architectures of its config.json",
    ),
)


def raw_config(model_path: str) -> Mapping[str, Any]:
    """Reads the config.json of a local folder; {} if file or folder is missing.

    Raises UnsupportedEngineError for a file that is no JSON object.
    """
    path = Path(model_path, "config.json")
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedEngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedEngineError(f"{path} holds no JSON object: it begins with {found!r:.40}")
    return found


def foreign_kind(config: Mapping[str, Any]) -> str:
    """Names the kind of a config.json, and what to use instead; "" if SGLang may run it."""
    named = config.get("architectures") or []
    words = [config.get("model_type"), config.get("spd_type")]
    words += named if isinstance(named, list) else [named]
    said = " ".join(str(word).lower() for word in words)
    inside = config.get("eagle_config")
    fields = {**(inside if isinstance(inside, Mapping) else {}), **config}
    for kind in _KINDS:
        if any(word in said for word in kind.words) or any(
            fields.get(name) is not None and fields[name] is not False for name in kind.fields
        ):
            return f"it is a {kind.name}: {kind.instead}"
    return ""

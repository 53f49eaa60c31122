"""Recognises checkpoints of drafters that SGLang cannot run, by their config.json.

It also makes an EAGLE3 drafter that names no layers of its target read the default layers.  A
checkpoint may have an empty list (`eagle_aux_hidden_state_layer_ids: []`, as NVIDIA's ModelOpt
writes it).  SGLang's drafter then expects the three default layers, its targets emit none, and the
first pass would end the engine.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine_shim.common.errors import UnsupportedEngineError

_INSTEAD: Final = (
    "use an EAGLE, EAGLE3 or DFlash checkpoint that was trained for this target, or NEXTN with a "
    "target that has a predictor of its own"
)
# A part of a name: a word of CamelCase, or a run of letters or digits.
_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


class _Kind(NamedTuple):
    """One kind of drafter.

    A config.json is of this kind if any of these applies.  fields: one of these fields of
    config.json, or of its `eagle_config`, is neither null nor 0.  ids: one of these fields is a
    token id, which may be 0.  words: its architectures, model_type or spd_type contain one of these
    words, at the beginning of a part; words are in lower case and without separators.
    instead: what to use instead.
    """

    name: str
    fields: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    instead: str = _INSTEAD


# The first kind that matches counts.
_KINDS: Final = (
    _Kind("P-EAGLE drafter", ("parallel_drafting",), ("ptd_token_id",), ("peagle",)),
    _Kind("PARD drafter", ids=("pard_token", "pard_token_id"), words=("pard",)),
    _Kind("set of Medusa heads", ("medusa_num_heads", "medusa_num_layers"), words=("medusa",)),
    _Kind("set of Hydra heads", ("hydra_num_heads", "hydra_num_layers"), words=("hydra",)),
    _Kind("recurrent drafter", words=("redrafter", "recurrentdrafter")),
    _Kind("set of Clover heads", words=("clover",)),
    _Kind("LSTM speculator", words=("lstmspeculator",)),
    _Kind("MLP speculator", ("n_predict", "speculator_width"), words=("mlpspeculator",)),
    _Kind("lookahead drafter", words=("lookahead",)),
    _Kind("Kangaroo adapter", words=("kangaroo",)),
    _Kind("LongSpec drafter", words=("longspec",)),
    _Kind(
        "checkpoint in the format of vLLM's Speculators, which SGLang does not read",
        ("speculators_model_type", "speculators_config"),
        words=("eagle3speculator", "eaglespeculator"),
        instead="use the same drafter in SGLang's format, whose config.json has a model_type and "
        "names LlamaForCausalLMEagle3 or DFlashDraftModel",
    ),
    _Kind(
        "checkpoint in vLLM's EAGLE format",
        words=(
            *("eaglellama", "eagle3llama", "eagle3qwen"),
            *("eaglemistral", "eaglecohere", "eagleminicpm"),
        ),
        instead="if its weights are named as SGLang's LlamaForCausalLMEagle3 (or "
        "LlamaForCausalLMEagle) names them, write that name into the architectures of its "
        "config.json",
    ),
)


def raw_config(model_path: str) -> Mapping[str, Any]:
    """Reads the config.json of a local folder; {} if file or folder is missing.

    Raises UnsupportedEngineError if it is not a JSON object, or not a regular file: reading a pipe,
    for example, could block.
    """
    path = Path(model_path, "config.json")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnsupportedEngineError(f"{path} cannot be read: it is not a regular file")
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedEngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedEngineError(f"{path} is not a JSON object: it begins with {found!r:.40}")
    return found


def foreign_kind(config: Mapping[str, Any]) -> str:
    """Names the kind of a config.json, and what to use instead; "" if SGLang may run it."""
    found = config.get("architectures") or []
    names = [config.get("model_type"), config.get("spd_type")]
    names += found if isinstance(found, list) else [found]
    inside = config.get("eagle_config")
    sections = [config, inside if isinstance(inside, Mapping) else {}]
    for kind in _KINDS:
        if (
            any(_has_word(str(name), kind.words) for name in names)
            or any(_is_set(section.get(field)) for section in sections for field in kind.fields)
            or any(_is_id(section.get(field)) for section in sections for field in kind.ids)
        ):
            return f"it is a {kind.name}: {kind.instead}"
    return ""


def _has_word(name: str, words: tuple[str, ...]) -> bool:
    """Whether one of the words begins at a part of the name; it may span several parts."""
    parts = [part.lower() for part in _PART.findall(name)]
    begins = accumulate(map(len, parts), initial=0)
    joined = "".join(parts)
    return any(joined.startswith(words, begin) for begin in begins)


def _is_set(value: object) -> bool:
    return value is not None and value != 0


def _is_id(value: object) -> bool:
    return value is not None and value is not False


def around_resolve(original: Callable[..., Any], **arguments: Any) -> Any:
    """Wraps `resolve_spec_aux_hidden_state_config`, to leave out an empty list of layers."""
    found = original(**arguments)
    if not found.eagle_aux_hidden_state_layer_ids:
        found.eagle_aux_hidden_state_layer_ids = None
    return found

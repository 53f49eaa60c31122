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

_DEFAULT_ALTERNATIVE: Final = (
    "use an EAGLE, EAGLE3 or DFlash checkpoint that was trained for this target, or NEXTN with a "
    "target that has a predictor of its own"
)
# A part of a name: a word of CamelCase, or a run of letters or digits.
_NAME_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


class _DrafterKind(NamedTuple):
    """One kind of drafter.

    A config.json is of this kind if any of these applies.  fields: one of these fields of
    config.json, or of its `eagle_config`, is neither null nor 0.  ids: one of these fields is a
    token id, which may be 0.  words: its architectures, model_type or spd_type contain one of these
    words, at the beginning of a part; words are in lower case and without separators.
    alternative: what to use instead.
    """

    name: str
    fields: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    alternative: str = _DEFAULT_ALTERNATIVE


# The first kind that matches counts.
_FOREIGN_KINDS: Final = (
    _DrafterKind("P-EAGLE drafter", ("parallel_drafting",), ("ptd_token_id",), ("peagle",)),
    _DrafterKind("PARD drafter", ids=("pard_token", "pard_token_id"), words=("pard",)),
    _DrafterKind(
        "set of Medusa heads", ("medusa_num_heads", "medusa_num_layers"), words=("medusa",)
    ),
    _DrafterKind("set of Hydra heads", ("hydra_num_heads", "hydra_num_layers"), words=("hydra",)),
    _DrafterKind("recurrent drafter", words=("redrafter", "recurrentdrafter")),
    _DrafterKind("set of Clover heads", words=("clover",)),
    _DrafterKind("LSTM speculator", words=("lstmspeculator",)),
    _DrafterKind("MLP speculator", ("n_predict", "speculator_width"), words=("mlpspeculator",)),
    _DrafterKind("lookahead drafter", words=("lookahead",)),
    _DrafterKind("Kangaroo adapter", words=("kangaroo",)),
    _DrafterKind("LongSpec drafter", words=("longspec",)),
    _DrafterKind(
        "checkpoint in the format of vLLM's Speculators, which SGLang does not read",
        ("speculators_model_type", "speculators_config"),
        words=("eagle3speculator", "eaglespeculator"),
        alternative="use the same drafter in SGLang's format, whose config.json has a model_type "
        "and "
        "names LlamaForCausalLMEagle3 or DFlashDraftModel",
    ),
    _DrafterKind(
        "checkpoint in vLLM's EAGLE format",
        words=(
            *("eaglellama", "eagle3llama", "eagle3qwen"),
            *("eaglemistral", "eaglecohere", "eagleminicpm"),
        ),
        alternative="if its weights are named as SGLang's LlamaForCausalLMEagle3 (or "
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
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedEngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedEngineError(f"{path} is not a JSON object: it begins with {content!r:.40}")
    return content


def foreign_kind(config: Mapping[str, Any]) -> str:
    """Names the kind of a config.json, and what to use instead; "" if SGLang may run it."""
    architectures = config.get("architectures") or []
    names = [config.get("model_type"), config.get("spd_type")]
    names += architectures if isinstance(architectures, list) else [architectures]
    eagle_section = config.get("eagle_config")
    sections = [config, eagle_section if isinstance(eagle_section, Mapping) else {}]
    for kind in _FOREIGN_KINDS:
        if (
            any(_has_word(str(name), kind.words) for name in names)
            or any(_is_set(section.get(field)) for section in sections for field in kind.fields)
            or any(_is_id(section.get(field)) for section in sections for field in kind.ids)
        ):
            return f"it is a {kind.name}: {kind.alternative}"
    return ""


def _has_word(name: str, words: tuple[str, ...]) -> bool:
    """Whether one of the words begins at a part of the name; it may span several parts."""
    parts = [part.lower() for part in _NAME_PART.findall(name)]
    part_starts = accumulate(map(len, parts), initial=0)
    joined = "".join(parts)
    return any(joined.startswith(words, part_start) for part_start in part_starts)


def _is_set(value: object) -> bool:
    return value is not None and value != 0


def _is_id(value: object) -> bool:
    return value is not None and value is not False


def around_resolve(original: Callable[..., Any], **arguments: Any) -> Any:
    """Wraps `resolve_spec_aux_hidden_state_config`, to leave out an empty list of layers."""
    capture_config = original(**arguments)
    if not capture_config.eagle_aux_hidden_state_layer_ids:
        capture_config.eagle_aux_hidden_state_layer_ids = None
    return capture_config

"""Says what a step's draft length changes in each version of vLLM, as its source has it.

Verification follows the length everywhere: the scheduler leaves room for as many drafts.  What
drafting costs depends on the version, on which of its two model runners an engine has, and on the
method.  The table was read from the wheels; `signatures.json` holds what it rests on, and a
contract test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Drafting(StrEnum):
    """Says how much is drafted in a step whose draft length is above 0."""

    SHORTER = "as many as asked for"
    BLOCK = "the whole block, in one pass"
    WHOLE = "always `num_speculative_tokens`"


class AtZero(StrEnum):
    """Says what drafting costs in a step whose draft length is 0."""

    NOTHING = "nothing"
    CONTEXT = "the new tokens' keys and values"
    FIRST_FORWARD = "the first pass"
    WHOLE = "all of it"


@dataclass(frozen=True, slots=True)
class DraftLength:
    """Describes what the draft length of a step changes besides verification."""

    drafting: Drafting
    at_zero: AtZero

    @property
    def is_followed(self) -> bool:
        """Whether drafting costs less at a shorter length, or at 0 where a block is one pass."""
        return self.drafting is not Drafting.WHOLE and self.at_zero is not AtZero.WHOLE


FIRST_RUNNER: Final = 1
SECOND_RUNNER: Final = 2
# The method of vLLM's name "mtp" where the predictor has several modules, each a layer of its own.
MTP_MODULES: Final = "mtp with several modules"

_SHORTER: Final = DraftLength(Drafting.SHORTER, AtZero.FIRST_FORWARD)
_WHOLE: Final = DraftLength(Drafting.WHOLE, AtZero.WHOLE)
_BLOCK: Final = DraftLength(Drafting.BLOCK, AtZero.WHOLE)

# `gpu_model_runner.py`: every method is given the length; the plugin has DFlash draft a whole block
# and the lookup search nothing at 0 (drafting.py).
_FIRST: Final[Mapping[str, DraftLength]] = {
    "eagle": _SHORTER,
    "eagle3": _SHORTER,
    "mtp": _SHORTER,
    MTP_MODULES: _SHORTER,
    "draft_model": _SHORTER,
    "dflash": DraftLength(Drafting.BLOCK, AtZero.FIRST_FORWARD),
    "ngram": DraftLength(Drafting.SHORTER, AtZero.NOTHING),
}
# `gpu/model_runner.py`: it gives no length to any method.
_SECOND_UNTOLD: Final[Mapping[str, DraftLength]] = {
    "eagle": _WHOLE,
    "eagle3": _WHOLE,
    "mtp": _WHOLE,
    MTP_MODULES: _WHOLE,
    "dflash": _BLOCK,
}
_SECOND_31: Final = {**_SECOND_UNTOLD, "draft_model": _WHOLE}
# It gives the length to all, and these use it: EAGLE, EAGLE3, a predictor of one module.
_SECOND_32: Final[Mapping[str, DraftLength]] = {
    "eagle": _SHORTER,
    "eagle3": _SHORTER,
    "mtp": _SHORTER,
    MTP_MODULES: _WHOLE,
    "draft_model": _WHOLE,
    "dflash": _BLOCK,
    "ngram": _WHOLE,
}
_SECOND_33: Final = {**_SECOND_32, "dflash": DraftLength(Drafting.BLOCK, AtZero.CONTEXT)}

# By version and runner; a method that is not there is not in that runner: vLLM then uses the first
# one, or refuses it where VLLM_USE_V2_MODEL_RUNNER=1.
DRAFT_LENGTHS: Final[Mapping[str, Mapping[int, Mapping[str, DraftLength]]]] = {
    version: {FIRST_RUNNER: _FIRST, SECOND_RUNNER: second}
    for version, second in (
        ("0.26.0", _SECOND_UNTOLD),
        ("0.27.0", _SECOND_UNTOLD),
        ("0.28.0", _SECOND_UNTOLD),
        ("0.29.0", _SECOND_UNTOLD),
        ("0.30.0", _SECOND_UNTOLD),
        ("0.31.0", _SECOND_31),
        ("0.32.0", _SECOND_32),
        ("0.33.0", _SECOND_33),
    )
}


def runner_of(config: Any) -> int:
    """Returns the model runner of an engine with this finished `VllmConfig`: 1 or 2.

    vLLM decides: 0.26 to 0.28 take the second one for dense targets without recurrent layers and a
    list of others, 0.29 and newer for all that it supports; VLLM_USE_V2_MODEL_RUNNER overrules it.
    Without Triton, as on a processor, it is the first.
    """
    return SECOND_RUNNER if config.use_v2_model_runner else FIRST_RUNNER


def method_of(speculative: Any) -> str:
    """Returns the name of the method in the table."""
    # vLLM 0.26 and 0.27 do not tell the two apart.
    several = getattr(speculative, "use_multi_module_mtp", None)
    if speculative.method == "mtp" and several is not None and several():
        return MTP_MODULES
    return str(speculative.method)


def draft_length_of(version: str, config: Any) -> DraftLength | None:
    """Returns what the draft length changes in this engine; None where that was not read."""
    runners = DRAFT_LENGTHS.get(version)
    if runners is None:
        return None
    return runners[runner_of(config)].get(method_of(config.speculative_config))


def disregarded(version: str, config: Any) -> str:
    """Says what a draft length does not change in this engine, and what to do; "" if it counts."""
    found, method = draft_length_of(version, config), method_of(config.speculative_config)
    if found is None:
        return f"what vLLM {version} does with the draft length of {method} was not read"
    if found.is_followed:
        return ""
    name = f"the second model runner of vLLM {version}"
    if found.drafting is Drafting.BLOCK:
        what = f"{name} drafts a whole block with {method} at a draft length of 0, too"
    else:
        what = (
            f"{name} drafts num_speculative_tokens with {method} in every step, whatever the draft "
            "length is, 0 included"
        )
    first = (
        "set VLLM_USE_V2_MODEL_RUNNER=0 for the first runner, whose drafting follows, and which "
        "verifies with piecewise graphs"
    )
    newer = _follows_from(method, version)
    ways = first + (f", or take vLLM {newer}" if newer else "")
    return f"{what}; a shorter length saves verification alone: {ways}"


def _follows_from(method: str, version: str) -> str:
    """First newer version whose second runner follows the draft length; "" if none does."""
    later = list(DRAFT_LENGTHS)[list(DRAFT_LENGTHS).index(version) + 1 :]
    for newer in later:
        found = DRAFT_LENGTHS[newer][SECOND_RUNNER].get(method)
        if found is not None and found.is_followed:
            return newer
    return ""


def unread_layers(config: Any) -> str:
    """Says that an EAGLE3 drafter's layer numbers lie where the second runner does not look.

    "" if they do not.
    """
    speculative = config.speculative_config
    if speculative.method != "eagle3" or runner_of(config) != SECOND_RUNNER:
        return ""
    drafter = getattr(speculative.draft_model_config, "hf_config", None)
    nested = getattr(drafter, "eagle_config", None)
    if not isinstance(nested, Mapping) or getattr(drafter, _LAYERS, None):
        return ""
    layers = nested.get(_LAYERS)
    # vLLM 0.26 and 0.27 do not read this one, but a drafter that has it was made for a newer one.
    if not layers or nested.get("layer_ids"):
        return ""
    return (
        f"the drafter names the target's layers {list(layers)} in eagle_config.{_LAYERS}, which "
        "vLLM's second model runner does not read: unless they are the target's defaults, fewer "
        f"drafts are accepted, or none can be made; write {_LAYERS} beside eagle_config, too, or "
        "set VLLM_USE_V2_MODEL_RUNNER=0"
    )


_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"

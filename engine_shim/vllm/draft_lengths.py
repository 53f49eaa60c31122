"""Lists what a step's draft length changes in each version of vLLM; makes drafters follow it.

Verification follows the draft length in every version: the scheduler reserves that many drafts.
The cost of drafting depends on the version, on the model runner (vLLM has two) and on the method.
The table was read from the wheels.  `signatures.json` has the signatures of the code that was read,
and a contract test compares them with the wheels.

The changes to drafters, in the workers, are for vLLM's first model runner; the second one already
drafts a whole block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from engine_shim.vllm import vllm_api

FIRST_RUNNER: Final = 1
SECOND_RUNNER: Final = 2
# The method "mtp" with a predictor of several modules, each of them a layer.
MTP_MODULES: Final = "mtp with several modules"
_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"


class Drafting(StrEnum):
    """Names how much is drafted in a step with a draft length above 0."""

    SHORTER = "as many as asked for"
    BLOCK = "the whole block, in one pass"
    WHOLE = "always `num_speculative_tokens`"


class AtZero(StrEnum):
    """Names what is drafted in a step with draft length 0."""

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
        """Whether drafting costs less at a shorter length, or at 0 if a block is one pass."""
        return self.drafting is not Drafting.WHOLE and self.at_zero is not AtZero.WHOLE


_SHORTER: Final = DraftLength(Drafting.SHORTER, AtZero.FIRST_FORWARD)
_WHOLE: Final = DraftLength(Drafting.WHOLE, AtZero.WHOLE)
_BLOCK: Final = DraftLength(Drafting.BLOCK, AtZero.WHOLE)

# `gpu_model_runner.py`: every method receives the length.  The plugin makes DFlash draft a whole
# block, and skips the lookup at 0 (`hook_drafting`).
_FIRST: Final[Mapping[str, DraftLength]] = {
    **dict.fromkeys(("eagle", "eagle3", "mtp", MTP_MODULES, "draft_model"), _SHORTER),
    "dflash": DraftLength(Drafting.BLOCK, AtZero.FIRST_FORWARD),
    "ngram": DraftLength(Drafting.SHORTER, AtZero.NOTHING),
}
# `gpu/model_runner.py`: no method receives the length.
_SECOND_UNTOLD: Final[Mapping[str, DraftLength]] = {
    **dict.fromkeys(("eagle", "eagle3", "mtp", MTP_MODULES), _WHOLE),
    "dflash": _BLOCK,
}
_SECOND_31: Final = {**_SECOND_UNTOLD, "draft_model": _WHOLE}
# All methods receive the length; EAGLE, EAGLE3 and a predictor of one module use it.
_SECOND_32: Final[Mapping[str, DraftLength]] = {
    **dict.fromkeys(("eagle", "eagle3", "mtp"), _SHORTER),
    **dict.fromkeys((MTP_MODULES, "draft_model", "ngram"), _WHOLE),
    "dflash": _BLOCK,
}
_SECOND_33: Final = {**_SECOND_32, "dflash": DraftLength(Drafting.BLOCK, AtZero.CONTEXT)}

# By version and runner.  A runner does not support a method that is not listed: vLLM then uses the
# first runner, or refuses the method if VLLM_USE_V2_MODEL_RUNNER=1.
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

    vLLM decides.  0.26 to 0.28 use the second one for dense targets without recurrent layers and a
    list of others; 0.29 and newer use it for every target that it supports.
    VLLM_USE_V2_MODEL_RUNNER overrides this.  Without Triton, as on a CPU, it is the first.
    """
    return SECOND_RUNNER if config.use_v2_model_runner else FIRST_RUNNER


def method_of(speculative: Any) -> str:
    """Returns the name of the method in the table."""
    # vLLM 0.26 and 0.27 do not distinguish the two.
    several = getattr(speculative, "use_multi_module_mtp", None)
    if speculative.method == "mtp" and several is not None and several():
        return MTP_MODULES
    return str(speculative.method)


def draft_length_of(version: str, config: Any) -> DraftLength | None:
    """Returns what the draft length changes in this engine; None for an unlisted version."""
    runners = DRAFT_LENGTHS.get(version)
    if runners is None:
        return None
    return runners[runner_of(config)].get(method_of(config.speculative_config))


def disregarded(version: str, config: Any) -> str:
    """Returns what a draft length does not change here, and what to do; "" if drafting follows."""
    found, method = draft_length_of(version, config), method_of(config.speculative_config)
    if found is None:
        return f"it is not known what vLLM {version} does with the draft length of {method}"
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
        "set VLLM_USE_V2_MODEL_RUNNER=0 for the first runner, whose drafting follows the draft "
        "length, and which verifies with piecewise graphs"
    )
    newer = _follows_from(method, version)
    ways = first + (f", or use vLLM {newer}" if newer else "")
    return f"{what}; a shorter length saves verification only: {ways}"


def _follows_from(method: str, version: str) -> str:
    """Returns the first newer version whose second runner follows the draft length, or ""."""
    later = list(DRAFT_LENGTHS)[list(DRAFT_LENGTHS).index(version) + 1 :]
    for newer in later:
        found = DRAFT_LENGTHS[newer][SECOND_RUNNER].get(method)
        if found is not None and found.is_followed:
            return newer
    return ""


def unread_layers(config: Any) -> str:
    """Returns a warning if the second runner does not read an EAGLE3 drafter's layer numbers.

    "" if it reads them.
    """
    speculative = config.speculative_config
    if speculative.method != "eagle3" or runner_of(config) != SECOND_RUNNER:
        return ""
    drafter = getattr(speculative.draft_model_config, "hf_config", None)
    nested = getattr(drafter, "eagle_config", None)
    if not isinstance(nested, Mapping) or getattr(drafter, _LAYERS, None):
        return ""
    layers = nested.get(_LAYERS)
    # vLLM 0.26 and 0.27 do not read `layer_ids`, but a drafter with it was made for newer versions.
    if not layers or nested.get("layer_ids"):
        return ""
    return (
        f"the drafter names the target's layers {list(layers)} in eagle_config.{_LAYERS}, which "
        "vLLM's second model runner does not read: unless they are the target's defaults, fewer "
        f"drafts are accepted, or none can be made; write {_LAYERS} beside eagle_config, too, or "
        "set VLLM_USE_V2_MODEL_RUNNER=0"
    )


def hook_drafting() -> None:
    """Wraps `propose` of DFlash and of the n-gram lookup, each once and as soon as it is imported.

    An earlier import would break vLLM on a CPU: there it scans all imported modules to replace
    Triton's kernels, and fails on numba, which the lookup imports.
    """
    _on_import(vllm_api.DFLASH, vllm_api.PROPOSER, whole_block)
    _on_import(vllm_api.NGRAM, vllm_api.NGRAM, no_search_for_nothing)


def _on_import(owner: str, defined_by: str, wrapper: Callable[[Any], Any]) -> None:
    def wrap() -> None:
        vllm_api.require_contract(defined_by)
        found = vllm_api.resolve(owner)
        if not hasattr(found.propose, "speculation_controller"):
            found.propose = wrapper(found.propose)

    module = owner.rpartition(".")[0]
    if module in sys.modules:
        wrap()
    elif not any(isinstance(f, _AfterImport) and f.module == module for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(module, wrap))


class _AfterImport(MetaPathFinder):
    """Finds one module as usual, and calls `then` after the module has been imported."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module, self._then = module, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(Loader):
    """Loads a module with another loader, then calls `then`."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()


def whole_block(original: Any) -> Any:
    """Makes DFlash draft a block of its full length and return the first tokens of it.

    DFlash was trained with that length, and a shorter block is accepted less often.
    """

    @wraps(original)
    def propose(drafter: Any, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Any:
        full = drafter.speculative_config.num_speculative_tokens
        if num_speculative_tokens in {0, full}:
            return original(drafter, num_speculative_tokens, *args, **kwargs)
        drafts = original(drafter, full, *args, **kwargs)
        probabilities = getattr(drafter, "_last_draft_probs", None)
        if probabilities is not None:
            drafter._last_draft_probs = probabilities[:, :num_speculative_tokens].contiguous()
        return drafts[:, :num_speculative_tokens].contiguous()

    propose.speculation_controller = True  # type: ignore[attr-defined]
    return propose


def no_search_for_nothing(original: Any) -> Any:
    """Skips the lookup if no token is requested: it has no state that must be updated."""

    @wraps(original)
    def propose(
        drafter: Any, num_speculative_tokens: int, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if num_speculative_tokens == 0:
            return [[] for _ in sampled_token_ids]
        return original(drafter, num_speculative_tokens, sampled_token_ids, *args, **kwargs)

    propose.speculation_controller = True  # type: ignore[attr-defined]
    return propose

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
MULTI_MODULE_MTP: Final = "mtp with several modules"
_LAYERS_FIELD: Final = "eagle_aux_hidden_state_layer_ids"


class DraftedTokens(StrEnum):
    """Names how much is drafted in a step with a draft length above 0."""

    SHORTER = "as many as asked for"
    BLOCK = "the whole block, in one pass"
    WHOLE = "always `num_speculative_tokens`"


class ZeroLengthDrafting(StrEnum):
    """Names what is drafted in a step with draft length 0."""

    NOTHING = "nothing"
    CONTEXT = "the new tokens' keys and values"
    FIRST_FORWARD = "the first pass"
    WHOLE = "all of it"


@dataclass(frozen=True, slots=True)
class DraftLengthEffect:
    """Describes what the draft length of a step changes besides verification."""

    drafting: DraftedTokens
    at_zero: ZeroLengthDrafting

    @property
    def is_followed(self) -> bool:
        """Whether drafting costs less at a shorter length, or at 0 if a block is one pass."""
        return (
            self.drafting is not DraftedTokens.WHOLE
            and self.at_zero is not ZeroLengthDrafting.WHOLE
        )


_SHORTER: Final = DraftLengthEffect(DraftedTokens.SHORTER, ZeroLengthDrafting.FIRST_FORWARD)
_WHOLE: Final = DraftLengthEffect(DraftedTokens.WHOLE, ZeroLengthDrafting.WHOLE)
_BLOCK: Final = DraftLengthEffect(DraftedTokens.BLOCK, ZeroLengthDrafting.WHOLE)

# `gpu_model_runner.py`: every method receives the length.  The plugin makes DFlash draft a whole
# block, and skips the lookup at 0 (`hook_drafting`).
_FIRST: Final[Mapping[str, DraftLengthEffect]] = {
    **dict.fromkeys(("eagle", "eagle3", "mtp", MULTI_MODULE_MTP, "draft_model"), _SHORTER),
    "dflash": DraftLengthEffect(DraftedTokens.BLOCK, ZeroLengthDrafting.FIRST_FORWARD),
    "ngram": DraftLengthEffect(DraftedTokens.SHORTER, ZeroLengthDrafting.NOTHING),
}
# `gpu/model_runner.py`: no method receives the length.
_SECOND_WITHOUT_LENGTH: Final[Mapping[str, DraftLengthEffect]] = {
    **dict.fromkeys(("eagle", "eagle3", "mtp", MULTI_MODULE_MTP), _WHOLE),
    "dflash": _BLOCK,
}
_SECOND_31: Final = {**_SECOND_WITHOUT_LENGTH, "draft_model": _WHOLE}
# All methods receive the length; EAGLE, EAGLE3 and a predictor of one module use it.
_SECOND_32: Final[Mapping[str, DraftLengthEffect]] = {
    **dict.fromkeys(("eagle", "eagle3", "mtp"), _SHORTER),
    **dict.fromkeys((MULTI_MODULE_MTP, "draft_model", "ngram"), _WHOLE),
    "dflash": _BLOCK,
}
_SECOND_33: Final = {
    **_SECOND_32,
    "dflash": DraftLengthEffect(DraftedTokens.BLOCK, ZeroLengthDrafting.CONTEXT),
}

# By version and runner.  A runner does not support a method that is not listed: vLLM then uses the
# first runner, or refuses the method if VLLM_USE_V2_MODEL_RUNNER=1.
DRAFT_LENGTH_EFFECTS: Final[Mapping[str, Mapping[int, Mapping[str, DraftLengthEffect]]]] = {
    version: {FIRST_RUNNER: _FIRST, SECOND_RUNNER: second}
    for version, second in (
        ("0.26.0", _SECOND_WITHOUT_LENGTH),
        ("0.27.0", _SECOND_WITHOUT_LENGTH),
        ("0.28.0", _SECOND_WITHOUT_LENGTH),
        ("0.29.0", _SECOND_WITHOUT_LENGTH),
        ("0.30.0", _SECOND_WITHOUT_LENGTH),
        ("0.31.0", _SECOND_31),
        ("0.32.0", _SECOND_32),
        ("0.33.0", _SECOND_33),
    )
}


def model_runner(config: Any) -> int:
    """Returns the model runner of an engine with this finished `VllmConfig`: 1 or 2.

    vLLM decides.  0.26 to 0.28 use the second one for dense targets without recurrent layers and a
    list of others; 0.29 and newer use it for every target that it supports.
    VLLM_USE_V2_MODEL_RUNNER overrides this.  Without Triton, as on a CPU, it is the first.
    """
    return SECOND_RUNNER if config.use_v2_model_runner else FIRST_RUNNER


def table_method(speculative: Any) -> str:
    """Returns the name of the method in the table."""
    # vLLM 0.26 and 0.27 do not distinguish the two.
    has_several_modules = getattr(speculative, "use_multi_module_mtp", None)
    if speculative.method == "mtp" and has_several_modules is not None and has_several_modules():
        return MULTI_MODULE_MTP
    return str(speculative.method)


def draft_length_effect(version: str, config: Any) -> DraftLengthEffect | None:
    """Returns what the draft length changes in this engine; None for an unlisted version."""
    runners = DRAFT_LENGTH_EFFECTS.get(version)
    if runners is None:
        return None
    return runners[model_runner(config)].get(table_method(config.speculative_config))


def ignored_length_warning(version: str, config: Any) -> str:
    """Returns what a draft length does not change here, and what to do; "" if drafting follows."""
    effect, method = draft_length_effect(version, config), table_method(config.speculative_config)
    if effect is None:
        return f"it is not known what vLLM {version} does with the draft length of {method}"
    if effect.is_followed:
        return ""
    name = f"the second model runner of vLLM {version}"
    if effect.drafting is DraftedTokens.BLOCK:
        problem = f"{name} drafts a whole block with {method} at a draft length of 0, too"
    else:
        problem = (
            f"{name} drafts num_speculative_tokens with {method} in every step, whatever the draft "
            "length is, 0 included"
        )
    first_runner_advice = (
        "set VLLM_USE_V2_MODEL_RUNNER=0 for the first runner, whose drafting follows the draft "
        "length, and which verifies with piecewise graphs"
    )
    newer = _first_following_version(method, version)
    remedies = first_runner_advice + (f", or use vLLM {newer}" if newer else "")
    return f"{problem}; a shorter length saves verification only: {remedies}"


def _first_following_version(method: str, version: str) -> str:
    """Returns the first newer version whose second runner follows the draft length, or ""."""
    later = list(DRAFT_LENGTH_EFFECTS)[list(DRAFT_LENGTH_EFFECTS).index(version) + 1 :]
    for newer in later:
        effect = DRAFT_LENGTH_EFFECTS[newer][SECOND_RUNNER].get(method)
        if effect is not None and effect.is_followed:
            return newer
    return ""


def unread_layers_warning(config: Any) -> str:
    """Returns a warning if the second runner does not read an EAGLE3 drafter's layer numbers.

    "" if it reads them.
    """
    speculative = config.speculative_config
    if speculative.method != "eagle3" or model_runner(config) != SECOND_RUNNER:
        return ""
    drafter = getattr(speculative.draft_model_config, "hf_config", None)
    nested = getattr(drafter, "eagle_config", None)
    if not isinstance(nested, Mapping) or getattr(drafter, _LAYERS_FIELD, None):
        return ""
    layers = nested.get(_LAYERS_FIELD)
    # vLLM 0.26 and 0.27 do not read `layer_ids`, but a drafter with it was made for newer versions.
    if not layers or nested.get("layer_ids"):
        return ""
    return (
        f"the drafter names the target's layers {list(layers)} in eagle_config.{_LAYERS_FIELD}, "
        "which "
        "vLLM's second model runner does not read: unless they are the target's defaults, fewer "
        f"drafts are accepted, or none can be made; write {_LAYERS_FIELD} beside eagle_config, "
        "too, or "
        "set VLLM_USE_V2_MODEL_RUNNER=0"
    )


def hook_drafting() -> None:
    """Wraps `propose` of DFlash and of the n-gram lookup, each once and as soon as it is imported.

    An earlier import would break vLLM on a CPU: there it scans all imported modules to replace
    Triton's kernels, and fails on numba, which the lookup imports.
    """
    _wrap_after_import(vllm_api.DFLASH, vllm_api.PROPOSER, draft_whole_block)
    _wrap_after_import(vllm_api.NGRAM, vllm_api.NGRAM, skip_lookup_at_zero)


def _wrap_after_import(owner: str, defined_by: str, wrapper: Callable[[Any], Any]) -> None:
    def wrap() -> None:
        vllm_api.require_contract(defined_by)
        proposer_class = vllm_api.resolve(owner)
        if not hasattr(proposer_class.propose, "speculation_controller"):
            proposer_class.propose = wrapper(proposer_class.propose)

    module = owner.rpartition(".")[0]
    if module in sys.modules:
        wrap()
    elif not any(
        isinstance(finder, _PostImportFinder) and finder.module == module
        for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _PostImportFinder(module, wrap))


class _PostImportFinder(MetaPathFinder):
    """Finds one module as usual, and calls `callback` after the module has been imported."""

    def __init__(self, module: str, callback: Callable[[], None]) -> None:
        self.module, self._callback = module, callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PostImportLoader(spec.loader, self._callback)
        return spec


class _PostImportLoader(Loader):
    """Loads a module with another loader, then calls `callback`."""

    def __init__(self, loader: Loader, callback: Callable[[], None]) -> None:
        self._loader, self._callback = loader, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback()


def draft_whole_block(original: Any) -> Any:
    """Makes DFlash draft a block of its full length and return the first tokens of it.

    DFlash was trained with that length, and a shorter block is accepted less often.
    """

    @wraps(original)
    def propose(drafter: Any, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Any:
        full_gamma = drafter.speculative_config.num_speculative_tokens
        if num_speculative_tokens in {0, full_gamma}:
            return original(drafter, num_speculative_tokens, *args, **kwargs)
        drafts = original(drafter, full_gamma, *args, **kwargs)
        probabilities = getattr(drafter, "_last_draft_probs", None)
        if probabilities is not None:
            drafter._last_draft_probs = probabilities[:, :num_speculative_tokens].contiguous()
        return drafts[:, :num_speculative_tokens].contiguous()

    propose.speculation_controller = True  # type: ignore[attr-defined]
    return propose


def skip_lookup_at_zero(original: Any) -> Any:
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

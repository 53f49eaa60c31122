"""Changes what drafters do where the draft length changes, in the workers.

Both changes are for vLLM's first model runner; the second one drafts a whole block by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from engine_shim.vllm import vllm_api


def hook_drafting() -> None:
    """Wraps `propose` of DFlash and of the n-gram lookup, each once and as soon as it is imported.

    Not earlier: where vLLM replaces Triton's kernels on a processor, it looks through everything
    that is imported, and does not survive numba, which the lookup brings.
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
    """Finds one module as usual, and calls `then` when it has been imported."""

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
    """Loads a module as another loader does."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()


def whole_block(original: Any) -> Any:
    """Has DFlash draft a block of its full length and hand on the first of its tokens.

    The block was trained with that length, and a shorter one is accepted less often.
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
    """Has the lookup search nothing where no token is wanted: it has no state to keep up."""

    @wraps(original)
    def propose(
        drafter: Any, num_speculative_tokens: int, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if num_speculative_tokens == 0:
            return [[] for _ in sampled_token_ids]
        return original(drafter, num_speculative_tokens, sampled_token_ids, *args, **kwargs)

    propose.speculation_controller = True  # type: ignore[attr-defined]
    return propose

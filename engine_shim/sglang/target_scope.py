"""Prepares further draft lengths outside the scope of the drafter's ranks.

SGLang builds the states of all draft lengths in the drafter's scope.  With data-parallel attention
an EAGLE3 drafter runs on fewer ranks than its target (each rank drafts for itself), and a graph of
the target that was captured there would gather from one rank only.  Here the states are built when
that scope is left, and the drafter's own part of each enters it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from engine_shim.sglang.api import sglang_api

# The drafter's parts of `EAGLEWorkerV2.build_adaptive_runtime_state`.
DRAFT_PARTS: Final = ("init_attention_backend", "_capture_cuda_graphs")


def around_init_cuda_graphs(original: Callable[[Any], None], worker: Any) -> None:
    """Wraps the method `EAGLEWorkerV2.init_cuda_graphs`."""
    controller = worker.adaptive_controller
    postponed: list[Callable[[], None]] = []

    def postpone(**arguments: Any) -> None:
        postponed.append(partial(type(controller).init_states, controller, **arguments))

    controller.init_states = postpone
    try:
        original(worker)
    finally:
        del controller.init_states
    with _parts_in_scope(worker.draft_worker):
        for build in postponed:
            build()


@contextmanager
def _parts_in_scope(draft: Any) -> Iterator[None]:
    """Has the drafter's parts enter its scope, inside the block."""

    def run(part: str) -> None:
        with ExitStack() as stack:
            for scope in (sglang_api.draft_scope(draft), *sglang_api.draft_moe_scopes()):
                stack.enter_context(scope)
            getattr(type(draft), part)(draft)

    for part in DRAFT_PARTS:
        setattr(draft, part, partial(run, part))
    try:
        yield
    finally:
        for part in DRAFT_PARTS:
            delattr(draft, part)

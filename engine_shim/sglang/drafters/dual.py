"""A DFlash drafter beside the engine's own EAGLE, EAGLE3 or MTP drafter; either can draft any step.

Both drafters stay up to date: after every prefill and every verification each reads the hidden
states of the accepted tokens, so either can draft the next step.  Both use the same prepared draft
lengths, because a chain of gamma tokens is verified in either case.  DFlash always drafts its whole
block, of which the first gamma tokens are used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2

from engine_shim.sglang.api import hook_check, sglang_api
from engine_shim.sglang.drafters.dflash import DFlashDrafter
from engine_shim.sglang.drafters.dflash_checkpoint import block_draft_lengths
from engine_shim.sglang.drafters.drafting import fits_draft_worker
from engine_shim.sglang.drafters.hidden_states import SharedCapture


class DualDrafter:
    """Hooks around one engine's draft worker.

    gammas: draft lengths that the engine prepares.  required: whether the engine refuses to start
    without this drafter.
    """

    def __init__(
        self, model_path: str, revision: str, gammas: tuple[int, ...], *, required: bool = False
    ) -> None:
        self.model_path, self.revision = model_path, revision
        self._gammas, self._required = gammas, required
        self._capture = SharedCapture(model_path, revision or None)
        self._dflash_drafter: DFlashDrafter | None = None

    def register(self) -> None:
        """Registers everything with SGLang, before the engine's workers are built."""
        capture = self._capture
        hook_check.around(sglang_api.RESOLVE_CAPTURE, capture.around_resolve)
        hook_check.around(sglang_api.CONFIGURE_CAPTURE, capture.around_configure)
        hook_check.around(sglang_api.STORE_HIDDEN, capture.around_store)
        hook_check.around(sglang_api.DRAFT_CONSTRUCT, self.around_construct)
        for target in (sglang_api.DRAFT_MEMORY, sglang_api.DRAFT_BACKENDS):
            part = target.rpartition(".")[2]
            hook_check.around(target, partial(self.around_build, part))
        hook_check.around(sglang_api.DRAFT_GRAPHS, self.around_capture)
        hook_check.around(sglang_api.DRAFT_PREFILL, self.around_prefill)
        self._extend_properties()

    @property
    def dflash_drafter(self) -> DFlashDrafter:
        """Returns the DFlash drafter; only after the draft worker was built."""
        assert self._dflash_drafter is not None
        return self._dflash_drafter

    @property
    def gammas(self) -> tuple[int, ...]:
        """Returns the draft lengths above 0 that its block can fill."""
        return tuple(
            g for g in block_draft_lengths(self._gammas, self.dflash_drafter.block_size) if g
        )

    def around_construct(
        self, original: Callable[..., None], draft: Any, *arguments: Any, **named: Any
    ) -> None:
        """Wraps the constructor of `EagleDraftWorker`.  Raises UnsupportedEngineError."""
        original(draft, *arguments, **named)
        self._dflash_drafter = DFlashDrafter(
            self._capture.block_config,
            self.model_path,
            self.revision or None,
            draft,
            "the engine continues with its own drafter",
        )

    def around_build(
        self, part: str, original: Callable[..., None], draft: Any, *arguments: Any, **named: Any
    ) -> None:
        """Wraps a method of `EagleDraftWorker` that builds something, `part` by name."""
        original(draft, *arguments, **named)
        self.dflash_drafter.build_part(part, *arguments, **named)

    def around_capture(self, original: Callable[..., None], draft: Any) -> None:
        """Captures the graphs of both drafters (wraps `EagleDraftWorker.init_cuda_graphs`)."""
        original(draft)
        self.dflash_drafter.capture_graphs(required=self._required)

    def around_prefill(
        self, original: Callable[..., Any], draft: Any, batch: Any, hidden: torch.Tensor,
        *arguments: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Reads the prompt with both drafters (wraps `_draft_extend_for_prefill`)."""
        own_hidden, block_hidden = self._capture.split(hidden)
        if not batch.forward_mode.is_idle():
            slots = named.get("kv_loc_plan")
            self.dflash_drafter.attempt(
                lambda: self.dflash_drafter.read_prompt(batch, block_hidden, slots)
            )
        return original(draft, batch, own_hidden, *arguments, **named)

    def draft(self, draft: Any, batch: Any) -> Any | None:
        """Drafts instead of `EagleDraftWorker.draft`; None if the other drafter must draft."""
        if not fits_draft_worker(draft, batch):
            return None
        return self.dflash_drafter.attempt(
            lambda: self.dflash_drafter.chain(draft, batch, self.dflash_drafter.draft(batch))
        )

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the columns of `hidden` for the other drafter, and those for this one."""
        return self._capture.split(hidden)

    def follow(self, batch: Any, result: Any, kv_loc_plan: Any) -> None:
        """Reads what a step accepted; leaves only the other drafter's columns in `result`."""
        output = result.logits_output
        output.hidden_states, block_hidden = self._capture.split(output.hidden_states)
        self.dflash_drafter.attempt(
            lambda: self.dflash_drafter.read_step(batch, result, block_hidden, kv_loc_plan)
        )

    def catch_up(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Reads positions that were slept through; returns the other drafter's columns."""
        own_hidden, block_hidden = self._capture.split(hidden)
        self.dflash_drafter.attempt(
            lambda: self.dflash_drafter.read(block_hidden, slots, positions)
        )
        return own_hidden

    def _extend_properties(self) -> None:
        """Adds this drafter to the properties that SGLang reads from its workers."""
        draft_class, worker_class = eagle_worker_v2.EagleDraftWorker, eagle_worker_v2.EAGLEWorkerV2
        runners = draft_class.draft_runners.fget
        backends = worker_class.spec_v2_attn_backends.fget

        def draft_runners(draft: Any) -> list[Any]:
            all_runners = list(runners(draft))
            return (
                all_runners
                if self._dflash_drafter is None
                else [*all_runners, self._dflash_drafter.runner]
            )

        def spec_v2_attn_backends(worker: Any) -> tuple[Any, ...]:
            return (*backends(worker), self.dflash_drafter.runner.attn_backend)

        def weight_update_runners(worker: Any) -> list[tuple[str, Any]]:
            # "draft" names the engine's own drafter, whose weights do not fit a DFlash drafter.
            return [("draft", worker.draft_worker.draft_runner)]

        draft_class.draft_runners = property(draft_runners)
        worker_class.spec_v2_attn_backends = property(spec_v2_attn_backends)
        worker_class.weight_update_runners = weight_update_runners

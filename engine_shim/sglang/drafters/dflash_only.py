"""DFlash as an engine's only drafter, steered.

SGLang's own DFLASH engine can only verify whole blocks.  Here the engine is built as an EAGLE
engine, whose parts can verify any gamma + 1 tokens, and this drafter replaces its EAGLE head.  It
drafts its whole block, because a shorter block is accepted less, and passes on the first gamma
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_device, get_spec
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.api import hook_check, sglang_api
from engine_shim.sglang.drafters import target_capture
from engine_shim.sglang.drafters.dflash import DFlashDrafter
from engine_shim.sglang.drafters.dflash_checkpoint import block_size_mismatch_reason, draft_config
from engine_shim.sglang.drafters.hidden_states import emit_for_block


class DFlashOnlyWorker(EagleDraftWorkerBase):
    """Takes the place of `EagleDraftWorker`.

    When its drafter fails, the sidecar plans plain decoding.  Until that plan arrives, it drafts
    blocks of zeros, of which almost nothing is accepted.
    """

    # Attributes that the EAGLE parts around it read, and that a block does not have.
    topk = 1
    seed_dsa_topk_from_draft_extend = False
    cuda_graph_runner = cuda_graph_runner_for_draft_extend = draft_extend_attn_backend = None
    speculative_num_steps: int
    speculative_num_draft_tokens: int

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        """Builds the worker.  Raises UnsupportedEngineError."""
        super().__init__()
        self.server_args, self.gpu_id, self.nccl_port = server_args, gpu_id, nccl_port
        self.target_worker = target_worker
        self.device = get_device().device
        spec = get_spec()
        self.speculative_num_steps = spec.speculative_num_steps
        self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self._rebuild_topk1_chain_buffers()
        path, revision = spec.speculative_draft_model_path, spec.speculative_draft_model_revision
        config = draft_config(server_args, path, revision)
        fallback = "from now on nothing that is drafted is accepted"
        self.dflash_drafter = DFlashDrafter(config, path, revision, self, fallback)
        requested_tokens = server_args.speculative_num_draft_tokens
        reason = block_size_mismatch_reason(requested_tokens, self.dflash_drafter.block_size)
        if reason:
            raise UnsupportedEngineError(reason)
        self.dflash_drafter.copy_layout_to(self)
        self.tree_mask_mode = default_tree_mask_mode()

    @property
    def draft_runner(self) -> Any:
        """The `ModelRunner` of the drafter."""
        return self.dflash_drafter.runner

    def alloc_memory_pool(self, **arguments: Any) -> None:
        """Allocates the memory pool of the drafter."""
        self.dflash_drafter.build_part("alloc_memory_pool", **arguments)

    def init_attention_backends(self) -> None:
        """Builds the attention backends of the drafter."""
        self.dflash_drafter.build_part("init_attention_backends")
        self.init_attention_backend()

    def init_attention_backend(self) -> None:
        """Uses the block's own backend, of one width, for every draft length."""
        self.draft_attn_backend = self.draft_runner.attn_backend
        self.draft_runner.draft_attn_backend = self.draft_attn_backend

    def init_cuda_graphs(self) -> None:
        """Captures the graphs of the drafter."""
        self.dflash_drafter.capture_graphs(required=True)

    def _capture_cuda_graphs(self) -> None:
        """Captures nothing for a draft length, because the block has its own graphs."""

    def draft(self, batch: Any, **_: Any) -> Any:
        """Returns the inputs of a verification of gamma + 1 tokens for each request."""
        block = self.dflash_drafter.attempt(lambda: self.dflash_drafter.draft(batch))
        if block is None:
            size = batch.seq_lens.shape[0], self.dflash_drafter.block_size
            block = torch.zeros(size, dtype=torch.int64, device=self.device)
        return self.dflash_drafter.chain(self, batch, block)

    def draft_extend(self) -> None:
        """Implements a method that is abstract in SGLang and never called."""

    def _draft_extend_for_prefill(
        self, batch: Any, hidden: torch.Tensor, next_token_ids: torch.Tensor,
        mm_input_embeds: Any = None, kv_loc_plan: Any = None,
    ) -> Any:  # fmt: skip
        if not batch.forward_mode.is_idle():
            self.dflash_drafter.attempt(
                lambda: self.dflash_drafter.read_prompt(batch, hidden, kv_loc_plan)
            )
        draft_input = EagleDraftInput(
            bonus_tokens=next_token_ids, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        self._fill_draft_input(draft_input, next_token_ids.shape[0])
        return draft_input

    def _draft_extend_for_decode(self, batch: Any, result: Any, *, kv_loc_plan: Any = None) -> None:
        hidden = result.logits_output.hidden_states
        self.dflash_drafter.attempt(
            lambda: self.dflash_drafter.read_step(batch, result, hidden, kv_loc_plan)
        )
        self._fill_draft_input(result.next_draft_input, batch.seq_lens.shape[0])

    def catch_up(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Reads positions that were slept through."""
        self.dflash_drafter.attempt(lambda: self.dflash_drafter.read(hidden, slots, positions))

    def _fill_draft_input(self, draft_input: Any, size: int) -> None:
        """Fills in placeholders for an EAGLE head's outputs; a block needs only the cache."""
        config, device = self.draft_runner.model_config, self.device
        draft_input.topk_p = torch.zeros((size, 1), device=device)
        draft_input.topk_index = torch.zeros((size, 1), dtype=torch.int64, device=device)
        width = config.spec_hidden_size
        draft_input.hidden_states = torch.zeros((size, width), dtype=config.dtype, device=device)


def register() -> None:
    """Registers the hooks; must run before the engine's workers are built."""
    hook_check.around(sglang_api.RESOLVE_CAPTURE, around_resolve)
    hook_check.around(sglang_api.CONFIGURE_CAPTURE, target_capture.around_configure)
    hook_check.replace(sglang_api.DRAFT_WORKER, DFlashOnlyWorker)
    # The verification is the last reader of the scheduler's shared buffers, as in a DFLASH engine.
    eagle_worker_v2.EAGLEWorkerV2.last_shared_read_runner = property(
        lambda worker: worker.target_worker.model_runner
    )


def around_resolve(original: Callable[..., Any], **arguments: Any) -> Any:
    """Wraps `resolve_spec_aux_hidden_state_config`, to capture only what the block reads."""
    capture_config = original(**arguments)
    if not arguments["is_draft_worker"] and arguments["spec_algorithm"].is_eagle():
        spec = get_spec()
        config = draft_config(
            arguments["server_args"],
            spec.speculative_draft_model_path,
            spec.speculative_draft_model_revision,
        )
        capture_config.eagle_use_aux_hidden_state = False
        capture_config.eagle_draft_num_layers = emit_for_block(
            capture_config, config, arguments["model_config"]
        )
    return capture_config

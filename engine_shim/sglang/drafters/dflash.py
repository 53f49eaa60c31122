"""DFlash inside an EAGLE engine: DFlash drafts its block, and EAGLE's parts verify.

SGLang's `DFlashWorkerV2` drafts and verifies in one long method.  Its drafting half runs unchanged.
An exception stops it where it would build the verification; the block is then in its buffer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Never

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode, compute_position
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative import dflash_worker_v2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from engine_shim.common.errors import HookError, UnsupportedEngineError
from engine_shim.link.lost_capabilities import error_reason
from engine_shim.sglang.api import fused_keys, sglang_api
from engine_shim.sglang.api.transfer import to_device
from engine_shim.sglang.drafters import dflash_checkpoint
from engine_shim.sglang.drafters.drafting import OptionalPart, build_verification


class _DraftedError(Exception):
    """Signals that the block is drafted; it is not a failure."""


def _raise_drafted(*_: object, **__: object) -> Never:
    raise _DraftedError


class _DraftOnlyWorker(dflash_worker_v2.DFlashWorkerV2):
    """The drafting half of SGLang's worker, without the parts that would change the target."""

    def _defer_target_verify_gather(self) -> None:
        return None

    def _maybe_merge_trained_mask_embedding(self) -> None:
        """Refuses a trained mask, because SGLang would write it into the target's embedding."""
        reason = dflash_checkpoint.trained_mask_reason(
            get_spec().speculative_draft_model_path or ""
        )
        if reason:
            raise UnsupportedEngineError(reason)


class DFlashDrafter(OptionalPart):
    """Builds and runs the drafting half.

    failure_reason: why it no longer drafts, "" while it does.  After an error it has missed
    positions, so it never drafts again.
    """

    def __init__(
        self, config: Any, model_path: str, revision: str | None, draft_worker: Any, fallback: str
    ) -> None:
        """Builds the drafter.

        config: `ModelConfig` of the checkpoint at model_path.  draft_worker: the `EagleDraftWorker`
        that it is part of, or that it replaces.  fallback: tells the log what happens without it.
        Raises PluginError.
        """
        super().__init__(f"DFlash no longer drafts; {fallback}")
        self._model_path, self._revision = model_path, revision
        target = draft_worker.target_worker.model_runner
        self.block_size = dflash_checkpoint.block_size(config)
        reason = dflash_checkpoint.block_too_large_reason(
            self.block_size, sglang_api.max_step_tokens()
        )
        if reason:
            raise UnsupportedEngineError(reason)
        dflash_worker_v2.DFlashVerifyInput = _raise_drafted
        saved, target.spec_algorithm = target.spec_algorithm, SpeculativeAlgorithm.DFLASH
        try:
            with self.override_config(), sglang_api.override_draft_config(target, config):
                self._worker = _DraftOnlyWorker(
                    draft_worker.server_args,
                    draft_worker.gpu_id,
                    draft_worker.nccl_port,
                    draft_worker.target_worker,
                )
        finally:
            target.spec_algorithm = saved
        if self._worker.lilicorr is not None:
            raise UnsupportedEngineError(
                "a DFlash checkpoint with a LiLiCorr head is untested where the draft length is "
                "steered: it must see each step when it is read"
            )
        self._offsets: dict[int, torch.Tensor] = {}
        self._device = draft_worker.device

    def override_config(self) -> AbstractContextManager[Any]:
        """Gives SGLang the configuration of a DFlash-only engine, inside the `with` block."""
        override: AbstractContextManager[Any] = get_spec().override(
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=self._model_path,
            speculative_draft_model_revision=self._revision,
            speculative_num_steps=1,
            speculative_num_draft_tokens=self.block_size,
            speculative_draft_window_size=None,
        )
        return override

    @property
    def runner(self) -> Any:
        """Returns the `ModelRunner` of the drafter."""
        return self._worker.draft_model_runner

    @property
    def mask_token(self) -> int:
        """Returns the token id that stands for the unknown tokens of a block."""
        token_id: int = self._worker._mask_token_id
        return token_id

    def refresh_fused_weights(self) -> None:
        """Rebuilds what SGLang derives from the weights: the fused key and value weights."""
        if self._worker._fused_kv_helper is not None:
            fused_keys.refresh_fused_weights(
                self._worker._fused_kv_helper, self._worker.draft_model.layers
            )

    def copy_layout_to(self, draft: Any) -> None:
        """Gives a draft worker the rank layout of this drafter."""
        sglang_api.match_memory_layout(draft, self._worker)

    def build_part(self, part: str, *arguments: Any, **named: Any) -> None:
        """Calls the method of the drafting half that builds `part`, by its name."""
        with self.override_config():
            getattr(self._worker, part)(*arguments, **named)

    def capture_graphs(self, *, required: bool) -> None:
        """Captures the block's graphs after drafting a first block without them.

        If that block fails, the drafter is given up, or refused if it is required.  If the capture
        fails, the start ends: the state of torch's memory pools is then unknown, and a graph could
        overwrite tensors that are in use.  Raises UnsupportedEngineError.
        """
        worker = self._worker._draft_worker
        original = worker.init_cuda_graphs

        def capture_after_first_block(*, capture_decode_cuda_graph: bool) -> None:
            # SGLang registers its users' forward hooks in each call; graphs must not contain them.
            if capture_decode_cuda_graph and not sglang_api.config_leaf("forward_hooks"):
                original(capture_decode_cuda_graph=False)
                self.rehearse(required=required)
            if not self.failure_reason:
                original(capture_decode_cuda_graph=capture_decode_cuda_graph)

        worker.init_cuda_graphs = capture_after_first_block
        try:
            self.build_part("init_cuda_graphs")
        except UnsupportedEngineError:
            raise
        except Exception as error:
            raise UnsupportedEngineError(
                f"the graphs of the DFlash drafter {self._model_path} cannot be captured: "
                f"{error_reason(error)}; leave memory for them (--mem-fraction-static, "
                "--cuda-graph-max-bs), or start the engine without this drafter"
            ) from error
        finally:
            worker.init_cuda_graphs = original

    def draft(self, batch: Any) -> torch.Tensor:
        """Returns the block [B, block_size]; its first column has the newest tokens.

        Raises HookError if SGLang continued after drafting.
        """
        draft_input = batch.spec_info
        batch.spec_info = make_draft_input_v2(
            bonus_tokens=draft_input.bonus_tokens, new_seq_lens=batch.seq_lens
        )
        try:
            self._worker.forward_batch_generation(batch)
        except _DraftedError:
            block: torch.Tensor = self._worker._draft_block_tokens_buf[: len(batch.seq_lens)]
            return block
        finally:
            batch.spec_info = draft_input
        raise HookError("DFlash verified its block itself: SGLang's order of calls has changed")

    def rehearse(self, *, required: bool) -> None:
        """Drafts a block before there is traffic.

        If that fails, the drafter is given up; raises UnsupportedEngineError if it is required.
        """
        if self.failure_reason:
            return
        if not required:
            self.attempt(self._rehearse)
            return
        try:
            self._rehearse()
        except Exception as error:
            raise UnsupportedEngineError(
                f"the DFlash drafter {self._model_path} cannot draft: {error_reason(error)}; "
                "repair "
                "it, or start the engine without it"
            ) from error

    # Parameters of some of SGLang's models require gradients (Gemma 3).
    @torch.no_grad()
    def _rehearse(self) -> None:
        """Reads one position and drafts one block.

        Uses row 0 of the requests and slot 0 of the KV cache, like the padding of a batch.  No
        request ever owns these, so no request is affected.
        """
        model = self._worker.draft_model
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        target = self._worker.model_runner.model_config
        width = model.num_context_features * target.hidden_size
        hidden = torch.zeros((1, width), dtype=target.dtype, device=self._device)
        self.read(hidden, zero, zero)
        batch = ScheduleBatch(
            reqs=[],
            forward_mode=ForwardMode.DECODE,
            spec_info=make_draft_input_v2(bonus_tokens=zero, new_seq_lens=zero + 1),
            req_pool_indices=zero,
            seq_lens=zero + 1,
            seq_lens_cpu=torch.ones(1, dtype=torch.int64),
        )
        # Reading the block back waits for the device, whose errors are asynchronous.
        self.draft(batch).tolist()

    def chain(self, draft: Any, batch: Any, block: torch.Tensor) -> Any:
        """Returns the verification of a block's first gamma tokens; see `build_verification`."""
        return build_verification(draft, batch, block[:, 1 : draft.speculative_num_steps + 1])

    def read_prompt(self, batch: Any, hidden: torch.Tensor, kv_loc_plan: Any) -> None:
        """Reads a prefill's positions: hidden [tokens, width], request after request."""
        lengths = to_device(batch.extend_lens, self._device, torch.int32)
        prefixes = to_device(batch.prefix_lens, self._device, torch.int32)
        backend = self._worker.model_runner.prefill_attention_backend_str
        positions, _ = compute_position(backend, prefixes, lengths, int(sum(batch.extend_lens)))
        slots = batch.out_cache_loc
        if kv_loc_plan is not None:
            slots = self._worker._draft_write_ids(kv_loc_plan)
        self.read(hidden, slots, positions, extend_lens=lengths)

    def read_step(self, batch: Any, result: Any, hidden: torch.Tensor, kv_loc_plan: Any) -> None:
        """Reads what a verification has accepted: hidden [B * width, ...]."""
        batch_size = batch.seq_lens.shape[0]
        width = hidden.shape[0] // batch_size
        offsets = self._offsets.get(width)
        if offsets is None:
            offsets = self._offsets[width] = torch.arange(width, device=self._device)
        positions = (batch.seq_lens[:, None] + offsets).flatten()
        slots = batch.out_cache_loc
        if kv_loc_plan is not None:
            slots = self._worker._draft_write_ids(kv_loc_plan)
        self.read(
            hidden, slots, positions,
            cache_loc_2d=slots.view(batch_size, width), commit_lens=result.accept_lens,
        )  # fmt: skip

    def read(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, **shape: Any
    ) -> None:
        """Puts the target's hidden states into the drafter's KV cache, at these slots."""
        self._worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden, cache_loc=slots, positions=positions, **shape
        )

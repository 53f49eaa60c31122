"""Lets a drafter sleep while its drafts are not used, and catch up before it drafts again.

An awake drafter reads every position that the target has passed (the target's hidden state at p,
and token p + 1), in one draft-extend per step, so that its KV cache is up to date.  At gamma = 0
that is most of the remaining cost of speculation.  While the drafter sleeps, at gamma = 0 or while
a lookup drafts alone, the step's hidden states and tokens are stored instead.  One draft-extend
over all missed positions catches up

  - before the first step with the drafter awake; it also gives the state for the next draft;
  - while asleep, whenever the buffer is full: in bulk, which is far cheaper for each position.

With the overlap schedule, the host learns one step later how many drafts of a lookup were accepted.
A drafter that wakes up then waits for one more step, in which the lookup drafts and the drafter
reads the accepted tokens.  That step's draft-extend gives the state for the next draft, and the
missed positions are read in the next step.

So the buffer is bounded, and however long the sleep, the drafter has the KV of all tokens when it
drafts.  One case is not caught up: the tail (at most one buffer) of a request that finishes while
the drafter sleeps.  The prefix cache may reuse the target's KV of that tail, for which the
drafter's KV was never written.  That costs acceptance, never a wrong token, and is counted as
unread.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine_shim.sglang.api import attention_dp, sglang_api
from engine_shim.sglang.api.transfer import to_device
from engine_shim.sglang.drafters.sleep_backlog import BacklogRows, BacklogStep, SleepBacklog

if TYPE_CHECKING:
    from engine_shim.sglang.drafters.dual import DualDrafter


@dataclass(slots=True)
class SleepCounters:
    """Counts since the engine started.

    `slept`: steps; `passes`: catch-up forwards; `caught_up`: positions they read; `cold`: requests
    that had to draft without the missed positions; `unread`: positions that were never read.
    """

    slept: int = 0
    passes: int = 0
    caught_up: int = 0
    cold: int = 0
    unread: int = 0


def cannot_sleep_reason(worker: Any) -> str | None:
    """Explains why the drafter of this `EAGLEWorkerV2` cannot sleep; None if it can."""
    from sglang.srt.utils.common import is_cpu, is_cuda

    draft = worker.draft_worker
    obstacles = {
        "only CUDA and the CPU are known to work": not (is_cuda() or is_cpu()),
        "data-parallel attention is untested with it": attention_dp.is_enabled(),
        "--enable-mixed-chunk decodes inside prefill batches": sglang_api.config_leaf(
            "enable_mixed_chunk"
        ),
        "rejection sampling needs the drafter's distribution of each step": sglang_api.config_leaf(
            "speculative_use_rejection_sampling"
        ),
        "the drafter's sparse attention is seeded by each draft-extend": (
            draft.seed_dsa_topk_from_draft_extend
        ),
        "multimodal rotary positions are not kept": draft.draft_runner.model_config.model_is_mrope,
        "recurrent layers cannot catch up later": hasattr(worker.req_to_token_pool, "mamba_pool"),
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


class SleepingDrafter:
    """Stores what the drafter of one `EAGLEWorkerV2` sleeps through, and makes it catch up.

    `max_steps`: the buffer's length in steps.  `second_drafter`: another drafter that sleeps with
    it.  `is_behind`: whether it has missed steps.
    """

    def __init__(
        self, worker: Any, max_steps: int, second_drafter: DualDrafter | None = None
    ) -> None:
        self._worker = worker
        self._second_drafter = second_drafter
        self._backlog = SleepBacklog(max_steps)
        # Of the step that begins: known context lengths, and by how much each may be larger.
        self._context_lengths: tuple[list[int], int] = ([], 0)
        self.is_behind = False
        self.counters = SleepCounters()

    @property
    def must_wait_one_step(self) -> bool:
        """Whether a drafter that wakes up can only draft from the next step on.

        Valid between `before_step` and the step.
        """
        newest = self._backlog.newest
        return newest is not None and newest.counts is None and not newest.is_read

    def before_step(self, batch: Any, *, asleep: bool, unknown_tokens: int = 0) -> None:
        """Must be called when a decode step begins, before drafting.

        unknown_tokens: the most tokens that the previous step has added to a request, if the
        scheduler has not read them back; 0 if it has.
        """
        if not asleep and not self.is_behind:
            return
        self._count_newest(batch)
        self._context_lengths = self._read_context_lengths(batch, unknown_tokens)
        if not self.is_behind:
            return
        if self._backlog.is_full_for(len(batch.reqs)) if asleep else not self.must_wait_one_step:
            self._catch_up(batch)

    def forget_requests(self, requests: Sequence[Any]) -> None:
        """Must be called with the requests of a prefill, which the drafter reads as well."""
        self._backlog.forget_requests([request.rid for request in requests])

    def sleep_through(self, batch: Any, result: Any, width: int = 1) -> BacklogStep:
        """Replaces a step's draft-extend: stores what it would have read.

        `batch` and `result`: as SGLang passes them to `_draft_extend_for_decode`; width: verified
        tokens of each request.  Returns the step, whose accepted counts the host learns later.
        """
        step = self.store_step(batch, result, width)
        self._worker._stub_skipped_draft_extend(batch, result)
        self.counters.slept += 1
        return step

    def store_step(
        self, batch: Any, result: Any, width: int, *, is_read: bool = False
    ) -> BacklogStep:
        """Stores a step; is_read: whether its draft-extend runs nevertheless."""
        rows = len(batch.reqs) * width
        step = BacklogStep(
            [request.rid for request in batch.reqs],
            # Copies: with graphs, these live in buffers that the next step overwrites.
            result.next_token_ids[:rows].clone(),
            result.logits_output.hidden_states[:rows].clone(),
            *self._context_lengths,
            width=width,
            is_read=is_read,
        )
        self._backlog.add(step)
        self.is_behind = True
        return step

    def _count_newest(self, batch: Any) -> None:
        """Counts what the newest step has accepted, if the host already has its lengths."""
        newest = self._backlog.newest
        if newest is None or newest.counts is not None or batch.seq_lens_cpu is None:
            return
        lengths = batch.seq_lens_cpu.tolist()
        end_by_request = {r.rid: end for r, end in zip(batch.reqs, lengths, strict=True)}
        known_starts = zip(newest.request_ids, newest.known_starts, strict=True)
        # Nothing is read for a request that has left.
        newest.counts = [
            end_by_request.get(rid, known_start + 1) - known_start
            for rid, known_start in known_starts
        ]

    def _read_context_lengths(self, batch: Any, unknown_tokens: int) -> tuple[list[int], int]:
        """Returns each request's context length and by how much it may be larger, without waiting.

        If SGLang keeps no lengths on the host (FlashAttention, TensorRT-LLM), they follow from the
        committed lengths of its requests and from what the previous step has added since.
        """
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu.tolist(), 0
        committed = [request.kv.kv_committed_len for request in batch.reqs]
        if not unknown_tokens:
            return committed, 0
        newest = self._backlog.newest
        if newest is not None and newest.counts is not None:
            # The newest step added one token to each of its requests.
            ids = frozenset(newest.request_ids)
            previous_lengths = zip(batch.reqs, committed, strict=True)
            return [length + (request.rid in ids) for request, length in previous_lengths], 0
        return committed, unknown_tokens

    def _catch_up(self, batch: Any) -> None:
        counted_steps = self._backlog.take_counted()
        # The remaining steps are not read yet; they stay in the backlog.
        self.is_behind = len(self._backlog) > 0
        backlog = counted_steps.batch_rows(
            [request.rid for request in batch.reqs], self._context_lengths[0]
        )
        self.counters.cold += backlog.cold
        self.counters.unread += backlog.unread
        if not backlog.rows:
            return
        tokens, hidden = counted_steps.concatenate()
        position_count, request_count = len(backlog.order), len(backlog.rows)
        missed_positions = [
            (row, start + offset)
            for row, start, length in zip(
                backlog.rows, backlog.starts, backlog.lengths, strict=True
            )
            for offset in range(length)
        ]  # fmt: skip
        owners, position_list = zip(*missed_positions, strict=True)
        ends = [a + n for a, n in zip(backlog.starts, backlog.lengths, strict=True)]
        index_values = [*backlog.order, *owners, *position_list, *backlog.rows, *ends]
        order, owner, positions, rows, seq_lens = to_device(index_values, tokens.device).split(
            [position_count, position_count, position_count, request_count, request_count]
        )
        extend = _extend_batch(batch, backlog, rows, owner, positions, seq_lens)
        hidden, draft = hidden[order], self._worker.draft_worker
        if sglang_api.dflash_only_drafter(draft) is not None:
            draft.catch_up(hidden, extend.out_cache_loc, positions)
        else:
            if self._second_drafter is not None:
                hidden = self._second_drafter.catch_up(hidden, extend.out_cache_loc, positions)
            output = _read(draft, extend, tokens[order], hidden)
            if counted_steps.is_latest:
                _set_draft_state(batch.spec_info, rows, output)
        self.counters.passes += 1
        self.counters.caught_up += len(backlog.order)


def _extend_batch(
    batch: Any,
    backlog: BacklogRows,
    rows: torch.Tensor,
    owner: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Any:
    """Returns a `ScheduleBatch` that extends the requests that are behind by what they missed.

    rows: their rows in the batch; owner: row of each missed position; seq_lens: end of the missed
    positions of each request.  It writes the slots that the target has already filled, so nothing
    is allocated.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    extend = copy.copy(batch)
    extend.reqs = [batch.reqs[row] for row in backlog.rows]
    extend.req_pool_indices = batch.req_pool_indices[rows]
    extend.seq_lens = seq_lens.to(batch.seq_lens.dtype)
    ends = zip(backlog.starts, backlog.lengths, strict=True)
    extend.seq_lens_cpu = torch.tensor([start + length for start, length in ends])
    extend.seq_lens_sum = sum(backlog.starts) + sum(backlog.lengths)
    if batch.orig_seq_lens is not None:
        extend.orig_seq_lens = batch.orig_seq_lens[rows]
    slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[owner], positions]
    extend.out_cache_loc = slots.to(torch.int64)
    extend.forward_mode = ForwardMode.EXTEND
    extend.prefix_lens = backlog.starts
    extend.extend_lens = backlog.lengths
    extend.extend_logprob_start_lens = [0] * len(backlog.rows)
    extend.extend_num_tokens = len(backlog.order)
    extend.return_logprob = False
    extend.top_logprobs_nums = extend.token_ids_logprobs = None
    if batch.multimodal_inputs is not None:
        extend.multimodal_inputs = [batch.multimodal_inputs[row] for row in backlog.rows]
    # ForwardBatch.init_new writes into it.
    extend.sampling_info = copy.copy(batch.sampling_info)
    extend.has_grammar = False
    return extend


def _read(draft: Any, extend: Any, tokens: torch.Tensor, hidden: torch.Tensor) -> Any:
    """Runs one pass of the drafter over the missed positions, as after a prefill.

    `draft`: the `EagleDraftWorker`.  Returns its logits output: one row for each request, at its
    last missed position.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    extend.input_ids = tokens
    extend.spec_info = EagleDraftExtendInput(
        hidden_states=hidden, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
    )
    with sglang_api.draft_pass(draft):
        forward_batch = ForwardBatch.init_new(
            extend,
            draft.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        output = draft.draft_runner.forward(forward_batch).logits_output
    # The scheduler waits on this event for the step's last reader of shared buffers, which is not
    # this pass.
    draft.draft_runner.shared_read_done_event = None
    return output


def _set_draft_state(draft_input: Any, rows: torch.Tensor, output: Any) -> None:
    """Sets the state from which the next draft of the caught-up requests begins.

    Does what SGLang does after a draft-extend: greedy, for a chain.  Makes new tensors, because the
    old ones may be views of tensors that the scheduler still uses.
    """
    index = torch.argmax(output.next_token_logits, dim=-1, keepdim=True)
    state = {
        "topk_p": torch.ones_like(index, dtype=torch.float32),
        "topk_index": index,
        "hidden_states": output.hidden_states,
    }
    for name, value in state.items():
        updated = getattr(draft_input, name).clone()
        updated[rows] = value.to(updated.dtype)
        setattr(draft_input, name, updated)

"""A drafter that sleeps while nothing of it is used, and wakes up without having missed anything.

Awake, the drafter reads every position the target has passed (the target's hidden state at p, and
token p + 1), in one draft-extend per step, so that its KV cache keeps up.  At gamma = 0 that is
most of what speculation still costs.  Asleep, at gamma = 0 or while a lookup drafts alone, the
step's hidden states and tokens are kept instead, and one draft-extend of as many positions as were
missed catches up

  - before the first step with the drafter awake, which also gives the state drafting begins from;
  - while asleep, whenever the buffer is full: late and in bulk, far cheaper for each position.

With the overlap schedule, the host learns a step later how many drafts of a lookup were accepted.
So a drafter that is to wake up then stays idle for one more step, in which the lookup drafts and it
reads along: that step's draft-extend gives the state drafting begins from, and what was missed is
read in the next one.

So the buffer is bounded and no request goes cold, however long the sleep.  What is not caught up is
the tail (at most one buffer) of a request that finishes asleep: its target KV may be found again
through the prefix cache, with the drafter's KV of that tail being whatever lay there.  That costs
acceptance, never a wrong token, and is counted as unread.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine_shim.sglang.api import attention_dp, sglang_api
from engine_shim.sglang.api.transfer import to_device
from engine_shim.sglang.drafters.idle_kv_buffer import BacklogRows, BacklogStep, BacklogSteps

if TYPE_CHECKING:
    from engine_shim.sglang.drafters.dual import DualDrafter


@dataclass(slots=True)
class IdleCounters:
    """Counts since the engine started.

    `slept`: steps; `passes`: catch-up forwards; `caught_up`: positions they read; `cold`: requests
    that had to draft from nothing; `unread`: positions that were never read.
    """

    slept: int = 0
    passes: int = 0
    caught_up: int = 0
    cold: int = 0
    unread: int = 0


def cannot_sleep_reason(worker: Any) -> str | None:
    """Explains why the drafter of this `EAGLEWorkerV2` cannot be put to sleep; None when it can."""
    from sglang.srt.utils.common import is_cpu, is_cuda

    draft = worker.draft_worker
    obstacles = {
        "only CUDA and the CPU are known to work": not (is_cuda() or is_cpu()),
        "data-parallel attention is untested with it": attention_dp.is_on(),
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
        "recurrent layers cannot be caught up out of step": hasattr(
            worker.req_to_token_pool, "mamba_pool"
        ),
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), None)


class IdleDrafter:
    """Keeps what one `EAGLEWorkerV2`'s drafter sleeps through, and catches it up.

    `max_steps`: the buffer's length in steps.  `second`: another drafter that sleeps with it.
    `is_behind`: whether it has missed steps.
    """

    def __init__(self, worker: Any, max_steps: int, second: DualDrafter | None = None) -> None:
        self._worker = worker
        self._dual = second
        self._backlog = BacklogSteps(max_steps)
        # Of the step that begins: context lengths, and by how much they may be larger.
        self._lengths: tuple[list[int], int] = ([], 0)
        self.is_behind = False
        self.counters = IdleCounters()

    @property
    def must_wait(self) -> bool:
        """Whether a drafter that wakes up can only draft from the next step on.

        To be asked between `before_step` and the step.
        """
        newest = self._backlog.newest
        return newest is not None and newest.counts is None and not newest.is_read

    def before_step(self, batch: Any, *, asleep: bool, unread_tokens: int = 0) -> None:
        """To be called as a decode step begins, before anything drafts.

        unread_tokens: the most that the step before has added to a request, where the scheduler has
        not read that back; 0 where it has.
        """
        if not asleep and not self.is_behind:
            return
        self._count_newest(batch)
        self._lengths = self._known_lengths(batch, unread_tokens)
        if not self.is_behind:
            return
        if self._backlog.is_full_for(len(batch.reqs)) if asleep else not self.must_wait:
            self._catch_up(batch)

    def forget(self, requests: Sequence[Any]) -> None:
        """To be called with the requests of a prefill, which the drafter reads as well."""
        self._backlog.forget([request.rid for request in requests])

    def sleep_through(self, batch: Any, result: Any, width: int = 1) -> BacklogStep:
        """Replaces a step's draft-extend: keeps what it would have read.

        `batch` and `result` as SGLang hands them to `_draft_extend_for_decode`; width: tokens that
        it has verified of each request.  Returns the step, whose counts the host knows later.
        """
        step = self.keep(batch, result, width)
        self._worker._stub_skipped_draft_extend(batch, result)
        self.counters.slept += 1
        return step

    def keep(self, batch: Any, result: Any, width: int, *, is_read: bool = False) -> BacklogStep:
        """Keeps a step; is_read: its draft-extend runs all the same."""
        rows = len(batch.reqs) * width
        step = BacklogStep(
            [request.rid for request in batch.reqs],
            # Copies: with graphs, these live in buffers that the next step overwrites.
            result.next_token_ids[:rows].clone(),
            result.logits_output.hidden_states[:rows].clone(),
            *self._lengths,
            width=width,
            is_read=is_read,
        )
        self._backlog.add(step)
        self.is_behind = True
        return step

    def _count_newest(self, batch: Any) -> None:
        """Counts what the newest step has accepted, where the host has lengths already."""
        newest = self._backlog.newest
        if newest is None or newest.counts is not None or batch.seq_lens_cpu is None:
            return
        lengths = batch.seq_lens_cpu.tolist()
        ends = {r.rid: end for r, end in zip(batch.reqs, lengths, strict=True)}
        begun = zip(newest.request_ids, newest.known, strict=True)
        # Of a request that has left nothing is read.
        newest.counts = [ends.get(rid, known + 1) - known for rid, known in begun]

    def _known_lengths(self, batch: Any, unread_tokens: int) -> tuple[list[int], int]:
        """Each request's context length and by how much it may be larger, without any wait.

        Where SGLang keeps no lengths on the host (FlashAttention, TensorRT-LLM), they follow from
        what its requests have committed, and from what the step before has added since.
        """
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu.tolist(), 0
        committed = [request.kv.kv_committed_len for request in batch.reqs]
        if not unread_tokens:
            return committed, 0
        newest = self._backlog.newest
        if newest is not None and newest.counts is not None:
            # It added one token to each.
            ids = frozenset(newest.request_ids)
            found = zip(batch.reqs, committed, strict=True)
            return [length + (request.rid in ids) for request, length in found], 0
        return committed, unread_tokens

    def _catch_up(self, batch: Any) -> None:
        part = self._backlog.take_counted()
        # What is left was not read, and is slept through with what follows it.
        self.is_behind = len(self._backlog) > 0
        backlog = part.of_batch([request.rid for request in batch.reqs], self._lengths[0])
        self.counters.cold += backlog.cold
        self.counters.unread += backlog.unread
        if not backlog.rows:
            return
        tokens, hidden = part.tensors()
        count, size = len(backlog.order), len(backlog.rows)
        missed = [
            (row, start + place)
            for row, start, length in zip(
                backlog.rows, backlog.starts, backlog.lengths, strict=True
            )
            for place in range(length)
        ]  # fmt: skip
        owners, places = zip(*missed, strict=True)
        ends = [a + n for a, n in zip(backlog.starts, backlog.lengths, strict=True)]
        lists = [*backlog.order, *owners, *places, *backlog.rows, *ends]
        order, owner, positions, rows, seq_lens = to_device(lists, tokens.device).split(
            [count, count, count, size, size]
        )
        extend = _extend_batch(batch, backlog, rows, owner, positions, seq_lens)
        hidden, draft = hidden[order], self._worker.draft_worker
        if sglang_api.dflash_only(draft) is not None:
            draft.catch_up(hidden, extend.out_cache_loc, positions)
        else:
            if self._dual is not None:
                hidden = self._dual.catch_up(hidden, extend.out_cache_loc, positions)
            output = _read(draft, extend, tokens[order], hidden)
            if part.is_latest:
                _install(batch.spec_info, rows, output)
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
    """A `ScheduleBatch` of the requests that are behind, extending by what they missed.

    rows: their places in the batch; owner: that of each of the missed positions; seq_lens: where
    these end.  The slots it writes are those the target has filled already: nothing is allocated.
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
    """One pass of the drafter over the missed positions, as after a prefill.

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
    # The scheduler waits on this event for the step's last reader of shared buffers, and this pass
    # is not the last one.
    draft.draft_runner.shared_read_done_event = None
    return output


def _install(draft_input: Any, rows: torch.Tensor, output: Any) -> None:
    """Gives the requests that were caught up the state that their next draft begins from.

    As SGLang does after a draft-extend: greedy, for a chain.  In new tensors, because the old ones
    may be views of what the scheduler still holds.
    """
    index = torch.argmax(output.next_token_logits, dim=-1, keepdim=True)
    state = {
        "topk_p": torch.ones_like(index, dtype=torch.float32),
        "topk_index": index,
        "hidden_states": output.hidden_states,
    }
    for name, value in state.items():
        new = getattr(draft_input, name).clone()
        new[rows] = value.to(new.dtype)
        setattr(draft_input, name, new)

"""Metadata of SGLang's CPU attention backend in buffers that never move.

The attention backends of GPUs implement this interface for their graphs; here it is implemented for
`IntelAMXAttnBackend` and its chain of draft steps, as SGLang's graph runners call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def install(*, host_lengths: bool) -> None:
    """Adds the interface to SGLang's classes.

    host_lengths: whether the scheduler keeps context lengths on the host for this backend.
    """
    from sglang.srt.layers.attention import intel_amx_backend as amx

    added = {
        amx.IntelAMXAttnBackend: {
            "init_cuda_graph_state": _init_state,
            "get_cuda_graph_seq_len_fill_value": lambda _: 1,
            "init_forward_metadata_out_graph": _fill_metadata,
            "update_verify_buffers_to_fill_after_draft": lambda *_: None,
            "needs_cpu_seq_lens": host_lengths,
            "init_forward_metadata": _with_checked_width(
                amx.IntelAMXAttnBackend.init_forward_metadata
            ),
        },
        amx.IntelAMXMultiStepDraftBackend: {
            "init_cuda_graph_state": _init_chain_state,
            "init_forward_metadata_out_graph": _fill_chain_metadata,
            "init_forward_metadata_in_graph": lambda *_: None,
            "on_after_cuda_graph_warmup": lambda *_: None,
            "needs_cpu_seq_lens": host_lengths,
        },
    }
    for backend, attributes in added.items():
        for name, value in attributes.items():
            type.__setattr__(backend, name, value)


def _with_checked_width(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wraps the metadata of eager passes, for which this backend alone accepts any width."""

    def init_forward_metadata(backend: Any, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_target_verify():
            _check_width(backend, forward_batch.spec_info)
        original(backend, forward_batch)

    return init_forward_metadata


def _check_width(backend: Any, spec: Any) -> None:
    """Raises ValueError for a verification with the backend of another draft length."""
    if spec is not None and spec.draft_token_num != backend.num_draft_tokens:
        raise ValueError(
            f"a verification of {spec.draft_token_num} tokens met the attention backend of "
            f"{backend.num_draft_tokens}"
        )


def _init_state(backend: Any, max_bs: int, max_num_tokens: int) -> None:
    backend.graph_seq_lens = torch.ones(max_bs, dtype=torch.int64)
    backend.graph_extend_lens = torch.ones(max_bs, dtype=torch.int32)
    backend.graph_starts = torch.zeros(max_bs, dtype=torch.int32)
    backend.graph_rows = torch.arange(max_bs, dtype=torch.int32)


def _fill_metadata(backend: Any, forward_batch: Any, in_capture: bool = False) -> None:
    """Fills the metadata of a pass that a graph is about to run, or to record."""
    size, mode, spec = forward_batch.batch_size, forward_batch.forward_mode, forward_batch.spec_info
    lengths = forward_batch.seq_lens[:size]
    if mode.is_decode_or_idle():
        width = 1
    elif mode.is_target_verify():
        width = backend.num_draft_tokens
        _check_width(backend, spec)
        lengths = lengths + width
    else:
        width = spec.num_tokens_per_req
        # SGLang pads a batch with requests of length 1.
        lengths = lengths.clamp(min=width)
    backend.graph_seq_lens[:size].copy_(lengths)
    backend.graph_extend_lens[:size].fill_(width)
    backend.graph_starts[:size].copy_(backend.graph_rows[:size] * width)
    backend.draft_decode_metadata = None
    backend.forward_metadata = (None, width)
    if mode.is_decode_or_idle():
        backend.extend_metadata = None
        return
    backend.extend_metadata = (
        backend.graph_seq_lens[:size],
        backend.graph_extend_lens[:size],
        backend.graph_starts[:size],
        None,
    )


def _init_chain_state(chain: Any, max_bs: int, max_num_tokens: int) -> None:
    chain.graph_table = torch.zeros((max_bs, chain.pool_len), dtype=torch.int32)
    chain.graph_rows = torch.arange(max_bs)
    chain.graph_seq_lens = [torch.ones(max_bs, dtype=torch.int64) for _ in chain.attn_backends]


def _fill_chain_metadata(chain: Any, forward_batch: Any, in_capture: bool = False) -> None:
    """Fills the metadata of every draft step of a chain."""
    size = forward_batch.batch_size
    lengths = forward_batch.seq_lens[:size]
    table = chain.build_draft_decode_metadata(
        chain.attn_backends[0].req_to_token_pool.req_to_token,
        forward_batch.req_pool_indices[:size],
        lengths,
        chain.topk,
        chain.speculative_num_steps,
        chain.pool_len,
    )
    chain.graph_table[:size].copy_(table)
    for step, backend in enumerate(chain.attn_backends):
        chain.graph_seq_lens[step][:size].copy_(lengths + step + 1)
        backend.forward_metadata = (None, None)
        backend.draft_decode_metadata = (
            chain.graph_table[:size],
            chain.graph_seq_lens[step][:size],
            chain.graph_rows[:size],
        )

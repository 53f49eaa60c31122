"""Prepares SGLang and torch for a CPU, each through the entry point that it offers for that.

The entry points are declared in the ``dist-info`` folder beside this file. So they act in every
process, spawned ones included, that has this folder on its path, and in no other.
"""

import os
import sys
import traceback
from typing import Any

# How long a controller waits for a request before it serves its watchdog.
_WAIT_MILLISECONDS = 100


def _is_cpu_engine() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def _emulates_cuda() -> bool:
    return os.environ.get("EMULATED_CUDA") == "1"


def answer_amx() -> None:
    """Say that the CPU has AMX tiles; called by torch (group ``torch.backends``) when imported.

    Or, with EMULATED_CUDA=1, that there is a GPU (see ``emulated_cuda``).

    SGLang's only complete CPU attention backend calls itself ``intel_amx`` and asks torch for AMX
    tiles before it offers itself.  The operators of the stand-in need no tiles.
    """
    if _emulates_cuda():
        from emulated_cuda import patches

        patches.install_in_torch()
    elif _is_cpu_engine():
        import torch

        vars(torch.cpu)["_is_amx_tile_supported"] = lambda: True


def prepare_sglang() -> None:
    """Called by SGLang in each of its processes (group ``sglang.srt.plugins``)."""
    if _emulates_cuda():
        from emulated_cuda import patches as emulation

        try:
            emulation.install_in_sglang()
        except Exception as error:
            # SGLang continues without a plugin that fails, here with half of a device.
            traceback.print_exc()
            raise SystemExit(f"the emulated GPU could not be put in place: {error}") from error
    if not _is_cpu_engine():
        return
    accept_any_weight()
    from cpu_graphs import patches

    patches.install()
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        wait_for_requests()
    # A process that has not loaded the scheduler never drafts.
    if "sglang.srt.managers.scheduler" in sys.modules:
        draft_in_blocks()
        mask_for_triton()
        verify_one_as_decoding()
        verify_samples()
        continue_pages()
        hand_over_caches()
        wait_for_no_device()
        roll_back_states()


def pace() -> None:
    """Called by SGLang too: lets steps last as long as the table in LAB_PACE says."""
    if (
        _is_cpu_engine()
        and os.environ.get("LAB_PACE")
        and "sglang.srt.managers.scheduler" in sys.modules
    ):
        from lab.cpu_engine.pace.pacer import register

        register()


def accept_any_weight() -> None:
    """Send every matrix to the stand-in.

    SGLang hands a layer to ``sgl_kernel`` only if AMX tiles can hold its weight: bfloat16, sizes in
    multiples of 16 and 32.  The stand-in takes any matrix, and float32 has to pass through it to
    round alike at every batch size.
    """
    import torch
    from sglang.srt.layers import amx_utils, logits_processor

    dtype_fits = amx_utils.dtype_is_supported
    shape_fits = amx_utils.dim_is_supported
    head_fits = logits_processor.use_intel_amx_backend
    amx_utils.dtype_is_supported = lambda weight: (
        weight.dtype == torch.float32 or dtype_fits(weight)
    )
    # Experts' matrices lie in one tensor.
    amx_utils.dim_is_supported = lambda weight: weight.ndim in (2, 3) or shape_fits(weight)
    logits_processor.use_intel_amx_backend = lambda head: (
        head_fits(head) or head.weight.dtype == torch.float32
    )


def wait_for_requests() -> None:
    """Let the controller of data-parallel ranks rest while no request comes.

    SGLang's asks its socket again and again, which would keep a core busy.
    """
    import zmq
    from sglang.srt.managers import data_parallel_controller

    receive = data_parallel_controller.sock_recv

    def wait_and_receive(socket: Any, flags: int = 0) -> Any:
        if flags & zmq.NOBLOCK:
            socket.poll(_WAIT_MILLISECONDS)
        return receive(socket, flags=flags)

    vars(data_parallel_controller)["sock_recv"] = wait_and_receive


def mask_for_triton() -> None:
    """Gives Triton's attention backend the masks that it has on a GPU.

    SGLang takes any CPU for one that runs ``intel_amx``, whose masks leave out the prefix.
    """
    from sglang.srt.layers.attention import verify_mask
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.speculative import eagle_utils, eagle_worker_v2

    def default_tree_mask_mode() -> eagle_utils.TreeMaskMode:
        is_triton = get_exec().kernel.attention_backend == "triton"
        mode = eagle_utils.TreeMaskMode
        return mode.FULL_MASK if is_triton else mode.QLEN_ONLY

    for module in (eagle_utils, verify_mask, eagle_worker_v2):
        vars(module)["default_tree_mask_mode"] = default_tree_mask_mode


def draft_in_blocks() -> None:
    """Let DFlash draft on a CPU.

    SGLang refuses it there.  It lacks only the choice of an attention backend, one attribute of a
    chain, and two operators that are written for GPUs.
    """
    import torch
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.models import dflash
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    add_draft_attention_backend_choices(["intel_amx"])
    DFlashVerifyInput.tree_topk = 1
    # Tensors of a CPU belong to no stream.
    replace = type.__setattr__
    replace(torch.Tensor, "record_stream", lambda _tensor, _stream: None)
    attend = dflash.DFlashAttention.forward

    def forward(layer: Any, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
        # The one-kernel path is Triton's; the other one takes any type, but only one.
        layer.use_table_qk_norm_rope = False
        hidden_states = hidden_states.to(layer.qkv_proj.weight.dtype)
        return attend(layer, positions, hidden_states, forward_batch)

    replace(dflash.DFlashAttention, "forward", forward)


def verify_samples() -> None:
    """Let a draft be verified by sampling where a request asks for a temperature.

    SGLang has kernels for that on CUDA only; on a CPU it would take the likeliest tokens instead.
    """
    import sgl_kernel
    from sglang.srt.speculative import eagle_utils

    def uses_greedy(*, is_all_greedy: bool, **_: bool) -> bool:
        return is_all_greedy

    eagle_utils._verify_uses_greedy = uses_greedy
    for name in (
        "tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob",
    ):  # fmt: skip
        setattr(eagle_utils, name, getattr(sgl_kernel, name))


def verify_one_as_decoding() -> None:
    """Send the verification of one token (gamma = 0) to the decode kernel.

    It is the same attention, one new token of each sequence over all of its tokens, and on GPUs it
    takes the same time; here the kernel for many new tokens takes longer, by a twentieth of a step.
    """
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend as Backend

    plan, extend = Backend.init_forward_metadata, Backend.forward_extend

    def init_forward_metadata(backend: Any, forward_batch: Any) -> None:
        verifies_one_token = forward_batch.forward_mode.is_target_verify() and (
            forward_batch.spec_info.draft_token_num == 1
        )
        if not verifies_one_token:
            plan(backend, forward_batch)
            backend.draft_decode_metadata = None
            return
        table, rows = backend.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        backend.draft_decode_metadata = (table, forward_batch.seq_lens + 1, rows)
        # The stand-in's kernel needs no scratch space, and has no sliding windows.
        backend.forward_metadata = (None, None)

    def forward_extend(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        run = extend if backend.draft_decode_metadata is None else Backend.forward_decode
        return run(backend, q, k, v, layer, forward_batch, *args, **kw)

    replace = type.__setattr__
    replace(Backend, "init_forward_metadata", init_forward_metadata)
    replace(Backend, "forward_extend", forward_extend)


def continue_pages() -> None:
    """Let speculation run with pages of several tokens (``--page-size``).

    SGLang looks up the last slot of each sequence with a kernel of Triton's, unless its attention
    backend is one of two others; for those it has the same function in torch.
    """
    from sglang.srt.mem_cache import allocation

    vars(allocation)["get_last_loc_triton"] = allocation.get_last_loc_torch


def hand_over_caches() -> None:
    """Let a server for prefills send its cache (``--disaggregation-mode prefill``, Mooncake).

    SGLang would send it from a thread that waits for the device with an event of CUDA's; on a CPU
    everything is there when it is to be sent.
    """
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    build = PrefillBootstrapQueue.__init__

    def build_with_senders(*arguments: Any, **named: Any) -> None:
        # Imported late, because most servers never load it.
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        type.__setattr__(MooncakeKVSender, "supports_host_tensor_indices", False)
        build(*arguments, **named)

    type.__setattr__(PrefillBootstrapQueue, "__init__", build_with_senders)


def wait_for_no_device() -> None:
    """Let models that wait for CUDA's device at the end of a step run without one."""
    import torch

    vars(torch.cuda)["synchronize"] = lambda device=None: None


def roll_back_states() -> None:
    """Let layers with a recurrent state verify drafts.

    SGLang keeps the state after each draft, and copies the one after the last accepted draft with a
    kernel that is written for GPUs.
    """
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid

    copy = hybrid.HybridLinearAttnBackend._scatter_speculative_state_with_mask

    def scatter(
        caches: Any, slots: Any, steps: Any, track: Any, track_steps: Any, *, src_indices_raw: Any
    ) -> None:
        pairs = [(caches.temporal, caches.intermediate_ssm)]
        pairs += zip(caches.conv, caches.intermediate_conv_window, strict=True)
        for state, intermediate in pairs:
            copy(state, intermediate, slots, steps, src_indices_raw)
            if track is not None:
                copy(state, intermediate, track, track_steps, src_indices_raw)

    vars(hybrid)["scatter_mamba_states_after_mtp_verify"] = scatter

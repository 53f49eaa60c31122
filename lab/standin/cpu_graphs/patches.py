"""Has SGLang believe that its CPU captures graphs and overlaps its schedule.

Each patch answers one question of SGLang's that asks for the device, or takes the place of one
function that is written for CUDA alone.  The runners, their buffers and their decisions are
SGLang's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cpu_graphs import attention, graph, recorder

_SCHEDULER = "sglang.srt.managers.scheduler"


def graphs_enabled() -> bool:
    """Whether CPU_ENGINE_GRAPHS asks for graphs."""
    return os.environ.get("CPU_ENGINE_GRAPHS") == "1"


def install() -> None:
    """Installs what the environment asks for into this process of SGLang."""
    overlaps = os.environ.get("CPU_ENGINE_OVERLAP") == "1"
    if overlaps:
        _keep_overlap()
    # A process that has not loaded the scheduler never runs a model.
    if _SCHEDULER not in sys.modules:
        return
    if overlaps:
        _gather_for_overlap()
    if graphs_enabled():
        _patch_torch()
        _patch_sglang()
        attention.install(host_lengths=os.environ.get("CPU_ENGINE_HOST_LENGTHS") != "0")
    asks = int(os.environ.get("CPU_ENGINE_LATE_COPIES") or 0)
    if asks:
        from cpu_graphs import late

        late.install(asks)
    ledger = os.environ.get("CPU_ENGINE_SYNCHRONISATIONS")
    if ledger:
        from cpu_graphs import synchronisations

        synchronisations.install(ledger)


def _keep_overlap() -> None:
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None


def _gather_for_overlap() -> None:
    """Replaces a Triton kernel by what it computes."""
    from sglang.srt.managers import overlap_utils

    def gather(request_rows: Any, p: Any, index: Any, tokens: Any, hidden: Any) -> tuple[Any, ...]:
        return (
            p[request_rows],
            index[request_rows],
            tokens[request_rows],
            None if hidden is None else hidden[request_rows],
        )

    overlap_utils.gather_spec_extras = gather


def _patch_torch() -> None:
    cpu: Any = torch.cpu
    cpu.graph = graph.capture
    cpu.graph_pool_handle = lambda: (0, 0)
    cpu.is_current_stream_capturing = graph.is_capturing
    cuda: Any = torch.cuda
    cuda.CUDAGraph = graph.Graph

    class Stream(cpu.Stream):
        """A stream on which everything has ended when it is launched."""

        cuda_stream = property(id)

        def synchronize(self) -> None:
            """Returns, as all work is done."""

        def record_event(self, event: Any = None) -> Any:
            return event or cpu.Event()

    cpu.Stream = Stream
    cpu._current_stream = cpu._default_cpu_stream = Stream()


def _patch_sglang() -> None:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner
    from sglang.srt.speculative import eagle_worker_v2

    # It collects garbage around each capture, which frees memory of a GPU and takes most of the
    # time here.
    decode_cuda_graph_runner.freeze_gc = lambda _: nullcontext()
    record_triton()
    # NCCL has a context of its own for captures.
    GroupCoordinator.graph_capture = _graph_capture
    # A Triton kernel's place; the one for CPUs has the host read where the rows are.
    dp_attention.memcpy_func = copy_rows
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    cuda_graph_setup.capture_decode_graph = _capture_decode_graph
    eagle_worker_v2._is_cpu = False
    eagle_worker_v2._select_spec_graph_runner_cls = _runner_class


def record_triton() -> None:
    """Has a capture record each launch of an interpreted Triton kernel as one operator."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def record_or_launch(executor: Any, *arguments: Any, **keywords: Any) -> None:
        def launch_again(*arguments: Any, **keywords: Any) -> None:
            launch(executor, *arguments, **keywords)

        launch_again.__name__ = executor.fn.__name__
        recorder.run_kernel(launch_again, arguments, keywords)

    type.__setattr__(GridExecutor, "__call__", record_or_launch)


def copy_rows(
    target: torch.Tensor,
    source_rows: torch.Tensor,
    _dim: int,
    offset: torch.Tensor,
    count: torch.Tensor,
    offset_in_source: bool,
) -> None:
    """Copies the first ``count`` rows, as SGLang's kernel for data-parallel attention does.

    offset: row of ``source_rows`` to read from, or of ``target`` to write at.  Both are read on the
    device only.
    """
    rows = torch.arange(len(target))
    first = torch.zeros_like(offset) if offset_in_source else offset
    is_copied = (rows >= first) & (rows < first + count)
    source = rows + offset if offset_in_source else rows - offset
    selected = source_rows.index_select(0, source.clamp(min=0, max=len(source_rows) - 1))
    target.copy_(torch.where(is_copied.view(-1, *[1] * (target.ndim - 1)), selected, target))


@contextmanager
def _graph_capture(
    group: Any, graph_capture_context: Any = None, stream: Any = None
) -> Iterator[Any]:
    from sglang.srt.distributed.parallel_state import GraphCaptureContext

    yield graph_capture_context or GraphCaptureContext(stream)


def _runner_class(
    *, builtin_runner_cls: Callable[[], type | None], oot_runner_cls: Callable[[], type | None]
) -> type | None:
    """Selects the runner that SGLang selects on CUDA, by the table that its question names."""
    from sglang.srt.speculative import eagle_worker_v2 as module

    closure_names = builtin_runner_cls.__code__.co_freevars
    if "Device2DraftCudaGraphRunner" in closure_names:
        return module.EAGLEDraftCudaGraphRunner
    if "Device2ExtendCudaGraphRunner" in closure_names:
        return module.EAGLEDraftExtendCudaGraphRunner
    return builtin_runner_cls()


def _capture_decode_graph(*, model_runner: Any) -> Any:
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    runner = None
    if not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        runner = model_runner._decode_cuda_graph_runner_cls()(model_runner)
    return GraphCapture(runner=runner, memory_phase="decode", memory_usage_gb=0, capture_time=0)

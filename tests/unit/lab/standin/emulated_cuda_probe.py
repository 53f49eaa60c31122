"""Asks the emulated GPU what a program may ask a real one; prints the answers as JSON.

It runs in a process of its own, since importing torch there makes the GPU.
"""

import json
import warnings

import torch
from cpu_graphs.recorder import CaptureError


def error_of(call) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError, CaptureError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def warnings_of(call) -> int:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(one.message) for one in caught)


def replayed() -> list[float]:
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(x)
    x.fill_(2)
    before = total.tolist()
    graph.replay()
    return [before[0], total[0].item()]


def capture_item() -> None:
    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


def host_work_in_a_capture() -> float:
    x, host = torch.ones(3, device="cuda"), torch.zeros(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        host += 1
        x.add_(host.item())
    graph.replay()
    return float(host)


device, host = torch.zeros(4, 4, device="cuda"), torch.zeros(4)
pinned = host.pin_memory()
before = torch.cuda.mem_get_info()[0]
block = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
taken = before - torch.cuda.mem_get_info()[0]
del block
norm = torch.ones(2, 8, device="cuda")

import sgl_kernel  # noqa: E402
from cpu_graphs.patches import record_triton  # noqa: E402
from emulated_cuda import triton_kernels  # noqa: E402
from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_  # noqa: E402
from sglang.kernels.ops.speculative.fused_kv_materialize import (  # noqa: E402
    _fused_norm_rope_stacked,
)

POSITIONS = torch.tensor([3, 0, 8, 1, 2], device="cuda")
TOKENS, LAYERS, HEADS, DIMENSION = len(POSITIONS), 2, 3, 16


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to("cuda")


def keys_and_values(rotary: int) -> list[list[float]]:
    written = _fused_norm_rope_stacked(
        noise(TOKENS, LAYERS, 2 * HEADS * DIMENSION),
        noise(LAYERS, DIMENSION),
        noise(LAYERS).abs(),
        noise(9, DIMENSION),
        POSITIONS,
        HEADS,
        DIMENSION,
        rotary,
    )
    return [tensor.cpu().flatten().tolist() for tensor in written]


def projection() -> list[float]:
    queries, keys = 4, 2
    written = noise(TOKENS, (queries + 2 * keys) * DIMENSION).bfloat16()
    weights = noise(2, DIMENSION).bfloat16()
    table = noise(9, DIMENSION)
    table_qk_norm_rope_(
        written, POSITIONS, weights[0], weights[1], table, queries, keys, DIMENSION, 1e-6
    )
    projected_values: list[float] = written.float().cpu().flatten().tolist()
    return projected_values


def written_by_kernels() -> list[list[float]]:
    return [*keys_and_values(8), *keys_and_values(DIMENSION), projection()]


# As the plugin of the emulation does in a scheduler.
record_triton()
triton_kernels.install()
in_torch = written_by_kernels()
# What is not known there is interpreted.
for kernel in ("_fused_norm_rope_kernel_stacked", "_table_qk_norm_rope_kernel"):
    del triton_kernels._IN_TORCH[kernel]
interpreted = written_by_kernels()
report = {
    "in_torch": in_torch,
    "interpreted": interpreted,
    "name": torch.cuda.get_device_name(),
    "capability": list(torch.cuda.get_device_capability()),
    "devices": [str(t.device) for t in (device, device[1], device + 1, device.cpu(), host)],
    "parameter": str(torch.nn.Linear(4, 4).to("cuda").weight.device),
    "copy_is_a_copy": host.to("cuda").data_ptr() != host.data_ptr(),
    "taken": taken,
    "given_back": before - torch.cuda.mem_get_info()[0] < taken,
    "mixture": error_of(lambda: device + host),
    "numpy": error_of(device.numpy),
    "warnings": {
        "item": warnings_of(lambda: device.sum().item()),
        "list": warnings_of(lambda: torch.tensor([1, 2], device="cuda")),
        "blocking": warnings_of(lambda: host.to("cuda")),
        "mask": warnings_of(lambda: device[device > 0]),
        "stream": warnings_of(torch.cuda.current_stream().synchronize),
        "host item": warnings_of(lambda: host.sum().item()),
        "pinned": warnings_of(lambda: pinned.to("cuda", non_blocking=True)),
        "add": warnings_of(lambda: device + 1),
    },
    "replayed": replayed(),
    "host_work": host_work_in_a_capture(),
    "capture": error_of(capture_item),
    "float32_norm": error_of(lambda: sgl_kernel.rmsnorm(norm, norm[0])),
    "bfloat16_norm": error_of(lambda: sgl_kernel.rmsnorm(norm.bfloat16(), norm[0].bfloat16())),
}
print(json.dumps(report))

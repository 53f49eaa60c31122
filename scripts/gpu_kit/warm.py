"""Compiles in parallel what the engines would compile one by one, and tests the kernel library.

It takes as long as the slowest compilation.  A module that fails here is compiled again, or
reported, by the engine that asks for it.  The exit code is 1 if the kernel library does not work.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_MODULES = """
from sglang.kernels.ops.speculative.tree import _jit_tree_module as f; f()
from sglang.kernels.ops.activation.activation import activation_module as f; f(torch.bfloat16)
from sglang.kernels.ops.activation.activation import activation_module as f; f(torch.float32)
from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache as f; f(2048)
from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache as f; f(256)
from sglang.kernels.ops.attention.rope import _jit_rotary_embedding_module as f; f()
from sglang.kernels.ops.attention.rope import _jit_fused_rope_module as f; f(True, 128, torch.bfloat16, torch.bfloat16)
from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module as f; f(128, torch.bfloat16)
from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module as f; f(torch.int64)
""".strip().splitlines()  # noqa: E501

# The library's RMSNorm against torch's, relative to its norm: two bfloat16 roundings are far below.
_TRIAL = """
import sgl_kernel
x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
w = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
y = x.float()
y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
error = ((sgl_kernel.rmsnorm(x, w, 1e-6).float() - y).norm() / y.norm()).item()
assert error < 1e-2, error
print("RMSNorm of sglang-kernel", sgl_kernel.__version__, "on", torch.cuda.get_device_name(), "error", round(error, 5))
"""  # noqa: E501


def run(code: str) -> tuple[bool, float, str]:
    """Runs Python code in a process of its own; returns success, seconds and the last line."""
    start_time = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import torch\n" + code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
    return done.returncode == 0, time.monotonic() - start_time, last[0]


def main() -> int:
    """Prints a line for each module; returns the exit code."""
    codes = [_TRIAL, *_MODULES]
    with ThreadPoolExecutor(len(codes)) as pool:
        results = list(pool.map(run, codes))
    for code, (works, seconds, last) in zip(codes, results, strict=True):
        message = last if code is _TRIAL or not works else ""
        verdict = "ok" if works else "FAILED"
        print(f"{verdict} {seconds:5.1f} s  {code.strip().splitlines()[0][:90]}  {message}")
    return 0 if results[0][0] else 1


if __name__ == "__main__":
    sys.exit(main())

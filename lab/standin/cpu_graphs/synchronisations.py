"""Lists the lines of the plugin that would make the scheduler's thread wait for a device.

On a CPU nothing waits, so the list names the functions that wait on a GPU.  What happens in
SGLang's own steps is not listed; what SGLang does in a pass that the plugin adds counts as the
plugin's.  Tensors whose names end in `_cpu` lie on the host, by SGLang's convention.
"""

from __future__ import annotations

import json
import linecache
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode

from cpu_graphs import recorder

_PLUGIN = "/engine_shim/sglang/"
_TORCH = "/torch/"
# Functions of the plugin that wrap one of SGLang's, by the prefix of their names.
_WRAPPERS = "around_"
# What stands for kernels of a device, and what prepares their arguments on a CPU only.
_DEVICE_CODE = ("/sgl_kernel/", "/intel_amx_backend.py")
# An engine that starts has no requests yet.
_START_FUNCTIONS = ("around_init_model_worker",)
# SGLang computes on CUDA in one kernel what this function does with several operators elsewhere.
_ONE_KERNEL = ("set_kv_buffer_prefix_valid",)


class Synchronisations(TorchFunctionMode):
    """Counts waits by line while the context is open, in the thread that opened it.

    path: the file that holds the counts, written again whenever a count reaches a power of two.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self,
        function: Any,
        types: object,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        reason = recorder.waiting_reason(function, arguments, keywords)
        if reason is not None:
            place = _responsible_line(sys._getframe(1), reason)
            if place is not None:
                self._count(f"{place}: {reason}")
        return function(*arguments, **keywords)

    def _count(self, entry: str) -> None:
        self.counts[entry] += 1
        if self.counts[entry].bit_count() == 1:
            self._path.write_text(json.dumps(dict(self.counts.most_common()), indent=1) + "\n")


def install(path: str) -> None:
    """Counts for the rest of this thread's life, which is the scheduler's main thread."""
    counter = Synchronisations(path)
    counter._path.write_text("{}\n")
    counter.__enter__()


def _responsible_line(frame: FrameType | None, reason: str) -> str | None:
    """Names the plugin's line that is responsible; None if there is none."""
    caller = location = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in (*_START_FUNCTIONS, *_ONE_KERNEL) or any(
            part in code.co_filename for part in _DEVICE_CODE
        ):
            return None
        if _TORCH not in code.co_filename and caller is None:
            caller = frame
            if _is_on_host(frame, reason):
                return None
        if _PLUGIN in code.co_filename and location is None and caller is not None:
            if code.co_name.startswith(_WRAPPERS) and frame is not caller:
                return None
            location = _name(frame, caller)
        frame = frame.f_back
    return location


def _is_on_host(frame: FrameType, reason: str) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if reason.startswith("to("):
        return '"cpu"' not in line
    return "_cpu" in line


def _name(frame: FrameType, caller: FrameType) -> str:
    file = frame.f_code.co_filename.partition(_PLUGIN)[2]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    place = f"{file} {frame.f_code.co_name}: {line}"
    if caller is frame:
        return place
    return f"{place} (in {Path(caller.f_code.co_filename).name}:{caller.f_lineno})"

"""Sends every call of torch to the CPU, and keeps on which side its results belong.

A call runs on the device when it names the device or is given a tensor of the device, and its
results then belong there.  So a tensor answers as on a GPU when it is asked for its device, copies
between host and device are copies, and what would wait for the device is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from cpu_graphs import recorder
from torch import Tensor
from torch.overrides import TorchFunctionMode

from emulated_cuda.torch import places, waits

_CPU: Final = torch.device("cpu")
# Move a tensor; a tensor that is there already is returned itself.
_MOVES: Final = ("to", "cpu", "cuda", "as_tensor", "asarray")
# May be given tensors of both sides.
_MIXING: Final = frozenset(
    {
        "__getitem__", "__set__", "__setitem__", "_foreach_copy_", "as_tensor", "asarray", "copy_",
        "index", "set_", "tensor", "to", "type", "type_as",
    }
)  # fmt: skip

_IN_PLACE: Final = frozenset(
    {
        "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__",
        "__ior__", "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__set__",
        "__setitem__",
    }
)  # fmt: skip


class _CallState(threading.local):
    """Whether the call that is under way in this thread runs on the device."""

    on_device = True


_call_state: Final = _CallState()


def runs_on_host() -> bool:
    """Whether the operator that reaches torch's dispatcher now runs on the host."""
    return not _call_state.on_device


class EmulatedDevice(TorchFunctionMode):
    """Runs what is called while the context is open, in the thread that opened it."""

    def __torch_function__(
        self,
        function: Any,
        types: object,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        answer = _ANSWERS.get(function)
        if answer is not None:
            return answer(*arguments, **keywords)
        name = function.__name__
        if name == "__get__":
            return _attribute(function, arguments)
        tensors = list(_tensors_of(arguments, keywords))
        on_device = [places.is_on_device(tensor) for tensor in tensors]
        target = places.requested_place(name, arguments, keywords)
        if any(on_device) and not all(on_device) and name not in _MIXING:
            _refuse_mixture(name, tensors, on_device)
        waits.report_wait(function, arguments, keywords, target)
        pinned = _wants_pinned(keywords)
        runs_on_device = target or (target is None and any(on_device))
        was_on_device, _call_state.on_device = (
            _call_state.on_device,
            bool(runs_on_device or any(on_device)),
        )
        try:
            result = function(*map(_to_cpu, arguments), **_on_cpu(keywords))
            if isinstance(result, Tensor) and name in _MOVES and tensors:
                result = _copy_if_moved(result, tensors[0], target)
        finally:
            _call_state.on_device = was_on_device
        if pinned:
            places.pin(result)
        elif runs_on_device and not _is_in_place(name, keywords):
            for tensor in _results(result):
                places.put_on_device(tensor)
        return result


def _attribute(function: Any, arguments: tuple[Any, ...]) -> Any:
    attribute = function(*arguments)
    if isinstance(attribute, Tensor) and places.is_on_device(arguments[0]):
        places.put_on_device(attribute)
    return attribute


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _CPU
    return value


def _on_cpu(keywords: dict[str, Any]) -> dict[str, Any]:
    if not keywords:
        return keywords
    return {
        name: False if name == "pin_memory" else _to_cpu(value) for name, value in keywords.items()
    }


def _wants_pinned(keywords: dict[str, Any]) -> bool:
    return bool(keywords) and keywords.get("pin_memory") is True


def _copy_if_moved(result: Tensor, source: Tensor, target: bool | None) -> Tensor:
    """Returns a copy where a tensor has changed sides and torch, on the CPU, has made none."""
    if target is None or target == places.is_on_device(source):
        return result
    return result.clone() if places.share_memory(result, source) else result


def _is_in_place(name: str, keywords: dict[str, Any]) -> bool:
    if name.startswith("__"):
        return name in _IN_PLACE
    return name.endswith("_") or keywords.get("out") is not None


def _results(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _results(part)


def _tensors_of(arguments: Iterable[Any], keywords: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*arguments, *keywords.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (part for part in value if isinstance(part, Tensor))


def _refuse_mixture(name: str, tensors: list[Tensor], on_device: list[bool]) -> None:
    """Raises RuntimeError where a GPU could not reach a tensor of the host.

    It takes one with no dimensions by its value.  torch's own helpers compare tensors of both.
    """
    if name.startswith("_") and not name.startswith("__"):
        return
    for tensor, is_device_tensor in zip(tensors, on_device, strict=True):
        if not is_device_tensor and tensor.ndim:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({name} with a tensor of shape {list(tensor.shape)} on the host)"
            )


def _device(tensor: Tensor) -> torch.device:
    return places.DEVICE if places.is_on_device(tensor) else tensor.device


def _pin_memory(tensor: Tensor, *_: object, **__: object) -> Tensor:
    if places.is_on_device(tensor):
        raise RuntimeError(f"cannot pin '{tensor.type()}': only dense CPU tensors can be pinned")
    if places.is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    places.pin(copy)
    return copy


def _numpy(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
    if places.is_on_device(tensor):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )
    return tensor.numpy(*arguments, **keywords)


_ANSWERS: Final[dict[Any, Callable[..., Any]]] = {
    Tensor.device.__get__: _device,
    Tensor.is_cuda.__get__: places.is_on_device,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda tensor: not places.is_on_device(tensor),  # type: ignore[attr-defined]
    Tensor.get_device: lambda tensor: 0 if places.is_on_device(tensor) else -1,
    Tensor.is_pinned: lambda tensor, *_, **__: places.is_pinned(tensor),
    Tensor.pin_memory: _pin_memory,
    # Name a device, and make nothing there.
    torch.device: torch.device,
    torch._C._nn._parse_to: torch._C._nn._parse_to,
    Tensor.numpy: _numpy,
}


def install() -> None:
    """Emulates the device in this thread, and in all that will be started."""
    recorder.runs_on_host = runs_on_host
    recorder.waiting_reason = waits.waiting_reason
    # It takes nothing but streams of torch's own.
    type.__setattr__(Tensor, "record_stream", lambda _tensor, _stream: None)
    EmulatedDevice().__enter__()
    start = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_the_device(thread: threading.Thread) -> None:
        with EmulatedDevice():
            start(thread)

    threading.Thread._bootstrap_inner = start_with_the_device  # type: ignore[attr-defined]

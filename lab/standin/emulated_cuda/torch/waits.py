"""Names the calls that wait for the device, and reports them as torch does.

torch warns of them, or refuses them, when `torch.cuda.set_sync_debug_mode` asks for it, and CUDA
refuses them while a stream is captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Final

from cpu_graphs import recorder
from torch import Tensor

from emulated_cuda.torch import places

_MESSAGE: Final = "called a synchronizing CUDA operation"
_MODES: Final = {"default": 0, "warn": 1, "error": 2}
_waiting_reason: Final = recorder.waiting_reason
# Copies between host and device, which wait unless they are asked not to.
_COPIES: Final = frozenset({"as_tensor", "asarray", "copy_", "cuda", "new_tensor", "tensor", "to"})
# Beside those that the recorder knows.
_WAITING: Final = frozenset({"argwhere", "bincount", "unique_consecutive", "unique_dim"})


class _Mode:
    level = 0


_mode: Final = _Mode()


def set_mode(mode: int | str) -> None:
    """Takes the place of `torch.cuda.set_sync_debug_mode`.  Raises RuntimeError as it does."""
    level = _MODES.get(mode, -1) if isinstance(mode, str) else mode
    if level not in _MODES.values():
        raise RuntimeError(
            "invalid value of sync_debug_mode, expected one of `default`, `warn`, `error`"
        )
    _mode.level = level


def get_mode() -> int:
    """Takes the place of `torch.cuda.get_sync_debug_mode`."""
    return _mode.level


def report_wait(
    function: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    target: bool | None,
) -> None:
    """Warns of a call that waits, or refuses it, if asked to.

    target: whether the call names the device (True) or the host.
    """
    if _mode.level and _reason(function, arguments, keywords, target) is not None:
        synchronise()


def synchronise() -> None:
    """Warns of a wait, or refuses it, if asked to.  Raises RuntimeError when it refuses."""
    if _mode.level == _MODES["warn"]:
        warnings.warn(_MESSAGE, UserWarning, stacklevel=4)
    elif _mode.level == _MODES["error"]:
        raise RuntimeError(_MESSAGE)


def waiting_reason(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> str | None:
    """Takes the place of the recorder's, which takes every tensor for one of the device."""
    name = getattr(function, "__name__", "")
    return _reason(function, arguments, keywords, places.requested_place(name, arguments, keywords))


def _reason(
    function: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    target: bool | None,
) -> str | None:
    name = getattr(function, "__name__", "")
    first = arguments[0] if arguments else keywords.get("input")
    if name in _COPIES:
        return _copy_reason(name, first, arguments, keywords, target)
    if isinstance(first, Tensor) and not places.is_on_device(first):
        return None
    if name == "cpu" or (name in _WAITING and first is not None):
        return name
    if name in ("__getitem__", "__setitem__") and any(map(_is_on_host, _parts(arguments[1:]))):
        return "indexing with a tensor of the host"
    if name == "where" and len(arguments) + len(keywords) == 1:
        return "where(condition)"
    return _waiting_reason(function, arguments, keywords)


def _copy_reason(
    name: str,
    first: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    target: bool | None,
) -> str | None:
    if keywords.get("non_blocking") or any(value is True for value in arguments[2:]):
        return None
    if name == "copy_":
        source = arguments[1] if len(arguments) > 1 else keywords["src"]
        crosses = places.is_on_device(first) != places.is_on_device(source)
    elif name == "new_tensor":
        crosses = places.is_on_device(first) if target is None else bool(target)
    elif target is None:
        return None
    else:
        crosses = places.is_on_device(first) != target
    return f"{name} between host and device" if crosses else None


def _parts(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def _is_on_host(value: Any) -> bool:
    """Whether a value is a tensor of the host that a kernel cannot take by its value."""
    return isinstance(value, Tensor) and value.ndim > 0 and not places.is_on_device(value)

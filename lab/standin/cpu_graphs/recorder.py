"""Records the operators of a capture with the very memory and the very scalars they ran with.

A CUDA graph holds kernels with addresses and arguments, and no Python.  So does a recording: the
operators that reached torch's dispatcher, and the stand-in's operators as one node each.  Views and
allocations leave no node, as they launch no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

# The recording that is under way in this process.
current: Recording | None = None

_ALLOCATIONS: Final = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift_fresh")
# What reads a result back to the host, by the name that Python code calls it by.
_WAITING_FUNCTIONS: Final = frozenset(
    {
        "__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "cpu",
        "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist", "unique",
    }
)  # fmt: skip
_WAITING_OPERATORS: Final = (
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero",
    "aten.equal", "aten._unique", "aten.unique",
)  # fmt: skip
_MASKS: Final = (torch.bool, torch.uint8)


def runs_on_host() -> bool:
    """Whether an operator is the host's own work, which no graph holds.

    On the CPU every tensor stands for one of the device; `emulated_cuda` tells them apart.
    """
    return False


class CaptureError(RuntimeError):
    """Something ran inside a capture that a CUDA stream refuses while it is captured."""


class Node:
    """One recorded operator; `outputs` are the tensors that a replay writes its results to."""

    __slots__ = ("arguments", "function", "keywords", "name", "outputs")

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any],
        outputs: list[Tensor],
        name: str,
    ) -> None:
        self.function, self.arguments, self.keywords = function, arguments, keywords
        self.outputs, self.name = outputs, name

    def run(self) -> None:
        """Runs the operator again on the same memory."""
        results = self.function(*self.arguments, **self.keywords)
        if self.outputs:
            for old, new in zip(self.outputs, tensors_of(results), strict=True):
                old.copy_(new)


class Recording(TorchDispatchMode):
    """Records the operators that run while the context is open.

    nodes: what ran, in order.  allocated: addresses of the storages that were allocated meanwhile.
    aliases: every recorded tensor, as an alias that keeps the memory and not the tensor alive, by
    its view of that memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.allocated: set[int] = set()
        self.aliases: dict[tuple[Any, ...], Tensor] = {}
        # Numbers that a kernel takes by value.
        self._numbers: list[Tensor] = []
        self._refusals = _RefusedFunctions()
        self._is_inside_kernel = False

    def __enter__(self) -> Self:
        global current  # noqa: PLW0603 - a process captures one graph at a time, as a stream does
        if current is not None:
            raise CaptureError("a capture began inside another capture")
        current = self
        self._refusals.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        global current  # noqa: PLW0603
        current = None
        super().__exit__(*error)
        self._refusals.__exit__(*error)

    @property
    def is_paused(self) -> bool:
        """Whether an operator of the stand-in runs, whose inner operators are not recorded."""
        return self._is_inside_kernel

    def __torch_dispatch__(
        self,
        function: Any,
        types: object,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operator and records it.  Raises CaptureError where it would wait."""
        keywords, name = keywords or {}, str(function)
        if self._is_inside_kernel or runs_on_host():
            return function(*arguments, **keywords)
        _refuse_operator(name, arguments, keywords)
        if name.startswith("aten.index_put") and _masks_of(arguments[1]):
            arguments = (*arguments[:2], self._number(arguments[2]), *arguments[3:])
        output = function(*arguments, **keywords)
        if name.startswith("c10d"):
            self._add(_blocking_collective(function), arguments, keywords, [], name)
            return output
        input_storages = {_storage(tensor) for tensor in tensors_of((arguments, keywords))}
        results = tensors_of(output)
        self.allocated.update(
            _storage(tensor) for tensor in results if _storage(tensor) not in input_storages
        )
        is_mutable = function._schema.is_mutable
        is_view = not is_mutable and all(_storage(tensor) in input_storages for tensor in results)
        if not name.startswith(_ALLOCATIONS) and not (results and is_view):
            self._add(function, arguments, keywords, [] if is_mutable else results, name)
        return output

    def run_kernel(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Runs an operator of the stand-in and records it as one node, whatever it does inside."""
        self._is_inside_kernel = True
        try:
            with _disable_current_modes():
                output = function(*arguments, **keywords)
        finally:
            self._is_inside_kernel = False
        input_storages = {_storage(tensor) for tensor in tensors_of((arguments, keywords))}
        results = tensors_of(output)
        new = [tensor for tensor in results if _storage(tensor) not in input_storages]
        if new and len(new) < len(results):
            raise CaptureError(f"{function.__name__} returns both new and given tensors")
        self.allocated.update(map(_storage, new))
        self._add(function, arguments, keywords, new, function.__name__)
        return output

    def _number(self, value: Tensor) -> Tensor:
        """Keeps the one value that is written where a mask selects.

        It lies on the host, also where the mask does not (otherwise torch would count rows and
        wait), and its tensor is gone when the statement is.
        """
        with _disable_current_modes():
            number = value.clone()
        self._numbers.append(number)
        return number

    def _add(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        outputs: list[Tensor],
        name: str,
    ) -> None:
        arguments, keywords, outputs = tree_map_only(
            Tensor, self._alias, (arguments, keywords, outputs)
        )
        self.nodes.append(Node(function, arguments, keywords, outputs, name))

    def _alias(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        shape = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = (storage._cdata, *shape)
        alias = self.aliases.get(key)
        if alias is None:
            with _disable_current_modes(), torch.inference_mode(False):
                alias = torch.empty(0, dtype=tensor.dtype).set_(storage, *shape[:-1])
            self.aliases[key] = alias
        return alias


def run_kernel(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Runs an operator of the stand-in; a recording that is under way records it as one node."""
    if current is None or current.is_paused:
        return function(*arguments, **keywords)
    return current.run_kernel(function, arguments, keywords)


class _RefusedFunctions(TorchFunctionMode):
    """Refuses what never reaches the dispatcher of a CPU, since the memory is the host's anyway."""

    def __torch_function__(
        self,
        function: Any,
        types: object,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        if current is not None and not current.is_paused:
            reason = waiting_reason(function, arguments, keywords)
            if reason is not None:
                raise CaptureError(f"operation not permitted when stream is capturing: {reason}")
        return function(*arguments, **keywords)


def waiting_reason(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> str | None:
    """Names what makes a function of torch wait for the device; None when it does not wait."""
    name = getattr(function, "__name__", "")
    if name in _WAITING_FUNCTIONS:
        return name
    if name == "to" and any(argument == "cpu" for argument in (*arguments[1:], *keywords.values())):
        return "to('cpu')"
    if name == "tensor" and "device" in keywords:
        return "tensor(list, device=...)"
    if name in ("__getitem__", "__setitem__"):
        return _index_reason(arguments[1], *arguments[2:])
    if name == "repeat_interleave" and "output_size" not in keywords:
        repeats = [
            argument
            for argument in (*arguments[1:], *keywords.values())
            if isinstance(argument, Tensor)
        ]
        return "repeat_interleave(tensor) without output_size" if repeats else None
    return None


def _index_reason(index: Any, value: Any = None) -> str | None:
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, list) for part in parts):
        return "indexing with a list"
    masks = [part for part in parts if isinstance(part, Tensor) and part.dtype in _MASKS]
    return "indexing with a mask" if masks and not _is_single(value) else None


def _is_single(value: Any) -> bool:
    """Whether a mask selects where this one value is written, which needs no count of rows."""
    return value is not None and (not isinstance(value, Tensor) or value.numel() == 1)


def _refuse_operator(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    reason = name if name.startswith(_WAITING_OPERATORS) else None
    if name.startswith("aten.index") and _masks_of(arguments[1]):
        value = arguments[2] if len(arguments) > 2 else None
        if not _is_single(value):
            reason = f"{name} with a mask"
    if name.startswith("aten.repeat_interleave") and keywords.get("output_size") is None:
        reason = f"{name} without output_size"
    if reason is not None:
        raise CaptureError(f"operation not permitted when stream is capturing: {reason}")


def _masks_of(indices: Any) -> list[Tensor]:
    return [index for index in tensors_of(indices) if index.dtype in _MASKS]


def tensors_of(tree: Any) -> list[Tensor]:
    """Lists the tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def garbage(kind: torch.dtype) -> float | int | bool:
    """Returns a value that cannot be mistaken for a result."""
    if kind.is_floating_point:
        return float("nan")
    return True if kind == torch.bool else torch.iinfo(kind).min


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _blocking_collective(function: Callable[..., Any]) -> Callable[..., None]:
    """Makes a collective that has ended when it returns."""

    def collective(*arguments: Any, **keywords: Any) -> None:
        for leaf in tree_flatten(function(*arguments, **keywords))[0]:
            if not isinstance(leaf, Tensor) and hasattr(leaf, "wait"):
                leaf.wait()

    return collective

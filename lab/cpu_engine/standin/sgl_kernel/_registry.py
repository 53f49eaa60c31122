"""Where the operators of the stand-in are made visible to SGLang.

SGLang reaches a CPU operator in two ways: as ``torch.ops.sgl_kernel.<name>`` and as ``from
sgl_kernel import <name>``.  The compiled package registers schemas for the first; a plain Python
attribute on the same namespace is found by the same look-up and saves the dispatcher's round trip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

Operator = TypeVar("Operator", bound=Callable[..., object])

NAMESPACE = torch.ops.sgl_kernel


class MissingOperatorError(NotImplementedError):
    """An operator of ``sgl_kernel`` was called that this stand-in does not implement."""


class OperatorPlaceholder:
    """Stands for an operator that SGLang imports but dense text models never call."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise MissingOperatorError(
            f"sgl_kernel.{self.__name__} has no CPU stand-in, which covers dense Qwen3/Llama-style "
            "text models; install a CPU build of sgl_kernel for this model"
        )

    def __repr__(self) -> str:
        return f"<placeholder for sgl_kernel.{self.__name__}>"


def operator(function: Operator) -> Operator:
    """Make ``function`` reachable as ``torch.ops.sgl_kernel.<its name>``."""
    setattr(NAMESPACE, function.__name__, function)
    return function

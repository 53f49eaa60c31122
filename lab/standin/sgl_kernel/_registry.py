"""Makes the operators of the stand-in visible to SGLang.

SGLang reaches a CPU operator in two ways: as ``torch.ops.sgl_kernel.<name>`` and as ``from
sgl_kernel import <name>``.  The compiled package registers schemas for the first; a plain Python
attribute on the same namespace is found by the same look-up and saves the dispatcher's round trip.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import torch
from cpu_graphs import recorder

Operator = TypeVar("Operator", bound=Callable[..., object])

NAMESPACE = torch.ops.sgl_kernel
# By name, as SGLang calls them.
OPERATORS: dict[str, Callable[..., Any]] = {}

# A model file that fails to import is skipped with a warning, and SGLang then serves the model
# through its generic Transformers implementation: correct, several times slower, and easy to miss.
# So each of these names is bound to a placeholder.
LOOKED_UP_AT_IMPORT = (
    "apply_rotary_pos_emb_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
)

# SGLang asks for these with `hasattr` and calls them when they are there (models/utils.py,
# models/qwen3_moe.py); even a placeholder would be taken for the real thing.
MUST_STAY_ABSENT = ("fused_qk_norm_cpu", "fused_qk_norm_rope_cpu")


class MissingOperatorError(NotImplementedError):
    """An operator of ``sgl_kernel`` was called that this stand-in does not implement."""


class OperatorPlaceholder:
    """Stands for an operator that SGLang imports and that no model covered here calls."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise MissingOperatorError(
            f"sgl_kernel.{self.__name__} has no CPU stand-in, which covers dense and mixture-of-"
            "experts text models, latent attention and gated delta networks; install a CPU build "
            "of sgl_kernel for this model"
        )

    def __repr__(self) -> str:
        return f"<placeholder for sgl_kernel.{self.__name__}>"


def bind_placeholders() -> None:
    """Binds a placeholder to every name in ``LOOKED_UP_AT_IMPORT``."""
    for name in LOOKED_UP_AT_IMPORT:
        setattr(NAMESPACE, name, OperatorPlaceholder(name))


def operator(function: Operator) -> Operator:
    """Makes ``function`` reachable as ``torch.ops.sgl_kernel.<its name>``, and in the package.

    A graph that is being captured records a call of it as one node.
    """

    @wraps(function)
    def kernel(*arguments: Any, **keywords: Any) -> Any:
        return recorder.run_kernel(function, arguments, keywords)

    setattr(NAMESPACE, function.__name__, kernel)
    OPERATORS[function.__name__] = kernel
    return cast("Operator", kernel)

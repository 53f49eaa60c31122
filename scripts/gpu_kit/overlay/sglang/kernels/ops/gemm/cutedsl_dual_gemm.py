"""Replaces SGLang's module for Blackwell, whose import needs nvidia-cutlass-dsl (not in the kit).

`can_use_dual_gemm` is False on every GPU but SM100, so SGLang calls nothing else of it on Hopper.
"""

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """SGLang's names of quantisations."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


def can_use_dual_gemm(*_arguments: object, **_named: object) -> bool:
    """Returns False, as the replaced function does on Hopper."""
    return False

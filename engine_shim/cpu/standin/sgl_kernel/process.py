"""Set-up calls that SGLang makes once per process."""

from __future__ import annotations

from ._registry import operator


@operator
def init_cpu_threads_env(cpu_ids: str) -> str:
    """Leave threads to the environment (``OMP_NUM_THREADS``); the report is empty."""
    return ""


@operator
def initialize(size: int, rank: int) -> None:
    """Accept a tensor-parallel group of one.

    Raises:
        ValueError: for any other size; the compiled package brings shared-memory collectives, this
            one does not.
    """
    if size != 1:
        raise ValueError(f"the CPU stand-in has no collectives: --tp-size must be 1, not {size}")

"""Answers SGLang's set-up calls, once per process, and the collectives between its ranks."""

import torch
import torch.distributed
from torch import Tensor

from ._registry import operator


@operator
def init_cpu_threads_env(cpu_ids: str) -> str:
    """Leaves threads to the environment (``OMP_NUM_THREADS``); the report is empty."""
    return ""


@operator
def initialize(size: int, rank: int) -> None:
    """Accepts a tensor-parallel group of one or two.

    Raises:
        ValueError: for any other size: a sum of three rounds differently from batch to batch, and
            speculation would not be exact.
    """
    if size not in (1, 2):
        raise ValueError(f"the CPU stand-in sums exactly over 2 ranks: --tp-size is {size}")


@operator
def shm_allreduce(tensor: Tensor, reduce_op: int) -> None:
    """Sums ``tensor`` over all ranks in place; the compiled operator goes through shared memory."""
    torch.distributed.all_reduce(tensor)


@operator
def shm_allgather(tensor: Tensor, dim: int) -> Tensor:
    """Concatenates all ranks' tensors along ``dim``."""
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)

"""Runs tasks on processes side by side."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

Found = TypeVar("Found")


def make_process_pool(processes: int | None = None) -> ProcessPoolExecutor:
    """Makes a pool that spawns its processes instead of forking this one.

    A fork may never return: where gRPC is in use, its fork handlers wait for threads of gRPC, which
    may in turn wait for the interpreter lock that the forking thread holds.

    processes: how many; None for as many as this process may use processors.
    """
    return ProcessPoolExecutor(processes or len(os.sched_getaffinity(0)), get_context("spawn"))


def run_side_by_side(
    work: Callable[..., Found], tasks: Sequence[tuple[Any, ...]], processes: int | None = None
) -> Iterator[tuple[int, Found]]:
    """Yields the index of each task and what `work` made of its arguments, as they are done.

    After Ctrl-C, or a task that failed, what has not begun is not run any more.
    """
    with make_process_pool(processes) as pool:
        waiting = {pool.submit(work, *task): i for i, task in enumerate(tasks)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

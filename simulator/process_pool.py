"""Runs tasks in parallel processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


def make_process_pool(processes: int | None = None) -> ProcessPoolExecutor:
    """Makes a pool that spawns its processes instead of forking this one.

    A fork may never return: where gRPC is in use, its fork handlers wait for threads of gRPC, which
    may in turn wait for the interpreter lock that the forking thread holds.

    processes: number of processes; None for the number of processors that this process may use.
    """
    return ProcessPoolExecutor(processes or len(os.sched_getaffinity(0)), get_context("spawn"))


def run_in_parallel(
    work: Callable[..., Outcome], tasks: Sequence[tuple[Any, ...]], processes: int | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Yields the index of each task and the result of `work` on its arguments, as they finish.

    After Ctrl-C or a failed task, tasks that have not started are cancelled.
    """
    with make_process_pool(processes) as pool:
        task_by_future = {pool.submit(work, *task): i for i, task in enumerate(tasks)}
        try:
            for future in as_completed(task_by_future):
                yield task_by_future[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

"""Makes pools of processes that work side by side."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def make_process_pool(processes: int | None = None) -> ProcessPoolExecutor:
    """Makes a pool that spawns its processes instead of forking this one.

    A fork may never return: where gRPC is in use, its fork handlers wait for threads of gRPC, which
    may in turn wait for the interpreter lock that the forking thread holds.

    processes: how many; None for as many as this process may use processors.
    """
    return ProcessPoolExecutor(processes or len(os.sched_getaffinity(0)), get_context("spawn"))

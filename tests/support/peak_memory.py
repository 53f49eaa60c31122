"""How much memory torch holds at most while a function runs, what its operators use included."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """The highest sum of allocated bytes of the CPU, over what was allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function()
    allocated = peak = 0
    assert profiled.profiler is not None
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    del result
    return peak

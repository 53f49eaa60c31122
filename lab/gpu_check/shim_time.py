"""Measures how long the shim keeps an engine's thread in each decode step, as an SGLang plugin.

The hooks are timed from outside, without what they wrap.  The file has, for each batch size, the
microseconds of the newest steps; it is written when the engine becomes idle.
"""

import json
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "GPU_CHECK_SHIM_TIME"
_SCHEDULER = "sglang.srt.managers.scheduler"
# Steps of a batch size that are kept: those of one play.
_STEPS_KEPT = 4096


def variables(path: Path) -> dict[str, str]:
    """Makes the variables of an engine that writes its shim's times to a file."""
    return {VARIABLE: str(path)}


def read_times(path: Path) -> dict[int, list[float]]:
    """Returns the microseconds of the steps that were kept, by batch size; {} without a file."""
    if not path.exists():
        return {}
    stored_times: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    return {int(size): values for size, values in stored_times.items()}


def register() -> None:
    """Hooks the scheduler; SGLang calls this as an entry point in every process."""
    path = os.environ.get(VARIABLE)
    if not path or _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from lab.cpu_engine.pace.shim_watch import ShimWatch

    watch = ShimWatch()
    # Before the workers are built.
    watch.wrap_hooks()
    times = ShimTimes(Path(path), watch)
    scheduler = f"{_SCHEDULER}.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", times.around_run_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.on_idle", times.around_idle, HookType.AROUND)


class ShimTimes:
    """Keeps the shim's time of each decode step.  watch: a ShimWatch."""

    def __init__(self, path: Path, watch: Any) -> None:
        self._path = path
        self._watch = watch
        self._steps: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_STEPS_KEPT))
        self._is_written = True

    def around_run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **named: Any
    ) -> Any:
        """Wraps the method `Scheduler.run_batch`; a step is reported while the next one runs."""
        self._watch.begin()
        result = original(scheduler, batch, *args, **named)
        seconds = self._watch.take_seconds()
        if batch.forward_mode.is_decode():
            self._steps[len(batch.reqs)].append(round(1e6 * seconds, 2))
            self._is_written = False
        return result

    def around_idle(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        """Wraps the method `Scheduler.on_idle`: writes what is new, then forgets it."""
        if not self._is_written:
            document = {str(size): list(values) for size, values in self._steps.items()}
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(document))
            partial.replace(self._path)
            self._steps.clear()
            self._is_written = True
        return original(scheduler, *args)

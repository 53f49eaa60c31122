"""Counts device synchronisations in an engine's scheduler, as an SGLang plugin of the check.

While the file `<ledger>.on` exists, torch warns at every synchronising call.  Each warning is
attributed to the innermost frame outside torch: to the shim where it made the call itself, to
SGLang otherwise.  The ledger is a JSON file: steps watched, counts by place.
"""

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VARIABLE = "GPU_CHECK_SYNCS"
_MESSAGE = "synchroniz"
_SHIM = f"engine_shim{os.sep}sglang{os.sep}"
_SCHEDULER = "sglang.srt.managers.scheduler"
_SKIPPED = (f"{os.sep}torch{os.sep}", f"{os.sep}warnings.py", __file__)
_WRITE_EVERY_STEPS = 32


def variables(ledger: Path) -> dict[str, str]:
    """Makes the variables of an engine that keeps a ledger."""
    return {VARIABLE: str(ledger)}


def switch_path(ledger: Path) -> Path:
    """Names the file that exists while steps are watched."""
    return ledger.with_name(ledger.name + ".on")


def read_ledger(ledger: Path) -> dict[str, Any] | None:
    """Returns what the engine wrote; None where it watched nothing, as on a CPU."""
    if not ledger.exists():
        return None
    document: dict[str, Any] = json.loads(ledger.read_text())
    return document


def register() -> None:
    """Hooks the scheduler's steps; SGLang calls this as an entry point in every process."""
    path = os.environ.get(VARIABLE)
    if not path or _SCHEDULER not in sys.modules:
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        return
    watch = SyncWatch(Path(path), torch.cuda.set_sync_debug_mode)

    def before_step(*_: Any, **__: Any) -> None:
        watch.step()

    HookRegistry.register(f"{_SCHEDULER}.Scheduler.run_batch", before_step, HookType.BEFORE)


class SyncWatch:
    """Turns torch's warnings on while the switch exists, and keeps the ledger.

    set_mode: torch.cuda.set_sync_debug_mode.
    """

    def __init__(self, ledger: Path, set_mode: Any) -> None:
        self._ledger = ledger
        self._switch = switch_path(ledger)
        self._set_mode = set_mode
        self._original_showwarning = warnings.showwarning
        self._is_on = False
        self._steps = 0
        self.shim: Counter[str] = Counter()
        self.outside_shim: Counter[str] = Counter()

    def step(self) -> None:
        """Runs before every step of the scheduler."""
        should_watch = self._switch.exists()
        if should_watch and not self._is_on:
            warnings.filterwarnings("always", message=f".*{_MESSAGE}.*")
            warnings.showwarning = self._show
            self._set_mode("warn")
        elif self._is_on and not should_watch:
            self._set_mode("default")
            warnings.showwarning = self._original_showwarning
            self._write()
        self._is_on = should_watch
        if should_watch:
            self._steps += 1
            if self._steps % _WRITE_EVERY_STEPS == 0:
                self._write()

    def _show(self, message: Any, *arguments: Any, **named: Any) -> None:
        if _MESSAGE not in str(message):
            self._original_showwarning(message, *arguments, **named)
            return
        place = innermost(
            (frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()[::-1]
        )
        (self.shim if _SHIM in place else self.outside_shim)[place] += 1

    def _write(self) -> None:
        document = {
            "steps": self._steps,
            "shim": dict(self.shim.most_common()),
            "others": dict(self.outside_shim.most_common(20)),
        }
        partial = self._ledger.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self._ledger)


def innermost(frames: Iterable[tuple[str, int]]) -> str:
    """Returns file:line of the first frame outside torch; frames: file, line, innermost first."""
    for filename, line in frames:
        if not any(part in filename for part in _SKIPPED):
            return f"{filename}:{line}"
    return "unknown"


def summary_text(ledger: dict[str, Any] | None) -> str:
    """Counts a ledger's synchronisations in words."""
    if ledger is None:
        return "synchronisations: not watched (no CUDA)"
    shim, sglang_count = sum(ledger["shim"].values()), sum(ledger["others"].values())
    return f"synchronisations in {ledger['steps']} steps: {shim} shim, {sglang_count} SGLang"

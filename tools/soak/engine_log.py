"""Logs on the engine's side what a real engine ran, independently of the project's plugin.

An SGLang plugin that the soak loads beside ours: after every decode step a line of JSON goes to
the file that SOAK_ENGINE_LOG names.  Steps are counted from 1, as they were run.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

VARIABLE: Final = "SOAK_ENGINE_LOG"
_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_DECODED: Final = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor.process_batch_result_decode"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of a step: its request, and how many drafts were accepted."""

    rid: str
    accepted: int


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that ended with a step, by SGLang's own counters.

    tokens: all that it was given.  verify_steps, accepted: decode steps, and drafts accepted there.
    """

    rid: str
    tokens: int
    verify_steps: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step that was run."""

    number: int
    gamma: int
    rows: tuple[Row, ...]
    ended: tuple[EndedRequest, ...] = ()

    @property
    def accepted_counts(self) -> tuple[int, ...]:
        """Returns how many sequences accepted exactly 0, 1, .. gamma drafts."""
        counts = [0] * (self.gamma + 1)
        for row in self.rows:
            counts[row.accepted] += 1
        return tuple(counts)

    @property
    def tokens(self) -> int:
        """Returns the tokens that its sequences gained, bonus tokens included."""
        return sum(row.accepted + 1 for row in self.rows)


def read_steps(path: Path) -> Iterator[Step]:
    """The steps in a log, in order; a torn last line is left out."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            entry = json.loads(line)
            rows = tuple(Row(*row) for row in entry["rows"])
            yield Step(
                number, entry["gamma"], rows, tuple(EndedRequest(*e) for e in entry["ended"])
            )


def watch() -> None:
    """Registers the hooks, as a plugin of SGLang."""
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    writer = _Writer(Path(os.environ[VARIABLE]))
    HookRegistry.register(_DECODED, writer.after_decode, HookType.AFTER)


class _Writer:
    """Opens its file in the process that runs steps, whichever it was made in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def after_decode(self, _: None, processor: Any, batch: Any, result: Any) -> None:
        """Logs a step, after SGLang has processed its result."""
        if self._file is None:
            self._file = self._path.open("w", buffering=1, encoding="utf-8")
        bonus = result.num_non_draft_tokens_per_req
        lengths = result.accept_lens.tolist()
        rows = [
            (request.rid, length - bonus)
            for request, length in zip(batch.reqs, lengths, strict=True)
        ]
        ended = [
            (
                request.rid,
                len(request.output_ids),
                request.spec_verify_ct,
                request.spec_num_correct_drafts,
            )
            for request in batch.reqs
            if request.finished()
        ]
        line = {"gamma": result.speculative_num_draft_tokens - 1, "rows": rows, "ended": ended}
        self._file.write(json.dumps(line) + "\n")

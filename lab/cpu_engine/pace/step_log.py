"""An engine's log: one line of JSON for every pass and for every request that ended."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.harness.errors import HarnessError

# Lines are written together: when there are this many, or when the engine is idle.
_BLOCK = 256
# The last lines are written as soon as the engine is idle.
_IDLE_SECONDS, _POLL_SECONDS = 10.0, 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One pass of a paced engine: a decode step, or a prefill.

    Where nothing is imposed, `seconds` is what the pass took, and `due` is when it ended.

    began, launched, ended: seconds of the machine's monotonic clock, less those for which it stood
    still (see model_clock); the scheduler began with it at `launched`.  It was to end at `due`, and
    was late if the engine's own work took longer.
    seconds: the imposed duration in the model's time, of which switch_seconds, catch_up_seconds,
    lookup_seconds and update_seconds (lost to an update beside it) are parts.  used_seconds: of the
    engine's own work, on the machine's clock.  shim_seconds: of which the shim's hooks.
    kinds: sequences by class.  drafter: "" without speculation.  gamma: -1 in a prefill.
    mixed: rows chose between this drafter and a lookup.
    accepted: drafts accepted by all sequences, also beyond a request's end.  tokens: that were read
    of prompts in a prefill, else that the sequences gained, up to their ends.  updates: of the
    drafter, that have landed since the engine began.
    """

    began: float
    launched: float
    ended: float
    due: float
    seconds: float
    batch_size: int
    kv_tokens: int
    kinds: Mapping[str, int]
    drafter: str = ""
    gamma: int = -1
    asleep: bool = False
    mixed: bool = False
    accepted: int = 0
    tokens: int = 0
    probe: int = 0
    epoch: int = 0
    steered: bool = False
    late: bool = False
    switch_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    lookup_seconds: float = 0.0
    used_seconds: float = 0.0
    shim_seconds: float = 0.0
    update_seconds: float = 0.0
    updates: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether it was a decode step."""
        return self.gamma >= 0


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request that has ended, or was aborted after its first token.

    first_token, last_token: seconds of the machine's monotonic clock.
    """

    rid: str
    first_token: float
    last_token: float
    tokens: int


@dataclass(slots=True)
class StepLog:
    """Appends to a file; nothing is written in most passes.

    An error while the engine runs ends the log, with a line in the engine's own, and not the
    engine.
    """

    path: Path
    _lines: list[str] = field(default_factory=list)
    _has_failed: bool = False

    def __post_init__(self) -> None:
        """Makes the file.  Raises OSError where it cannot be appended to."""
        self.path.open("a").close()

    def add(self, entry: LoggedStep | LoggedRequest) -> None:
        """Adds one entry."""
        if self._has_failed:
            return
        self._lines.append(json.dumps(asdict(entry), separators=(",", ":")))
        if len(self._lines) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Writes what has come since."""
        if not self._lines:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n".join(self._lines) + "\n")
        except OSError as error:
            self._has_failed = True
            _log.error("passes are no longer written to %s: %s", self.path, error)
        self._lines.clear()


@dataclass(frozen=True, slots=True)
class LogPart:
    """Holds the entries of a log between two offsets, in order; end: the second offset, bytes."""

    steps: tuple[LoggedStep, ...]
    requests: tuple[LoggedRequest, ...]
    end: int


def read_log(path: Path, begin: int = 0) -> LogPart:
    """Reads whole lines from a byte offset on; an engine that has not stepped has no file."""
    if not path.exists():
        return LogPart((), (), begin)
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read()
    complete_lines = data[: data.rfind(b"\n") + 1]
    steps: list[LoggedStep] = []
    requests: list[LoggedRequest] = []
    for line in complete_lines.splitlines():
        entry: dict[str, Any] = json.loads(line)
        if "rid" in entry:
            requests.append(LoggedRequest(**entry))
        else:
            steps.append(LoggedStep(**entry))
    return LogPart(tuple(steps), tuple(requests), begin + len(complete_lines))


def await_log(path: Path, begin: int, requests: int) -> LogPart:
    """Waits until the log from a byte offset on has that many ended requests, and reads it.

    Raises HarnessError if they do not appear.
    """
    deadline = time.monotonic() + _IDLE_SECONDS
    while len((part := read_log(path, begin)).requests) < requests:
        if time.monotonic() > deadline:
            raise HarnessError(f"{path}: the log has {len(part.requests)} of {requests} requests")
        time.sleep(_POLL_SECONDS)
    return part

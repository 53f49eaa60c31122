"""What a process has taken of the processors."""

import contextlib
from pathlib import Path


def processor_seconds(pid: int) -> float:
    """Of its threads that live, to the scheduler's nanosecond (`cpu_times` has ticks of 10 ms)."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            spent += int((task / "schedstat").read_text().split()[0])
    return spent * 1e-9

"""`controller` as its users run it, which says on SIGUSR1 how many tasks its event loop has.

    python -m tests.system.soak.counted_sidecar FILE serve ...

The number replaces what is in FILE.
"""

import asyncio
import signal
import sys
from pathlib import Path

from controller.cli import app
from controller.util.atomic_file import write_whole


def main() -> None:
    """Runs the command."""
    file = Path(sys.argv[1])

    def count(*_: object) -> None:
        write_whole(file, str(len(asyncio.all_tasks())).encode())

    signal.signal(signal.SIGUSR1, count)
    app(sys.argv[2:])


if __name__ == "__main__":
    main()

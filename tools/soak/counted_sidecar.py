"""`controller` as its users run it, which keeps writing how many tasks its event loop has.

    python -m tools.soak.counted_sidecar FILE serve ...

The number replaces what is in FILE, ten times a second.
"""

import asyncio
import sys
from pathlib import Path

from controller.cli import app
from controller.util.files import write_atomically

_EVERY_SECONDS = 0.1


class _CountingPolicy(asyncio.DefaultEventLoopPolicy):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        loop.call_soon(self._count, loop)
        return loop

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        write_atomically(self._file, str(len(asyncio.all_tasks(loop))).encode())
        loop.call_later(_EVERY_SECONDS, self._count, loop)


def main() -> None:
    """Runs the command."""
    asyncio.set_event_loop_policy(_CountingPolicy(Path(sys.argv[1])))
    app(sys.argv[2:])


if __name__ == "__main__":
    main()

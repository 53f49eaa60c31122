"""A real sidecar on a unix socket, a clockwork engine beside it, and a reporter that remembers."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.profiling import ProfileOutcome, ProfileRequest, ProfilingSettings, profile_engine
from controller.service.server import Sidecar
from controller.settings.settings import Settings
from tests.support.clockwork_engine import ClockworkEngine

PATIENCE_SECONDS = 200.0
# A measurement ends when it is good enough.  The budget is for a machine that is slow or busy.
BUDGET_SECONDS = 100.0
# Small and quick: two batch sizes, and medians that are good enough soon.
QUICK = ProfilingSettings(batch_sizes=(1, 4), budget_seconds=BUDGET_SECONDS, tolerance=0.02)
# Where something never comes: long enough for what does come on a busy machine.
HOPELESS = dataclasses.replace(QUICK, stall_seconds=5.0)


@dataclass
class Notes:
    """A Reporter."""

    lines: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    on_progress: Callable[[float], None] = lambda _: None

    def note(self, text: str) -> None:
        self.lines.append(text)

    def waiting(self, text: str) -> None:
        self.waits.append(text)

    def progress(self, share: float, doing: str, left_seconds: float) -> None:
        assert 0 <= share <= 1 + 1e-9
        assert left_seconds >= 0
        assert doing
        self.shares.append(share)
        self.cells.append(doing)
        self.on_progress(share)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def socket_address(folder: Path) -> str:
    return f"unix:{folder}/controller.sock"


@asynccontextmanager
async def sidecar(folder: Path, **more: Any) -> AsyncIterator[Sidecar]:
    settings = {"address": socket_address(folder), "metrics_port": 0, "drain_seconds": 1.0}
    async with Sidecar(Settings.load(settings | more)) as running:
        yield running


@asynccontextmanager
async def running(engine: ClockworkEngine) -> AsyncIterator[ClockworkEngine]:
    # Its calls block, and the sidecar that answers them runs on this very loop.
    await asyncio.to_thread(engine.__enter__)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.__exit__)


@asynccontextmanager
async def run_alongside(
    folder: Path, *engines: ClockworkEngine, **settings: Any
) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(sidecar(folder, **settings))
        for engine in engines:
            await stack.enter_async_context(running(engine))
        yield


async def profile(
    folder: Path, engine: ClockworkEngine, notes: Notes | None = None, **changes: Any
) -> ProfileOutcome:
    fields: dict[str, Any] = {
        "engine_url": engine.url,
        "sidecar": socket_address(folder),
        "output": folder / "profile.json",
        "settings": QUICK,
        "wait_seconds": 2.0,
    }
    request = ProfileRequest(**fields | changes)
    return await asyncio.wait_for(profile_engine(request, notes or Notes()), PATIENCE_SECONDS)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  # another thread's state, no event
            await asyncio.sleep(0.01)


def relative_errors(outcome: ProfileOutcome, truth: Callable[[int, int], float]) -> Sequence[float]:
    return [
        cell.step_seconds / truth(cell.gamma, cell.batch_size) - 1 for cell in outcome.profile.cells
    ]

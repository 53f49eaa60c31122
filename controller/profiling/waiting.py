"""Waiting for what a pod starts beside this command: the sidecar, the engine, its introduction."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from controller.core.clock import Clock
from controller.core.engine_spec import EngineSpec
from controller.profiling.engine_http import EngineHttp
from controller.profiling.errors import (
    EngineNotIntroducedError,
    EngineUnreachableError,
    ProfilingError,
    SidecarUnreachableError,
)
from controller.profiling.progress import Reporter
from controller.profiling.sidecar import ProfilingClient

_POLL_SECONDS = 0.5
# An engine that answers HTTP introduces itself within this time, or has no shim.
_INTRODUCTION_SECONDS = 10.0

Found = TypeVar("Found")


class Waiter:
    """Tries again until it works or the time is over.  `seconds`: for all that is waited for."""

    def __init__(self, seconds: float, clock: Clock, reporter: Reporter) -> None:
        self._clock = clock
        self._reporter = reporter
        self._begun_at = clock.now()
        self._deadline = self._begun_at + seconds

    async def for_sidecar(self, sidecar: ProfilingClient) -> None:
        """Waits for the sidecar.  Raises SidecarUnreachableError."""
        await self._until(
            f"the sidecar at {sidecar.address}", sidecar.engines, SidecarUnreachableError
        )

    async def for_engine(self, engine: EngineHttp) -> None:
        """Waits until the engine can generate.  Raises EngineUnreachableError."""

        async def ready() -> None:
            if why := await engine.why_not_ready():
                raise EngineUnreachableError(why)

        await self._until(f"the engine at {engine.url}", ready, EngineUnreachableError)

    async def for_introduction(
        self, sidecar: ProfilingClient, engine: EngineHttp, engine_id: str
    ) -> EngineSpec:
        """The engine to measure; `engine_id` "" when there is only one.

        Raises EngineNotIntroducedError.
        """

        async def introduced() -> EngineSpec:
            return choose_engine(await sidecar.engines(), engine_id, engine.url, sidecar.address)

        self._deadline = min(self._deadline, self._clock.now() + _INTRODUCTION_SECONDS)
        return await self._until(
            "the engine's introduction to the sidecar", introduced, NotYetIntroducedError
        )

    async def _until(
        self, what: str, attempt: Callable[[], Awaitable[Found]], not_yet: type[ProfilingError]
    ) -> Found:
        while True:
            try:
                return await attempt()
            except not_yet as error:
                waited = self._clock.now() - self._begun_at
                if self._clock.now() >= self._deadline:
                    text = f"{error} (waited {waited:.0f} s)" if waited >= 1 else str(error)
                    raise type(error)(text) from error
                self._reporter.waiting(f"waiting for {what}: {error}")
            await asyncio.sleep(_POLL_SECONDS)


class NotYetIntroducedError(EngineNotIntroducedError):
    """It may still come."""


def choose_engine(
    engines: Sequence[EngineSpec], engine_id: str, url: str, address: str
) -> EngineSpec:
    """Raises NotYetIntroducedError when it is not there, EngineNotIntroducedError for several."""
    names = [spec.engine_id for spec in engines]
    for spec in engines:
        if spec.engine_id == engine_id:
            return spec
    if engine_id:
        raise NotYetIntroducedError(
            f"engine {engine_id!r} has not introduced itself to the sidecar at {address}; "
            f"introduced: {', '.join(names) or 'none'}"
        )
    if not engines:
        raise NotYetIntroducedError(
            f"no engine has introduced itself to the sidecar at {address}: the engine at {url} "
            f"must run with the shim (SPECULATION_SIDECAR={address})"
        )
    if len(engines) > 1:
        raise EngineNotIntroducedError(
            f"{len(engines)} engines have introduced themselves ({', '.join(names)}): "
            "say with --engine-id which one is behind the engine URL"
        )
    return engines[0]

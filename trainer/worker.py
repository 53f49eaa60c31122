"""Trains a drafter beside an engine, when the sidecar orders it, and publishes a new version.

    every second        reports the number of stored signals to the sidecar
    on an order         fine-tunes the serving version on most signals, evaluates it on the others,
                        stores the weights as a new version, reports the result to the sidecar
    on the answer       deletes the signals that it has used

The sidecar decides whether the version serves.  If the trainer is killed at any point, it repeats
the round after its restart: signals are deleted last, and a version that was not deployed is only a
file.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import structlog

from engine_shim.link.credentials import EngineCredentials
from engine_shim.link.secret import secret_in
from engine_shim.sglang.training.online import NotFiniteError
from engine_shim.sglang.training.signals import Signal, readable, signal_paths
from engine_shim.sglang.training.students import DraftStudent
from engine_shim.sglang.training.versions import FOLDER, Made, VersionError, Versions
from speculation.v1.service_pb2 import ListEnginesRequest
from speculation.v1.service_pb2_grpc import InspectionServiceStub
from speculation.v1.training_pb2 import AttendRequest, AttendResponse, TrainingRound
from speculation.v1.training_pb2_grpc import TrainingServiceStub
from trainer.adapt import AdaptSettings, acceptance, fine_tuned, served_acceptance, split

_EVERY_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 2.0
_RETRY_MOST_SECONDS: Final = 30.0
_PROGRESS_SECONDS: Final = 5.0
# Limit for the sidecar's list of engines, which has at most two pages: 1024 engines, 1000 a page.
_PAGES_MAX: Final = 100

_log = structlog.get_logger(__name__)


class NoEngineError(RuntimeError):
    """The sidecar has several engines, and --engine was not given."""


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """The engine to train for.

    sidecar: the gRPC address of its sidecar.  engine_id: "" for the sidecar's only engine.  folder:
    of the signals.  device: of torch, to train on.
    """

    sidecar: str
    engine_id: str
    folder: Path
    credentials: EngineCredentials
    device: str = "cpu"


class TrainingWorker:
    """Trains whenever the sidecar orders it.  Raises OSError if its folder cannot be created."""

    def __init__(self, where: WorkerTarget, settings: AdaptSettings) -> None:
        self._where = where
        self._settings = settings
        self._versions = Versions(where.folder / FOLDER)

    async def run(self) -> None:
        """Runs until it is cancelled, and waits for a sidecar or engine that is unavailable.

        Raises FolderTakenError, NoEngineError, grpc.RpcError.
        """
        with self._versions.lock():
            pause = _RETRY_SECONDS
            while True:
                began = time.monotonic()
                try:
                    await self._attend()
                except grpc.aio.AioRpcError as error:
                    if not _passes(error):
                        raise
                    _log.warning("sidecar_away", detail=error.details(), code=error.code().name)
                if time.monotonic() - began > _RETRY_MOST_SECONDS:
                    pause = _RETRY_SECONDS
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(2 * pause, _RETRY_MOST_SECONDS)

    async def _attend(self) -> None:
        credentials, metadata = self._where.credentials, self._where.credentials.metadata()
        async with credentials.channel(self._where.sidecar) as channel:
            engine_id = self._where.engine_id or await _only_engine(channel, metadata)
            call = TrainingServiceStub(channel).Attend(metadata=metadata)
            _log.info("attending", engine=engine_id, folder=str(self._where.folder))
            request = AttendRequest(
                engine_id=engine_id,
                stored_signals=len(self._paths()),
                engine_secret=secret_in(self._where.folder),
            )
            phase = ""
            async for response in _talk(call, request):
                if response.phase != phase:
                    phase = response.phase
                    _log.info("phase", phase=phase, serving=response.draft_version)
                if not response.train_round:
                    await asyncio.sleep(_EVERY_SECONDS)
                    await call.write(AttendRequest(stored_signals=len(self._paths())))
                    continue
                used, ended = await asyncio.to_thread(self._round, response)
                await call.write(AttendRequest(ended=ended, stored_signals=0))
                answer = await call.read()
                if not isinstance(answer, AttendResponse):
                    break
                for path in used:
                    path.unlink(missing_ok=True)
                self._versions.forget({answer.draft_version, answer.parent_version})
                await call.write(AttendRequest(stored_signals=len(self._paths())))
            status = grpc.aio.AioRpcError(
                await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
            )
            if status.code() is not grpc.StatusCode.OK:
                raise status

    def _paths(self) -> list[Path]:
        return signal_paths(self._where.folder)

    def _round(self, order: AttendResponse) -> tuple[list[Path], TrainingRound]:
        """Runs a round; returns the signals that may be deleted, and the result."""
        paths = self._paths()
        try:
            return paths, self._trained(order, _readable(paths))
        except (VersionError, NotFiniteError, ValueError, OSError, RuntimeError) as error:
            _log.error("round_failed", round=order.train_round, error=str(error))
            text = f"{type(error).__name__}: {error}"[:500]
            return paths, TrainingRound(round=order.train_round, error=text)

    def _trained(self, order: AttendResponse, signals: list[Signal]) -> TrainingRound:
        began = time.monotonic()
        settings = self._settings
        train, held = split(signals, settings.held_out)
        serving = self._versions.student(order.draft_version).to(self._where.device)
        before = acceptance(serving, held, settings.depth)
        served = served_acceptance(train)
        alpha_train = acceptance(serving, train, settings.depth) if served is None else served
        seeded = replace(settings, seed=settings.seed + order.train_round)
        made = fine_tuned(serving, train, seeded, _progress_log(order.train_round))
        after = acceptance(made, held, settings.depth)
        facts = Made(
            order.draft_version, alpha_train, after, before, len(train), time.monotonic() - began
        )
        version = self._versions.publish(dict(made.named_parameters()), facts)
        for other, contender in self._contenders(order.draft_version):
            theirs = acceptance(contender.to(self._where.device), held, settings.depth)
            _log.info("contender", version=other, alpha_eval=round(theirs, 4))
            if theirs > after:
                version, after = other, theirs
        _log.info(
            "round_ended",
            round=order.train_round,
            version=version,
            signals=len(train),
            held_out=len(held),
            alpha_train=round(alpha_train, 4),
            alpha_before=round(before, 4),
            alpha_eval=round(after, 4),
            seconds=round(facts.seconds, 1),
        )
        return TrainingRound(
            round=order.train_round,
            version=version,
            alpha_train=alpha_train,
            alpha_eval=after,
            alpha_before=before,
        )

    def _contenders(self, serving: int) -> Iterator[tuple[int, DraftStudent]]:
        """Yields the versions that were imported since the serving one."""
        for version in self._versions.numbers():
            if version <= serving:
                continue
            try:
                if self._versions.made(version).imported:
                    yield version, self._versions.student(version)
            except VersionError as error:
                _log.warning("version_passed_over", error=str(error))


async def _talk(
    call: grpc.aio.StreamStreamCall[AttendRequest, AttendResponse], first: AttendRequest
) -> AsyncIterator[AttendResponse]:
    """Yields the answers, one for every request, until the call ends."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(first)
        while isinstance(answer := await call.read(), AttendResponse):
            yield answer


async def _only_engine(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> str:
    stub = InspectionServiceStub(channel)
    able: list[str] = []
    token = ""
    for _ in range(_PAGES_MAX):
        answer = await stub.ListEngines(ListEnginesRequest(page_token=token), metadata=metadata)
        able += [
            status.engine.engine_id
            for status in answer.engines
            if status.engine.capabilities.can_take_versions
        ]
        token = answer.next_page_token
        # Two engines are enough to raise; the error lists the engines read so far.
        if not token or len(able) > 1:
            break
    else:
        raise NoEngineError(
            f"the sidecar's list of engines has more than {_PAGES_MAX} pages: name an engine with "
            "--engine"
        )
    if len(able) > 1:
        raise NoEngineError(
            f"the sidecar has several engines that can be trained: name one with --engine, "
            f"{able[:8]}"
        )
    if not able:
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(),
            "no engine that can take versions of its drafter has introduced itself",
        )  # fmt: skip
    return able[0]


def _passes(error: grpc.aio.AioRpcError) -> bool:
    """Whether a retry may succeed without a change by the operator."""
    return error.code() in {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        # The sidecar may not have noticed yet that an earlier trainer was killed.
        grpc.StatusCode.ALREADY_EXISTS,
    }


def _readable(paths: list[Path]) -> list[Signal]:
    return list(readable(paths, lambda e: _log.warning("signal_passed_over", error=str(e))))


def _progress_log(number: int) -> Callable[[float, float], None]:
    """Makes a function that logs the progress of a round every few seconds."""
    logged = time.monotonic()

    def report(share: float, loss: float) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _PROGRESS_SECONDS:
            logged = time.monotonic()
            _log.info("training", round=number, done=round(share, 2), loss=round(loss, 3))

    return report

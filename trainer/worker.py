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
from engine_shim.link.secret import read_secret
from engine_shim.sglang.training.online import NotFiniteError
from engine_shim.sglang.training.signals import Signal, read_valid, signal_paths
from engine_shim.sglang.training.students import DraftStudent
from engine_shim.sglang.training.versions import FOLDER_NAME, VersionError, VersionOrigin, Versions
from speculation.v1.service_pb2 import ListEnginesRequest
from speculation.v1.service_pb2_grpc import InspectionServiceStub
from speculation.v1.training_pb2 import AttendRequest, AttendResponse, TrainingRound
from speculation.v1.training_pb2_grpc import TrainingServiceStub
from trainer.adapt import (
    AdaptSettings,
    acceptance_rate,
    fine_tune,
    served_acceptance,
    split_signals,
)

_REPORT_INTERVAL_SECONDS: Final = 1.0
_INITIAL_RETRY_SECONDS: Final = 2.0
_MAX_RETRY_SECONDS: Final = 30.0
_PROGRESS_INTERVAL_SECONDS: Final = 5.0
# Limit for the sidecar's list of engines, which has at most two pages: 1024 engines, 1000 a page.
_MAX_PAGES: Final = 100

_log = structlog.get_logger(__name__)


class NoEngineError(RuntimeError):
    """The sidecar has several engines, and --engine was not given."""


@dataclass(frozen=True, slots=True)
class TrainedEngine:
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

    def __init__(self, trained_engine: TrainedEngine, settings: AdaptSettings) -> None:
        self._trained_engine = trained_engine
        self._settings = settings
        self._versions = Versions(trained_engine.folder / FOLDER_NAME)

    async def run(self) -> None:
        """Runs until it is cancelled, and waits for a sidecar or engine that is unavailable.

        Raises FolderTakenError, NoEngineError, grpc.RpcError.
        """
        with self._versions.lock():
            retry_seconds = _INITIAL_RETRY_SECONDS
            while True:
                start_time = time.monotonic()
                try:
                    await self._attend()
                except grpc.aio.AioRpcError as error:
                    if not _is_transient(error):
                        raise
                    _log.warning("sidecar_away", detail=error.details(), code=error.code().name)
                if time.monotonic() - start_time > _MAX_RETRY_SECONDS:
                    retry_seconds = _INITIAL_RETRY_SECONDS
                await asyncio.sleep(retry_seconds * random.uniform(0.8, 1.2))
                retry_seconds = min(2 * retry_seconds, _MAX_RETRY_SECONDS)

    async def _attend(self) -> None:
        credentials, metadata = (
            self._trained_engine.credentials,
            self._trained_engine.credentials.metadata(),
        )
        async with credentials.channel(self._trained_engine.sidecar) as channel:
            engine_id = self._trained_engine.engine_id or await _find_only_engine(channel, metadata)
            call = TrainingServiceStub(channel).Attend(metadata=metadata)
            _log.info("attending", engine=engine_id, folder=str(self._trained_engine.folder))
            request = AttendRequest(
                engine_id=engine_id,
                stored_signals=len(self._signal_paths()),
                engine_secret=read_secret(self._trained_engine.folder),
            )
            phase = ""
            async for response in _exchange_messages(call, request):
                if response.phase != phase:
                    phase = response.phase
                    _log.info("phase", phase=phase, serving=response.draft_version)
                if not response.train_round:
                    await asyncio.sleep(_REPORT_INTERVAL_SECONDS)
                    await call.write(AttendRequest(stored_signals=len(self._signal_paths())))
                    continue
                used_paths, training_round = await asyncio.to_thread(self._run_round, response)
                await call.write(AttendRequest(ended=training_round, stored_signals=0))
                answer = await call.read()
                if not isinstance(answer, AttendResponse):
                    break
                for path in used_paths:
                    path.unlink(missing_ok=True)
                self._versions.delete_old({answer.draft_version, answer.parent_version})
                await call.write(AttendRequest(stored_signals=len(self._signal_paths())))
            status = grpc.aio.AioRpcError(
                await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
            )
            if status.code() is not grpc.StatusCode.OK:
                raise status

    def _signal_paths(self) -> list[Path]:
        return signal_paths(self._trained_engine.folder)

    def _run_round(self, order: AttendResponse) -> tuple[list[Path], TrainingRound]:
        """Runs a round; returns the signals that may be deleted, and the result."""
        paths = self._signal_paths()
        try:
            return paths, self._train_and_evaluate(order, _read_signals(paths))
        except (VersionError, NotFiniteError, ValueError, OSError, RuntimeError) as error:
            _log.error("round_failed", round=order.train_round, error=str(error))
            text = f"{type(error).__name__}: {error}"[:500]
            return paths, TrainingRound(round=order.train_round, error=text)

    def _train_and_evaluate(self, order: AttendResponse, signals: list[Signal]) -> TrainingRound:
        start_time = time.monotonic()
        settings = self._settings
        train, held_out = split_signals(signals, settings.held_out)
        serving = self._versions.load_student(order.draft_version).to(self._trained_engine.device)
        acceptance_before = acceptance_rate(serving, held_out, settings.depth)
        acceptance_in_service = served_acceptance(train)
        alpha_train = (
            acceptance_rate(serving, train, settings.depth)
            if acceptance_in_service is None
            else acceptance_in_service
        )
        round_settings = replace(settings, seed=settings.seed + order.train_round)
        trained = fine_tune(serving, train, round_settings, _make_progress_log(order.train_round))
        best_acceptance = acceptance_rate(trained, held_out, settings.depth)
        facts = VersionOrigin(
            order.draft_version,
            alpha_train,
            best_acceptance,
            acceptance_before,
            len(train),
            time.monotonic() - start_time,
        )
        version = self._versions.publish(dict(trained.named_parameters()), facts)
        for imported_version, imported_student in self._imported_versions(order.draft_version):
            imported_acceptance = acceptance_rate(
                imported_student.to(self._trained_engine.device), held_out, settings.depth
            )
            _log.info(
                "contender", version=imported_version, alpha_eval=round(imported_acceptance, 4)
            )
            if imported_acceptance > best_acceptance:
                version, best_acceptance = imported_version, imported_acceptance
        _log.info(
            "round_ended",
            round=order.train_round,
            version=version,
            signals=len(train),
            held_out=len(held_out),
            alpha_train=round(alpha_train, 4),
            alpha_before=round(acceptance_before, 4),
            alpha_eval=round(best_acceptance, 4),
            seconds=round(facts.seconds, 1),
        )
        return TrainingRound(
            round=order.train_round,
            version=version,
            alpha_train=alpha_train,
            alpha_eval=best_acceptance,
            alpha_before=acceptance_before,
        )

    def _imported_versions(self, serving: int) -> Iterator[tuple[int, DraftStudent]]:
        """Yields the versions that were imported since the serving one."""
        for version in self._versions.version_numbers():
            if version <= serving:
                continue
            try:
                if self._versions.read_origin(version).is_imported:
                    yield version, self._versions.load_student(version)
            except VersionError as error:
                _log.warning("version_passed_over", error=str(error))


async def _exchange_messages(
    call: grpc.aio.StreamStreamCall[AttendRequest, AttendResponse], first_request: AttendRequest
) -> AsyncIterator[AttendResponse]:
    """Yields the answers, one for every request, until the call ends."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(first_request)
        while isinstance(answer := await call.read(), AttendResponse):
            yield answer


async def _find_only_engine(
    channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]
) -> str:
    stub = InspectionServiceStub(channel)
    capable_engines: list[str] = []
    token = ""
    for _ in range(_MAX_PAGES):
        answer = await stub.ListEngines(ListEnginesRequest(page_token=token), metadata=metadata)
        capable_engines += [
            status.engine.engine_id
            for status in answer.engines
            if status.engine.capabilities.can_take_versions
        ]
        token = answer.next_page_token
        # Two engines are enough to raise; the error lists the engines read so far.
        if not token or len(capable_engines) > 1:
            break
    else:
        raise NoEngineError(
            f"the sidecar's list of engines has more than {_MAX_PAGES} pages: name an engine with "
            "--engine"
        )
    if len(capable_engines) > 1:
        raise NoEngineError(
            f"the sidecar has several engines that can be trained: name one with --engine, "
            f"{capable_engines[:8]}"
        )
    if not capable_engines:
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(),
            "no engine that can take versions of its drafter has introduced itself",
        )  # fmt: skip
    return capable_engines[0]


def _is_transient(error: grpc.aio.AioRpcError) -> bool:
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


def _read_signals(paths: list[Path]) -> list[Signal]:
    return list(read_valid(paths, lambda e: _log.warning("signal_passed_over", error=str(e))))


def _make_progress_log(number: int) -> Callable[[float, float], None]:
    """Makes a function that logs the progress of a round every few seconds."""
    last_log_time = time.monotonic()

    def report(share: float, loss: float) -> None:
        nonlocal last_log_time
        if time.monotonic() - last_log_time >= _PROGRESS_INTERVAL_SECONDS:
            last_log_time = time.monotonic()
            _log.info("training", round=number, done=round(share, 2), loss=round(loss, 3))

    return report

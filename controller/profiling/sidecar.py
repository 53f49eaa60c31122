"""Calls the sidecar for a measurement: lists engines, forces arms, installs profiles."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

import grpc
import grpc.aio

from controller.client.channels import Credentials, CredentialsError, connection_failure_reason
from controller.client.paging import EndlessListError, collect_pages_async
from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.errors import (
    InvalidProfileError,
    ProfileMismatchError,
    SpeculationError,
)
from controller.core.step_report import StepReport
from controller.profiling.errors import (
    CallerDeniedError,
    MeasurementError,
    ProfilingError,
    ProfilingUsageError,
    SidecarUnreachableError,
)
from controller.util.sockets import operators_address, permission_denied_reason
from controller.wire.engines import engine_from_proto
from controller.wire.reports import report_from_proto
from speculation.v1 import service_pb2, service_pb2_grpc

_ANSWER_SECONDS = 10.0
# gRPC would wait up to two minutes between attempts; a sidecar starts much faster.
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_REFUSED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


class MeasureStream:
    """Measures one engine: `force` sets its arm, and `reports` returns its reports in order."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[service_pb2.MeasureRequest, service_pb2.MeasureResponse],
        engine_id: str,
    ) -> None:
        self._call = call
        self._engine_id = engine_id
        self._responses: asyncio.Queue[service_pb2.MeasureResponse] = asyncio.Queue()
        # A separate task reads, because cancelling a read would cancel the whole call.
        self._reader = asyncio.create_task(self._read())
        self.first_epoch: int | None = None
        # First plan epoch of the last request that the sidecar has answered; 0 before any.
        self.forced_epoch = 0
        # Number of steps that ran under plans from before the measurement.
        self.earlier_steps = 0

    async def force(self, arm: Arm) -> None:
        """Requests this arm for all batch sizes.  Raises MeasurementError."""
        request = service_pb2.MeasureRequest(
            engine_id=self._engine_id, drafter=arm.drafter, gamma=arm.gamma
        )
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._end_error() from error

    async def reports(self, wait_seconds: float) -> list[StepReport]:
        """Returns the reports since the last call; [] if none arrives within `wait_seconds`.

        Only steps under a forced plan count.  Raises MeasurementError if the measurement has ended.
        """
        try:
            async with asyncio.timeout(wait_seconds):
                responses = [await self._responses.get()]
        except TimeoutError:
            if self._reader.done():
                raise await self._end_error() from None
            return []
        while not self._responses.empty():
            responses.append(self._responses.get_nowait())
        reports: list[StepReport] = []
        for response in responses:
            if self.first_epoch is None:
                self.first_epoch = response.forced_epoch
            self.forced_epoch = response.forced_epoch
            reports += map(report_from_proto, response.reports)
        counting = [report for report in reports if report.plan_epoch >= (self.first_epoch or 0)]
        self.earlier_steps += len(reports) - len(counting)
        return counting

    async def close(self) -> None:
        """Ends the measurement; the engine returns to normal planning."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait({self._reader})

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._responses.put_nowait(response)
        except grpc.aio.AioRpcError:
            pass  # `_end_error` reads its status

    async def _end_error(self) -> ProfilingError:
        details = await self._call.details()
        if await self._call.code() in _AWAY:
            return SidecarUnreachableError(
                f"the sidecar ended: {details}; restart it, and run this command again to continue"
            )
        return MeasurementError(f"the sidecar ended the measurement: {details}")


class ProfilingClient:
    """Calls one sidecar as an operator: `async with ProfilingClient(address) as sidecar`.

    Raises ProfilingUsageError for credentials that cannot be used.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self._credentials = Credentials.for_address(address)
        except CredentialsError as error:
            raise ProfilingUsageError(str(error)) from error
        self._metadata = self._credentials.metadata()

    async def __aenter__(self) -> Self:
        self._channel = self._credentials.aio_channel(operators_address(self.address), *_OPTIONS)
        self._inspection = service_pb2_grpc.InspectionServiceStub(self._channel)
        self._profiling = service_pb2_grpc.ProfilingServiceStub(self._channel)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def engines(self) -> Sequence[EngineSpec]:
        """Returns all engines that have introduced themselves.

        Raises SidecarUnreachableError, and ProfilingError if the caller lacks the permission.
        """
        try:
            answer = await collect_pages_async(
                lambda token: self._inspection.ListEngines(
                    service_pb2.ListEnginesRequest(page_token=token),
                    timeout=_ANSWER_SECONDS,
                    metadata=self._metadata,
                )
            )
        except grpc.aio.AioRpcError as error:
            raise self._call_error(error) from error
        except EndlessListError as error:
            raise ProfilingError(f"what listens at {self.address}: {error}") from error
        return [
            engine_from_proto(status.engine) for status in answer.engines if not status.unavailable
        ]

    async def install(self, profile: Profile) -> Sequence[str]:
        """Installs a profile, and returns the ids of the engines that use it.

        Raises SidecarUnreachableError, and ProfilingError if the sidecar refuses it.
        """
        try:
            answer = await self._profiling.InstallProfile(
                service_pb2.InstallProfileRequest(profile_json=profile.to_json()),
                timeout=_ANSWER_SECONDS,
                metadata=self._metadata,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY | _REFUSED:
                raise self._call_error(error) from error
            raise ProfilingError(f"the sidecar refuses the profile: {error.details()}") from error
        return list(answer.engine_ids)

    async def stored_profile(self, spec: EngineSpec) -> Profile | None:
        """Returns the fleet's stored profile of this engine, None if none is available.

        Raises SidecarUnreachableError, and ProfilingError for a profile of another engine.
        """
        try:
            answer = await self._profiling.GetProfile(
                service_pb2.GetProfileRequest(engine_id=spec.engine_id),
                timeout=_ANSWER_SECONDS,
                metadata=self._metadata,
            )
            profile = Profile.from_json(answer.profile_json)
            profile.require_match(spec.fingerprint, spec.drafters)
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY and "redis" not in (error.details() or ""):
                raise self._call_error(error) from error
            return None
        except (InvalidProfileError, ProfileMismatchError) as error:
            raise ProfilingError(
                f"the sidecar's stored profile is not valid for this engine: {error}"
            ) from error
        return profile

    @asynccontextmanager
    async def open_measurement(self, engine_id: str) -> AsyncIterator[MeasureStream]:
        """Opens a measurement of an engine for the block; normal planning resumes afterwards."""
        stream = MeasureStream(self._profiling.Measure(metadata=self._metadata), engine_id)
        try:
            yield stream
        finally:
            await stream.close()

    def _call_error(self, error: grpc.aio.AioRpcError) -> SpeculationError:
        if error.code() in _REFUSED:
            return CallerDeniedError(f"the sidecar at {self.address} refuses: {error.details()}")
        if error.code() not in _AWAY:
            return SidecarUnreachableError(
                f"the server at {self.address} is not a sidecar: {error.code().name}: "
                f"{error.details()}"
            )
        address = operators_address(self.address)
        if denied_reason := permission_denied_reason(address):
            return CallerDeniedError(f"{address}: {denied_reason}")
        if self.address.startswith("unix:"):
            return SidecarUnreachableError(
                f"no sidecar listens at {self.address}: start one with "
                f"`controller serve --address {self.address}`, or name its socket with --sidecar"
            )
        reason = connection_failure_reason(self.address, error.details())
        return SidecarUnreachableError(f"no sidecar answers at {self.address}: {reason}")

"""Serves the ProfilingService, with measurements on a running engine and new profiles."""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog

from controller.core.cost.profile import Profile
from controller.core.errors import error_field_prefix
from controller.service.net import callers
from controller.service.net.errors import Context, InvalidMeasurementError, NoMatchingEngineError
from controller.service.net.limits import FairQueue
from controller.service.rpc import streams
from controller.service.rpc.request_ids import RequestIds
from controller.service.rpc.streams import read_message, run_alongside
from controller.service.sessions.measurements import ForcedMeasurement
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.audit_log import AuditLog
from controller.service.state.fleet_profiles import FleetProfiles, ProfileSummary
from controller.service.state.profile_registry import (
    ProfileRegistry,
    mismatch,
    require_not_in_future,
)
from controller.service.views.paging import page_of
from controller.util import tasks
from controller.wire.engines import fingerprint_to_proto
from controller.wire.field_mapping import message_of
from controller.wire.plans import arm_from_proto
from controller.wire.reports import report_to_proto
from speculation.v1 import service_pb2, service_pb2_grpc

# The length of a time in ISO 8601.
_TIMESTAMP_CHARACTERS = 40

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class ProfilingServicer(service_pb2_grpc.ProfilingServiceServicer):
    """Serves measurements, and installs and shares profiles.

    read_queue: the queue of calls that read or upload profiles, or read lists, on the same server.
    """

    registry: SessionRegistry
    profiles: ProfileRegistry
    fleet: FleetProfiles
    audit: AuditLog
    request_ids: RequestIds
    read_queue: FairQueue
    _installing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def Measure(  # type: ignore[override]  # as in steering: reads and writes through its context
        self,
        request_iterator: AsyncIterator[service_pb2.MeasureRequest],
        context: grpc.aio.ServicerContext[service_pb2.MeasureRequest, service_pb2.MeasureResponse],
    ) -> None:
        """Forces the arms that the client requests, and forwards the engine's reports."""
        first_request = await streams.read_first_message(context)
        if first_request is None:
            return
        callers.require_engine(first_request.engine_id)
        session = self.registry.find_by_engine(first_request.engine_id)
        with session.reserve_for_measurement() as measurement:
            caller = callers.current_caller()
            _log.info("measurement_started", engine=session.engine_id, origin=caller.origin)
            self.audit.record("measure", session.engine_id, caller, "it began")
            try:
                await _MeasureStream(session, measurement, context).run(first_request)
            finally:
                _log.info("measurement_ended", engine=session.engine_id)

    async def InstallProfile(
        self, request: service_pb2.InstallProfileRequest, context: Context
    ) -> service_pb2.InstallProfileResponse:
        """Saves the profile, and uses it for every engine with its fingerprint."""
        return await self.request_ids.run_once(request, lambda: self._install(request))

    async def _install(
        self, request: service_pb2.InstallProfileRequest
    ) -> service_pb2.InstallProfileResponse:
        profile = await self._read_profile(request.profile_json)
        self._require_matching_engine(profile)
        async with self._installing:
            path = await asyncio.to_thread(self.profiles.save, profile)
            self.profiles.add(profile)
        # Only now: engines may have come or gone while the file was written.
        matching_sessions = [s for s in self.registry if mismatch(profile, s.spec) is None]
        for session in matching_sessions:
            session.use_profile(profile)
            await asyncio.sleep(0)
        await self.fleet.publish(profile)
        engines = sorted(session.engine_id for session in matching_sessions)
        _log.info(
            "profile_installed",
            profile=profile.profile_id,
            engines=engines,
            path=str(path) if path else None,
        )
        self.audit.record(
            "install_profile",
            profile.profile_id,
            callers.current_caller(),
            f"for {', '.join(engines)}",
        )
        return service_pb2.InstallProfileResponse(profile_id=profile.profile_id, engine_ids=engines)

    async def PushProfile(
        self, request: service_pb2.PushProfileRequest, context: Context
    ) -> service_pb2.PushProfileResponse:
        """Stores a profile for new pods, and for engines here that have none."""
        return await self.request_ids.run_once(request, lambda: self._push(request))

    async def _push(
        self, request: service_pb2.PushProfileRequest
    ) -> service_pb2.PushProfileResponse:
        profile = await self._read_profile(request.profile_json)
        identity = await self.fleet.push(profile)
        self.audit.record(
            "push_profile",
            profile.profile_id,
            callers.current_caller(),
            f"under identity {identity}",
        )
        return service_pb2.PushProfileResponse(profile_id=profile.profile_id, identity=identity)

    async def _read_profile(self, text: str) -> Profile:
        """Reads a profile in a thread, one at a time.  Raises InvalidProfileError."""
        async with self.read_queue.turn():
            return await tasks.run_to_completion(asyncio.to_thread(_parse_profile, text))

    async def ListProfiles(
        self, request: service_pb2.ListProfilesRequest, context: Context
    ) -> service_pb2.ListProfilesResponse:
        """Returns a page of the identities, the one with the newest measurement first."""
        summaries = {_sort_key(summary): summary for summary in await self.fleet.list_summaries()}
        engine_ids = await self.read_queue.run_sliced(self._engine_ids(summaries.values()))
        rows, token = await page_of(
            self.read_queue,
            summaries,
            lambda place: _profile_row(summaries[place], engine_ids[summaries[place].identity]),
            None,
            request.page_size,
            request.page_token,
            descending=True,
        )
        return service_pb2.ListProfilesResponse(profiles=rows, next_page_token=token)

    def _engine_ids(
        self, summaries: Iterable[ProfileSummary]
    ) -> Generator[None, None, dict[str, list[str]]]:
        """Returns the ids of this sidecar's engines that profiles match, by identity."""
        sessions_by_model: dict[str, list[EngineSession]] = {}
        for session in self.registry:
            sessions_by_model.setdefault(session.spec.fingerprint.target_model, []).append(session)
            yield
        engine_ids = {}
        for summary in summaries:
            ids = engine_ids[summary.identity] = list[str]()
            for session in sessions_by_model.get(summary.fingerprint.target_model, ()):
                if mismatch(summary, session.spec) is None:
                    ids.append(session.engine_id)
                yield
        return engine_ids

    async def GetProfile(
        self, request: service_pb2.GetProfileRequest, context: Context
    ) -> service_pb2.GetProfileResponse:
        """Returns a profile by its id, or the one that matches an engine of this sidecar."""
        if request.engine_id:
            spec = self.registry.find_by_engine(request.engine_id).spec
            text = await self.fleet.text_for_engine(spec)
        else:
            text = await self.fleet.text_by_id(request.profile_id)
        return service_pb2.GetProfileResponse(profile_json=text)

    def _require_matching_engine(self, profile: Profile) -> None:
        mismatches = [(session, mismatch(profile, session.spec)) for session in self.registry]
        if not mismatches:
            raise NoMatchingEngineError(
                "the profile matches no engine: none has introduced itself yet",
                resource=profile.profile_id,
            )
        if all(error is not None for _, error in mismatches):
            raise NoMatchingEngineError(
                "; ".join(f"{session.engine_id}: {error}" for session, error in mismatches[:3]),
                resource=profile.profile_id,
            )


def _sort_key(summary: ProfileSummary) -> str:
    """Returns the sort key of the list."""
    return f"{summary.measured_at[:_TIMESTAMP_CHARACTERS]} {summary.identity}"


def _profile_row(summary: ProfileSummary, engine_ids: Sequence[str]) -> service_pb2.ShelvedProfile:
    return message_of(
        service_pb2.ShelvedProfile,
        summary,
        fingerprint=fingerprint_to_proto(summary.fingerprint),
        drafters=[drafter.name for drafter in summary.drafters],
        engine_ids=engine_ids,
    )


def _parse_profile(text: str) -> Profile:
    """Reads and checks a profile.  It takes milliseconds and must run in a thread.

    Raises InvalidProfileError.
    """
    with error_field_prefix("profile_json"):
        profile = Profile.from_json(text)
        require_not_in_future(profile)
    assert profile.profile_id  # kept by the profile
    return profile


@dataclass(eq=False, repr=False)
class _MeasureStream:
    """Serves one open Measure stream."""

    session: EngineSession
    measurement: ForcedMeasurement
    context: grpc.aio.ServicerContext[service_pb2.MeasureRequest, service_pb2.MeasureResponse]
    _wake_event: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self, first_request: service_pb2.MeasureRequest) -> None:
        """Serves the stream until the client has sent its last message.

        Raises InvalidMeasurementError, SlowClientError, and the error that ended the session.
        """
        sent_epoch = 0
        self._force(first_request)
        with self.session.register_stream(self._wake_event):
            async with run_alongside(self._read(), self._wake_event) as reader:
                while True:
                    done = reader.done()
                    if self.session.end_error is not None:
                        raise self.session.end_error
                    reports = self.measurement.take_reports()
                    if reports or self.measurement.forced_epoch != sent_epoch:
                        sent_epoch = self.measurement.forced_epoch
                        await self.context.write(
                            service_pb2.MeasureResponse(
                                forced_epoch=sent_epoch,
                                reports=map(report_to_proto, reports),
                            )
                        )
                    if done:
                        reader.result()
                        return
                    await self._wake_event.wait()
                    self._wake_event.clear()

    async def _read(self) -> None:
        while (request := await read_message(self.context)) is not None:
            if request.engine_id not in {"", self.session.engine_id}:
                raise InvalidMeasurementError(
                    f"this stream measures engine {self.session.engine_id!r}; "
                    "open another one for another engine",
                    field_path="engine_id",
                )
            self._force(request)
            self._wake_event.set()

    def _force(self, request: service_pb2.MeasureRequest) -> None:
        self.session.force_arm(self.measurement, arm_from_proto(request))

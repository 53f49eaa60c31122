"""Every method of a sidecar that really serves: what a client can send, and what may come back.

An input is one request, or several for a method that takes a stream.  `SESSION` in it stands for
the session of an engine that is introduced again before each input.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from controller.core.training.selective_training import TrainingSettings
from controller.service.net import guard
from controller.service.net.callers import Right
from controller.service.server import Sidecar
from controller.settings.settings import Settings
from controller.util.sockets import operators_path
from speculation.v1 import plan_pb2, policy_pb2, service_pb2, training_pb2
from tests.support.service_harness import engine_message, make_profile, report_message
from tools.fuzz.mutation import join_parts, mutate_message, mutate_parts, split_parts
from tools.fuzz.target import Feed, Target

SECRET = "of engine-0"
SESSION = "0" * 32
REQUEST_ID = "11111111-2222-4333-8444-555555555555"
# A sidecar's answer takes no such time; a watch that was kept open is ended then.
_ANSWER_SECONDS = 15.0
_WATCH_SECONDS = 0.02
_ENDLESS = {"WatchOverrides", "Watch"}
# No message of any call.
_NONE = b"\xff" * 9
# What says that the sidecar did not know what it was given.
_BAD = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
_UNLIMITED = dict.fromkeys(Right, (1e9, 1e9))

_SERVICES: Sequence[Any] = (
    *service_pb2.DESCRIPTOR.services_by_name.values(),
    *policy_pb2.DESCRIPTOR.services_by_name.values(),
    *training_pb2.DESCRIPTOR.services_by_name.values(),
    *health_pb2.DESCRIPTOR.services_by_name.values(),
)


class RefusedError(Exception):
    """A status that says what was wrong."""


class BadAnswerError(Exception):
    """A status that does not, or something that broke behind it."""


class _ServedSidecar:
    """A sidecar on a thread of its own.  faults: errors that reached its loop's handler."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.faults: list[str] = []
        address = f"unix:{folder}/controller.sock"
        self._settings = Settings.load(
            {
                "address": address,
                "metrics_port": 0,
                "warm_start": False,
                "profile_directory": folder / "profiles",
                "training": TrainingSettings(initial=2, unit_drafts=4, threshold=3),
            }
            | dict(settings)
        )
        self.sidecar = Sidecar(self._settings)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.faults.append(repr(context)))
        self._started, self._stopping = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(60)
        # Calls of bytes: the stubs want messages.
        self.channel: Any = grpc.insecure_channel(address)
        self.operators: Any = grpc.insecure_channel(
            f"unix:{operators_path(self._settings.socket_path)}"
        )

    def _serve(self) -> None:
        self._loop.run_until_complete(self._until_down())
        self._loop.close()

    async def _until_down(self) -> None:
        async with self.sidecar:
            self._started.set()
            await self._stopping.wait()

    def close(self) -> None:
        self.channel.close()
        self.operators.close()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(60)

    def introduce(self) -> str:
        engine = engine_message()
        engine.capabilities.can_collect = engine.capabilities.can_take_versions = True
        engine.capabilities.can_update_online = engine.capabilities.can_sleep = True
        stub = self.channel.unary_unary(
            "/speculation.v1.SpeculationService/Introduce",
            service_pb2.IntroduceRequest.SerializeToString,
            service_pb2.IntroduceResponse.FromString,
        )
        request = service_pb2.IntroduceRequest(engine=engine, engine_secret=SECRET)
        answer = stub(request, timeout=_ANSWER_SECONDS)
        return str(answer.session_id)

    def push_profile(self) -> None:
        """Pushes a profile that inputs can get."""
        request = service_pb2.PushProfileRequest(profile_json=make_profile().to_json())
        self.operators.unary_unary("/speculation.v1.ProfilingService/PushProfile")(
            request.SerializeToString(), timeout=_ANSWER_SECONDS
        )

    def override(self) -> None:
        """Sets an override that inputs can get or clear."""
        override = _override(gamma=1)
        override.override_id = "pin-0"
        with contextlib.suppress(grpc.RpcError):  # its id is taken for a while once it was cleared
            self.operators.unary_unary("/speculation.v1.PolicyService/SetOverride")(
                policy_pb2.SetOverrideRequest(override=override).SerializeToString(),
                timeout=_ANSWER_SECONDS,
            )

    def check_view(self) -> None:
        """Everything that is shown of every engine can be shown."""
        ask = self.channel.unary_unary
        ask("/speculation.v1.InspectionService/ListEngines")(b"", timeout=_ANSWER_SECONDS)
        for session in self.sidecar.registry:
            question = service_pb2.ExplainRequest(engine_id=session.engine_id).SerializeToString()
            try:
                ask("/speculation.v1.InspectionService/Explain")(question, timeout=_ANSWER_SECONDS)
            except grpc.RpcError as error:
                # It may be taken over meanwhile.
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[_ServedSidecar]:
    """Serves with the settings of the table, without rate limits."""
    # Rate limits are not tested here.
    with mock.patch.object(guard, "LIMITS", _UNLIMITED):
        served = _ServedSidecar(folder, settings)
        try:
            yield served
        finally:
            served.close()


def _opened(method: MethodDescriptor) -> Callable[[Path], Any]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    by_operator = method.containing_service.name not in {"SpeculationService", "InspectionService"}

    @contextmanager
    def opened(folder: Path) -> Iterator[Feed]:
        with serving(folder) as served:

            def feed(data: bytes) -> None:
                session = served.introduce()
                if method.name in {"ClearOverride", "GetOverride"}:
                    served.override()
                data = data.replace(SESSION.encode(), session.encode())
                channel = served.operators if by_operator else served.channel
                code, details = _call(channel, method, path, data)
                faults, served.faults = served.faults, []
                if faults:
                    raise BadAnswerError(f"{path}: {faults[0]}")
                if code in _BAD:
                    raise BadAnswerError(f"{path}: {code}: {details}")
                if code is grpc.StatusCode.DEADLINE_EXCEEDED and method.name not in _ENDLESS:
                    raise BadAnswerError(f"{path}: no answer")
                _check_views(served)
                if code is not grpc.StatusCode.OK and method.name not in _ENDLESS:
                    raise RefusedError(details)

            served.push_profile()
            yield feed

    return opened


def _check_views(served: _ServedSidecar) -> None:
    try:
        served.check_view()
    except grpc.RpcError as error:
        raise BadAnswerError(f"looking: {error.code()}: {error.details()}") from error


def _call(
    channel: Any, method: MethodDescriptor, path: str, data: bytes
) -> tuple[grpc.StatusCode, str]:
    seconds = _WATCH_SECONDS if method.name in _ENDLESS else _ANSWER_SECONDS
    try:
        if method.client_streaming:
            call: Any = channel.stream_stream(path)(iter(split_parts(data)), timeout=seconds)
            for _ in call:
                pass
        elif method.server_streaming:
            for _ in channel.unary_stream(path)(data, timeout=seconds):
                pass
        else:
            channel.unary_unary(path)(data, timeout=seconds)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def _override(**rule: Any) -> policy_pb2.Override:
    return policy_pb2.Override(
        override_id="pin-1",
        scope=policy_pb2.Scope(engine_id="engine-0"),
        rule=policy_pb2.OverrideRule(**rule),
        author="ann",
        reason="because",
    )


def _reports(*steps: int) -> list[Any]:
    return [report_message(step) for step in steps]


def _right() -> dict[str, list[list[Message]]]:
    """Requests that are right, by method."""
    profile = make_profile().to_json()
    rich = report_message(
        3, confidences=[0.9, 0.5], update_seconds=0.01, draft_version=1, plan_epoch=1
    )
    rich.classes.add(label="chat", accepted_counts=[1, 1, 2])
    rich.flags.updating = True
    engine = engine_message("engine-1")
    engine.shape.hidden_size, engine.shape.vocabulary_size = 2048, 32000
    layers = engine.shape.attention.add(layers=16)
    layers.grouped_query.query_heads, layers.grouped_query.kv_heads = 16, 8
    layers.grouped_query.head_dim = 128
    engine.shape.dense_params, engine.shape.bytes_per_weight = 10**9, 2.0
    engine.shape.bytes_per_kv = 2.0
    engine.fingerprint.device = "NVIDIA H100 80GB HBM3"
    steer = service_pb2.SteerRequest
    attend = training_pb2.AttendRequest
    ended = training_pb2.TrainingRound(
        round=1, version=1, alpha_train=0.4, alpha_eval=0.6, alpha_before=0.3
    )
    regime = plan_pb2.Regime(mode=plan_pb2.REGIME_MODE_ONLINE, stride=5)
    return {
        "Introduce": [
            [service_pb2.IntroduceRequest(engine=engine_message("engine-1"), engine_secret=SECRET)],
            [service_pb2.IntroduceRequest(engine=engine, engine_secret=SECRET)],
        ],
        "Steer": [
            [steer(session_id=SESSION, reports=_reports(1, 2)), steer(session_id=SESSION)],
            [steer(session_id=SESSION, reports=[rich], dropped_reports=3)],
        ],
        "Decide": [[service_pb2.DecideRequest(session_id=SESSION, report=rich)]],
        "Explain": [[service_pb2.ExplainRequest(engine_id="engine-0", batch_size=4)]],
        "ListFleet": [
            [service_pb2.ListFleetRequest(filter="engine gamma=0 link=away", page_size=2)],
            [service_pb2.ListFleetRequest(page_token="engine-0 0123456789abcdef")],
        ],
        "Measure": [
            [
                service_pb2.MeasureRequest(engine_id="engine-0", drafter="mtp", gamma=2),
                service_pb2.MeasureRequest(drafter="mtp", gamma=0),
            ]
        ],
        "InstallProfile": [[service_pb2.InstallProfileRequest(profile_json=profile)]],
        "PushProfile": [
            [service_pb2.PushProfileRequest(profile_json=profile)],
            [service_pb2.PushProfileRequest(profile_json=profile, request_id=REQUEST_ID)],
        ],
        "ListProfiles": [[service_pb2.ListProfilesRequest(page_size=1, page_token="2020-01-01 0")]],
        "GetProfile": [
            [service_pb2.GetProfileRequest(engine_id="engine-0")],
            [service_pb2.GetProfileRequest(profile_id="0123456789abcdef")],
        ],
        "SetOverride": [
            [policy_pb2.SetOverrideRequest(override=_override(gamma=2), dry_run=True)],
            [policy_pb2.SetOverrideRequest(override=_override(regime=regime), dry_run=True)],
            [
                policy_pb2.SetOverrideRequest(
                    override=_override(tpot_max_seconds=0.02), ttl_seconds=0.05
                )
            ],
            [
                policy_pb2.SetOverrideRequest(
                    override=_override(deny_drafters=["mtp"], gamma_max=3), ttl_seconds=0.05
                )
            ],
            [policy_pb2.SetOverrideRequest(override=_override(gamma=2), etag="3")],
        ],
        "ClearOverride": [
            [policy_pb2.ClearOverrideRequest(override_id="pin-0", author="ann", reason="fixed")],
            [
                policy_pb2.ClearOverrideRequest(
                    override_id="pin-0", etag="1-2", author="ann", reason="fixed"
                )
            ],
            [
                policy_pb2.ClearOverrideRequest(
                    override_id="pin-0",
                    author="ann",
                    reason="fixed",
                    allow_missing=True,
                    request_id=REQUEST_ID,
                )
            ],
        ],
        "GetOverride": [[policy_pb2.GetOverrideRequest(override_id="pin-0")]],
        "ListOverrides": [[policy_pb2.ListOverridesRequest(page_size=1, page_token="pin-0")]],
        "QueryAudit": [
            [policy_pb2.QueryAuditRequest(limit=10, before_sequence="7")],
            [policy_pb2.QueryAuditRequest(limit=1, page_token="7")],
        ],
        "Attend": [
            [attend(engine_id="engine-0", stored_signals=3), attend(stored_signals=9)],
            [attend(engine_id="engine-0", stored_signals=9, ended=ended)],
        ],
        "Check": [[health_pb2.HealthCheckRequest(service="speculation.v1.SpeculationService")]],
    }


_RIGHT = _right()


def _seeds(method: MethodDescriptor) -> Callable[[], Sequence[bytes]]:
    def seeds() -> Sequence[bytes]:
        requests = _RIGHT.get(method.name, [[]])
        encoded = [[part.SerializeToString() for part in parts] for parts in requests]
        encoded.append([_NONE])
        if method.client_streaming:
            return [join_parts(parts) for parts in encoded]
        return [b"".join(parts) for parts in encoded]

    return seeds


def _targets() -> Iterator[Target]:
    for service in _SERVICES:
        for method in service.methods:
            if method.name == "List":
                continue
            mutate = mutate_message(GetMessageClass(method.input_type))
            if method.client_streaming:
                mutate = mutate_parts(mutate)
            yield Target(
                f"rpc.{service.name}.{method.name}",
                _seeds(method),
                mutate,
                _opened(method),
                (RefusedError,),
            )


TARGETS = tuple(_targets())

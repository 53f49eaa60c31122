"""Every refusal of every call says in google.rpc's words what a program needs to act on it."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor

from controller.core.errors import InvalidStateError, SpeculationError, error_field_prefix
from controller.core.planning.overrides import InvalidOverrideError
from controller.service.net.errors import (
    ERROR_KINDS,
    INTERNAL_ERROR_KIND,
    NoOverrideError,
    error_kind_of,
    status_message,
)
from controller.service.rpc.inspection import InspectionServicer
from speculation.v1 import errors_pb2, policy_pb2, service_pb2, training_pb2
from tests.support.error_details import failure_details
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    engine_message,
    report_message,
    running_sidecar,
    with_timeout,
)

Code = grpc.StatusCode
METHODS: list[MethodDescriptor] = [
    method
    for module in (service_pb2, policy_pb2, training_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
LONG = "x" * 500
ROOT = Path(__file__).resolve().parents[5]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def called(channel: grpc.aio.Channel, method: MethodDescriptor, request: bytes) -> None:
    """Calls a method with these bytes, whatever kind of call it is."""
    kind = "stream" if method.client_streaming else "unary"
    answers = "stream" if method.server_streaming else "unary"
    # Bytes are sent as they are where no serializer is given.
    make: Any = getattr(channel, f"{kind}_{answers}")(path_of(method))
    call = make(one(request) if method.client_streaming else request)
    await (call.read() if method.server_streaming else call)


async def one(request: bytes) -> AsyncIterator[bytes]:
    yield request


def refused(method: MethodDescriptor) -> tuple[Any, str, str, tuple[str, str] | None]:
    """(request, reason, field, resource): what is wrong with it, by what it is."""
    override = policy_pb2.Override(
        override_id="a",
        scope=policy_pb2.Scope(fleet=True),
        rule=policy_pb2.OverrideRule(gamma_min=3, gamma_max=2),
        author="ann",
        reason="test",
    )
    unknown = ("engine", "nobody")
    return {
        "Introduce": (service_pb2.IntroduceRequest(), "INVALID_ENGINE", "engine.engine_id", None),
        "Steer": (service_pb2.SteerRequest(session_id="?"), "SESSION_ENDED", "", None),
        "Decide": (service_pb2.DecideRequest(session_id="?"), "SESSION_ENDED", "", None),
        "ListEngines": (
            service_pb2.ListEnginesRequest(page_token=LONG), "INVALID_REQUEST", "page_token", None,
        ),
        "Overview": (
            service_pb2.OverviewRequest(page_token=LONG), "INVALID_REQUEST", "page_token", None,
        ),
        "ListFleet": (
            service_pb2.ListFleetRequest(filter="nothing=1"), "INVALID_REQUEST", "filter", None,
        ),
        "Explain": (
            service_pb2.ExplainRequest(engine_id="nobody"), "ENGINE_NOT_FOUND", "", unknown,
        ),
        "Measure": (
            service_pb2.MeasureRequest(engine_id="nobody"), "ENGINE_NOT_FOUND", "", unknown,
        ),
        "InstallProfile": (
            service_pb2.InstallProfileRequest(profile_json="{"), "INVALID_PROFILE",
            "profile_json", None,
        ),
        "PushProfile": (
            service_pb2.PushProfileRequest(profile_json="{"), "INVALID_PROFILE", "profile_json",
            None,
        ),
        "ListOverrides": (
            policy_pb2.ListOverridesRequest(page_token=LONG), "INVALID_REQUEST", "page_token", None,
        ),
        "ListProfiles": (
            service_pb2.ListProfilesRequest(page_token=LONG), "INVALID_REQUEST", "page_token", None,
        ),
        "GetOverride": (
            policy_pb2.GetOverrideRequest(override_id="a"), "OVERRIDE_NOT_FOUND", "",
            ("override", "a"),
        ),
        "GetProfile": (
            service_pb2.GetProfileRequest(profile_id="p"), "PROFILE_NOT_FOUND", "",
            ("profile", "p"),
        ),
        "SetOverride": (
            policy_pb2.SetOverrideRequest(override=override), "INVALID_OVERRIDE",
            "override.rule.gamma_min", None,
        ),
        "ClearOverride": (
            policy_pb2.ClearOverrideRequest(override_id="a", author="ann", reason="test"),
            "OVERRIDE_NOT_FOUND", "", ("override", "a"),
        ),
        "QueryAudit": (
            policy_pb2.QueryAuditRequest(limit=1001), "INVALID_REQUEST", "limit", None,
        ),
        "Attend": (
            training_pb2.AttendRequest(engine_id="nobody"), "ENGINE_NOT_FOUND", "", unknown,
        ),
    }[method.name]  # fmt: skip


# It takes nothing that could be wrong.
HARMLESS = {"WatchOverrides"}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningSidecar]:
    async with running_sidecar(tmp_path) as harness:
        yield harness


def test_every_reason_belongs_to_an_error_and_every_error_has_one():
    reasons = {kind.reason for kind in [*ERROR_KINDS.values(), INTERNAL_ERROR_KIND]}
    assert reasons == set(errors_pb2.ErrorReason.values()) - {errors_pb2.ERROR_REASON_UNSPECIFIED}


def test_the_reference_names_the_status_and_the_resource_of_every_reason():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for kind in [*ERROR_KINDS.values(), INTERNAL_ERROR_KIND]:
        name = errors_pb2.ErrorReason.Name(kind.reason)
        (meaning,) = re.findall(rf"^\| `{name}` \| \d+ \| (.*) \|$", text, re.MULTILINE)
        assert re.match(rf"{kind.status.name}\b", meaning), name
        assert (f", resource `{kind.resource_type}`" in meaning) == bool(kind.resource_type), name


@pytest.mark.parametrize("error_class", ERROR_KINDS)
def test_details_of_every_error_say_what_it_is_about(error_class: type[SpeculationError]):
    # Past its own constructor, which some have.
    error = error_class.__new__(error_class)
    SpeculationError.__init__(error, "why", field_path="a.b", resource="me", facts={"etag": "1"})
    kind, status = ERROR_KINDS[error_class], status_message(error)
    assert kind is error_kind_of(error)
    kinds = [packed.TypeName() for packed in status.details]
    about_a_field = kind.status in {Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE}
    assert kinds == [
        "google.rpc.ErrorInfo",
        *["google.rpc.BadRequest"] * about_a_field,
        *["google.rpc.ResourceInfo"] * bool(kind.resource_type),
    ]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_bytes_that_are_no_request_are_refused_with_details_by_every_call(
    running: RunningSidecar, method: MethodDescriptor
):
    failure = await failure_details(called(running.operators, method, b"\xff" * 50))
    assert (failure.status, failure.reason) == (Code.INVALID_ARGUMENT, "UNREADABLE_REQUEST")


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name not in HARMLESS], ids=lambda method: method.name
)
async def test_every_call_names_what_is_wrong_with_a_request(
    running: RunningSidecar, method: MethodDescriptor
):
    request, reason, field, resource = refused(method)
    failure = await failure_details(called(running.operators, method, request.SerializeToString()))
    assert (failure.reason, failure.field, failure.resource) == (reason, field, resource)


async def test_a_caller_without_the_right_is_told_so_in_details(running: RunningSidecar):
    for name in ("SetOverride", "InstallProfile", "Measure"):
        method = next(m for m in METHODS if m.name == name)
        failure = await failure_details(called(running.channel, method, b""))
        assert (failure.status, failure.reason) == (Code.PERMISSION_DENIED, "FORBIDDEN")


async def test_a_refused_report_has_its_field_in_decide_and_its_reason_in_steer(
    running: RunningSidecar,
):
    session = await running.introduce()
    bad = report_message(1, step_seconds=-1.0)
    request = service_pb2.DecideRequest(session_id=session, report=bad)
    failure = await failure_details(running.speculation.Decide(request))
    assert (failure.reason, failure.field) == ("INVALID_REPORT", "report.step_seconds")
    client = SteerClient(running, session)
    await client.send(bad, report_message(2, gamma=30))
    rejections = await client.rejections()
    assert rejections[0].reason == errors_pb2.ERROR_REASON_INVALID_REPORT


async def test_a_field_in_a_list_has_its_place(running: RunningSidecar):
    engine = engine_message()
    engine.drafters.add(name="other", kind=engine.drafters[0].kind, gammas=[3, 1])
    request = service_pb2.IntroduceRequest(engine=engine)
    failure = await failure_details(running.speculation.Introduce(request))
    assert (failure.reason, failure.field) == ("INVALID_ENGINE", "engine.drafters[1].gammas")


async def test_a_conflict_has_the_etag_that_is_needed_to_go_on(running: RunningSidecar):
    override = policy_pb2.Override(
        override_id="a", scope=policy_pb2.Scope(fleet=True),
        rule=policy_pb2.OverrideRule(gamma=1), author="ann", reason="test",
    )  # fmt: skip
    held = (await with_timeout(running.policy.SetOverride(request := set_request(override)))).held
    request.override.rule.gamma = 2
    failure = await failure_details(running.policy.SetOverride(request))
    assert (failure.reason, failure.resource) == ("OVERRIDE_EXISTS", ("override", "a"))
    request.etag = failure.facts["etag"]
    assert request.etag == held.etag
    await with_timeout(running.policy.SetOverride(request))
    failure = await failure_details(running.policy.SetOverride(request_with(request, gamma=3)))
    assert (failure.reason, failure.status) == ("OVERRIDE_CHANGED", Code.ABORTED)
    assert failure.facts["etag"] != held.etag


async def test_a_failure_of_the_sidecar_tells_nothing_of_its_inside(
    running: RunningSidecar, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise ValueError("/secret/path")

    monkeypatch.setattr(InspectionServicer, "_explain", broken)
    failure = await failure_details(
        running.inspection.Explain(service_pb2.ExplainRequest(engine_id="e"))
    )
    assert (failure.status, failure.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in failure.message
    assert "ValueError" not in failure.message
    # Nor of an error of ours that is not meant for clients.
    status = status_message(InvalidStateError("/secret/path"))
    assert status.message == failure.message


async def test_details_of_the_longest_error_arrive_whole(running: RunningSidecar):
    """Also where every character takes many bytes: gRPC refuses metadata above 8 KiB."""
    worst = "\N{GRINNING FACE}" * 5000
    request = service_pb2.ExplainRequest(engine_id=worst)
    failure = await failure_details(running.inspection.Explain(request))
    assert failure.reason == "ENGINE_NOT_FOUND"
    assert failure.resource is not None
    assert worst.startswith(failure.resource[1].removesuffix("…"))
    error = InvalidOverrideError(worst, field_path=worst, facts={"a": worst, "b": worst})
    assert status_message(error).ByteSize() < 3000


def test_an_error_is_within_the_fields_around_it():
    with (
        pytest.raises(InvalidOverrideError) as caught,
        error_field_prefix("override"),
        error_field_prefix("rule"),
    ):
        raise InvalidOverrideError("no", field_path="gamma")
    assert caught.value.field_path == "override.rule.gamma"
    with pytest.raises(NoOverrideError) as other, error_field_prefix("override"):
        raise NoOverrideError("no")
    assert other.value.field_path == "override"


def set_request(override: policy_pb2.Override) -> policy_pb2.SetOverrideRequest:
    return policy_pb2.SetOverrideRequest(override=override)


def request_with(request: policy_pb2.SetOverrideRequest, gamma: int) -> Any:
    changed = policy_pb2.SetOverrideRequest()
    changed.CopyFrom(request)
    changed.override.rule.gamma = gamma
    return changed

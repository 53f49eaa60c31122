"""A repeated request has the answer of the first one, and does nothing twice."""

import asyncio
import uuid
from pathlib import Path

import grpc
import pytest

from controller.core.errors import SpeculationError
from controller.service.net import callers
from controller.service.net.callers import Call, Caller, Right
from controller.service.net.errors import RequestIdReusedError
from controller.service.rpc import request_ids
from controller.service.rpc.request_ids import RequestIds
from speculation.v1 import policy_pb2, service_pb2
from tests.support.error_details import failure_details
from tests.support.override_calls import FLEET, list_overrides, make_override_request, set_override
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    make_profile,
    running_sidecar,
    with_timeout,
)


def new_id() -> str:
    return str(uuid.uuid4())


def clearing(request_id: str, reason: str = "it is well again") -> policy_pb2.ClearOverrideRequest:
    return policy_pb2.ClearOverrideRequest(
        override_id="o1", author="bob", reason=reason, request_id=request_id
    )


async def actions(running, awaited: str = "") -> list[str]:
    """The audit, once it has the awaited action: of what is no override it is written later."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            answer = await with_timeout(running.policy.QueryAudit(policy_pb2.QueryAuditRequest()))
            action_names = [record.action for record in answer.records]
            if awaited in {"", *action_names}:
                return action_names
            await asyncio.sleep(0.01)


async def test_a_repeated_clear_is_answered_as_the_first_one(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, gamma=1)
        request = clearing(new_id())
        first = await with_timeout(running.policy.ClearOverride(request))
        assert first.effects
        assert await with_timeout(running.policy.ClearOverride(request)) == first
        # Also when there is another override of another engine by now, and none of this id.
        await set_override(running, name="o2", gamma=1)
        assert await with_timeout(running.policy.ClearOverride(request)) == first
        assert await actions(running) == ["set", "clear", "set"]
        assert (await failure_details(running.policy.ClearOverride(clearing("")))).reason == (
            "OVERRIDE_NOT_FOUND"
        )


async def test_a_repeated_set_does_not_bring_an_override_back(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = make_override_request(scope=FLEET, off=True, request={"request_id": new_id()})
        first = await with_timeout(running.policy.SetOverride(request))
        await with_timeout(running.policy.ClearOverride(clearing(new_id())))
        assert await with_timeout(running.policy.SetOverride(request)) == first
        assert await list_overrides(running) == {}


async def test_an_id_with_another_content_or_another_call_is_refused(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        same = new_id()
        await with_timeout(
            running.policy.SetOverride(
                make_override_request(off=True, request={"request_id": same})
            )
        )
        changed = make_override_request(gamma=1, request={"request_id": same})
        error_details = await failure_details(running.policy.SetOverride(changed))
        assert (error_details.status, error_details.reason, error_details.field) == (
            grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED", "request_id",
        )  # fmt: skip
        error_details = await failure_details(running.policy.ClearOverride(clearing(same)))
        assert error_details.reason == "REQUEST_ID_REUSED"
        assert list(await list_overrides(running)) == ["o1"]


@pytest.mark.parametrize("bad", ["1", "x" * 10_000, "{0}" * 12, "urn:uuid:" + "0" * 32])
async def test_an_id_that_is_no_uuid_is_refused(tmp_path: Path, bad: str):
    async with running_sidecar(tmp_path) as running:
        for dry in (False, True):
            request = make_override_request(off=True, request={"request_id": bad, "dry_run": dry})
            error_details = await failure_details(running.policy.SetOverride(request))
            assert (error_details.reason, error_details.field) == ("INVALID_REQUEST", "request_id")
        assert await list_overrides(running) == {}


async def test_a_refused_request_may_be_tried_again_with_its_id(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = clearing(new_id())
        assert (
            await failure_details(running.policy.ClearOverride(request))
        ).reason == "OVERRIDE_NOT_FOUND"
        await set_override(running, scope=FLEET, off=True)
        await with_timeout(running.policy.ClearOverride(request))
        assert await list_overrides(running) == {}


async def test_a_dry_run_leaves_its_id_to_the_real_request(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = make_override_request(
            scope=FLEET, off=True, request={"request_id": new_id(), "dry_run": True}
        )
        await with_timeout(running.policy.SetOverride(request))
        request.dry_run = False
        await with_timeout(running.policy.SetOverride(request))
        assert list(await list_overrides(running)) == ["o1"]


async def test_a_profile_is_pushed_once(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = service_pb2.PushProfileRequest(
            profile_json=make_profile().to_json(), request_id=new_id()
        )
        first = await with_timeout(running.profiling.PushProfile(request))
        assert await with_timeout(running.profiling.PushProfile(request)) == first
        assert (await actions(running, "push_profile")).count("push_profile") == 1
        installing = service_pb2.InstallProfileRequest(
            profile_json=make_profile().to_json(), request_id=new_id()
        )
        await running.introduce()
        installed = await with_timeout(running.profiling.InstallProfile(installing))
        assert await with_timeout(running.profiling.InstallProfile(installing)) == installed
        assert (await actions(running, "install_profile")).count("install_profile") == 1


def begin_call(name: str) -> None:
    caller = Caller(f"{name}, pid 7", Right.OVERRIDE, access_key=name)
    callers.set_current_call(Call(caller, Right.OVERRIDE))


class Work:
    """Counts how often it is begun and done; waits for `may_end`."""

    def __init__(self) -> None:
        self.begun = self.done = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> policy_pb2.ClearOverrideResponse:
        self.begun += 1
        await self.may_end.wait()
        self.done += 1
        return policy_pb2.ClearOverrideResponse(missing=True)


async def test_work_goes_on_when_its_client_goes_and_is_not_done_again():
    ids, work = RequestIds(), Work()
    work.may_end.clear()
    request = clearing(new_id())
    begin_call("ann")
    first = asyncio.create_task(ids.run_once(request, work))
    while not work.begun:  # noqa: ASYNC110  # two turns of the loop
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    again = asyncio.create_task(ids.run_once(request, work))
    work.may_end.set()
    assert (await with_timeout(again)).missing
    assert (work.begun, work.done) == (1, 1)


async def test_each_caller_has_ids_of_its_own():
    ids, work = RequestIds(), Work()
    request = clearing(new_id())
    begin_call("ann")
    await ids.run_once(request, work)
    begin_call("bob")
    await ids.run_once(clearing(request.request_id, "another reason"), work)
    assert work.done == 2


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_ids, "KEPT_ANSWERS_MAX", 3)
    ids, work = RequestIds(), Work()
    begin_call("ann")
    requests = [clearing(new_id()) for _ in range(5)]
    for request in requests:
        await ids.run_once(request, work)
    for request in requests[-2:]:
        await ids.run_once(request, work)
    assert work.done == 5
    # Those were forgotten to make room.
    await ids.run_once(requests[0], work)
    assert work.done == 6
    monkeypatch.setattr(request_ids, "KEPT_BYTES_MAX", 0)
    await ids.run_once(requests[-1], work)
    assert work.done == 7


async def test_an_answer_is_forgotten_after_its_time(monkeypatch: pytest.MonkeyPatch):
    ids, work = RequestIds(), Work()
    begin_call("ann")
    request = clearing(new_id())
    await ids.run_once(request, work)
    with pytest.raises(RequestIdReusedError):
        await ids.run_once(clearing(request.request_id, "another reason"), work)
    monkeypatch.setattr(request_ids, "KEPT_SECONDS", 0.0)
    ids = RequestIds()
    await ids.run_once(request, work)
    await ids.run_once(request, work)
    assert work.done == 3


async def test_failed_work_is_forgotten_and_closing_ends_what_is_under_way():
    ids = RequestIds()
    begin_call("ann")
    request = clearing(new_id())

    async def fails() -> policy_pb2.ClearOverrideResponse:
        raise SpeculationError("no")

    with pytest.raises(SpeculationError):
        await ids.run_once(request, fails)
    work = Work()
    work.may_end.clear()
    waiting = asyncio.create_task(ids.run_once(request, work))
    await asyncio.sleep(0)
    await ids.close()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert work.done == 0

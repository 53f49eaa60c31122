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
from tests.support.error_details import failed
from tests.support.override_calls import FLEET, asked, listed, set_
from tests.support.service_harness import PATIENCE_SECONDS, make_profile, serving, soon


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
            answer = await soon(running.policy.QueryAudit(policy_pb2.QueryAuditRequest()))
            found = [record.action for record in answer.records]
            if awaited in {"", *found}:
                return found
            await asyncio.sleep(0.01)


async def test_a_repeated_clear_is_answered_as_the_first_one(tmp_path: Path):
    async with serving(tmp_path) as running:
        await running.introduce()
        await set_(running, gamma=1)
        request = clearing(new_id())
        first = await soon(running.policy.ClearOverride(request))
        assert first.effects
        assert await soon(running.policy.ClearOverride(request)) == first
        # Also when there is another override of another engine by now, and none of this id.
        await set_(running, name="o2", gamma=1)
        assert await soon(running.policy.ClearOverride(request)) == first
        assert await actions(running) == ["set", "clear", "set"]
        assert (await failed(running.policy.ClearOverride(clearing("")))).reason == (
            "OVERRIDE_NOT_FOUND"
        )


async def test_a_repeated_set_does_not_bring_an_override_back(tmp_path: Path):
    async with serving(tmp_path) as running:
        request = asked(scope=FLEET, off=True, request={"request_id": new_id()})
        first = await soon(running.policy.SetOverride(request))
        await soon(running.policy.ClearOverride(clearing(new_id())))
        assert await soon(running.policy.SetOverride(request)) == first
        assert await listed(running) == {}


async def test_an_id_with_another_content_or_another_call_is_refused(tmp_path: Path):
    async with serving(tmp_path) as running:
        same = new_id()
        await soon(running.policy.SetOverride(asked(off=True, request={"request_id": same})))
        changed = asked(gamma=1, request={"request_id": same})
        found = await failed(running.policy.SetOverride(changed))
        assert (found.status, found.reason, found.field) == (
            grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED", "request_id",
        )  # fmt: skip
        found = await failed(running.policy.ClearOverride(clearing(same)))
        assert found.reason == "REQUEST_ID_REUSED"
        assert list(await listed(running)) == ["o1"]


@pytest.mark.parametrize("bad", ["1", "x" * 10_000, "{0}" * 12, "urn:uuid:" + "0" * 32])
async def test_an_id_that_is_no_uuid_is_refused(tmp_path: Path, bad: str):
    async with serving(tmp_path) as running:
        for dry in (False, True):
            request = asked(off=True, request={"request_id": bad, "dry_run": dry})
            found = await failed(running.policy.SetOverride(request))
            assert (found.reason, found.field) == ("INVALID_REQUEST", "request_id")
        assert await listed(running) == {}


async def test_a_refused_request_may_be_tried_again_with_its_id(tmp_path: Path):
    async with serving(tmp_path) as running:
        request = clearing(new_id())
        assert (await failed(running.policy.ClearOverride(request))).reason == "OVERRIDE_NOT_FOUND"
        await set_(running, scope=FLEET, off=True)
        await soon(running.policy.ClearOverride(request))
        assert await listed(running) == {}


async def test_a_dry_run_leaves_its_id_to_the_real_request(tmp_path: Path):
    async with serving(tmp_path) as running:
        request = asked(scope=FLEET, off=True, request={"request_id": new_id(), "dry_run": True})
        await soon(running.policy.SetOverride(request))
        request.dry_run = False
        await soon(running.policy.SetOverride(request))
        assert list(await listed(running)) == ["o1"]


async def test_a_profile_is_pushed_once(tmp_path: Path):
    async with serving(tmp_path) as running:
        request = service_pb2.PushProfileRequest(
            profile_json=make_profile().to_json(), request_id=new_id()
        )
        first = await soon(running.profiling.PushProfile(request))
        assert await soon(running.profiling.PushProfile(request)) == first
        assert (await actions(running, "push_profile")).count("push_profile") == 1
        installing = service_pb2.InstallProfileRequest(
            profile_json=make_profile().to_json(), request_id=new_id()
        )
        await running.introduce()
        installed = await soon(running.profiling.InstallProfile(installing))
        assert await soon(running.profiling.InstallProfile(installing)) == installed
        assert (await actions(running, "install_profile")).count("install_profile") == 1


def by(name: str) -> None:
    caller = Caller(f"{name}, pid 7", Right.OVERRIDE, identity=name)
    callers.begin(Call(caller, Right.OVERRIDE))


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
    by("ann")
    first = asyncio.create_task(ids.once(request, work))
    while not work.begun:  # noqa: ASYNC110  # two turns of the loop
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    again = asyncio.create_task(ids.once(request, work))
    work.may_end.set()
    assert (await soon(again)).missing
    assert (work.begun, work.done) == (1, 1)


async def test_each_caller_has_ids_of_its_own():
    ids, work = RequestIds(), Work()
    request = clearing(new_id())
    by("ann")
    await ids.once(request, work)
    by("bob")
    await ids.once(clearing(request.request_id, "another reason"), work)
    assert work.done == 2


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_ids, "KEPT_ANSWERS", 3)
    ids, work = RequestIds(), Work()
    by("ann")
    requests = [clearing(new_id()) for _ in range(5)]
    for request in requests:
        await ids.once(request, work)
    for request in requests[-2:]:
        await ids.once(request, work)
    assert work.done == 5
    # Those were forgotten to make room.
    await ids.once(requests[0], work)
    assert work.done == 6
    monkeypatch.setattr(request_ids, "KEPT_BYTES", 0)
    await ids.once(requests[-1], work)
    assert work.done == 7


async def test_an_answer_is_forgotten_after_its_time(monkeypatch: pytest.MonkeyPatch):
    ids, work = RequestIds(), Work()
    by("ann")
    request = clearing(new_id())
    await ids.once(request, work)
    with pytest.raises(RequestIdReusedError):
        await ids.once(clearing(request.request_id, "another reason"), work)
    monkeypatch.setattr(request_ids, "KEPT_SECONDS", 0.0)
    ids = RequestIds()
    await ids.once(request, work)
    await ids.once(request, work)
    assert work.done == 3


async def test_failed_work_is_forgotten_and_closing_ends_what_is_under_way():
    ids = RequestIds()
    by("ann")
    request = clearing(new_id())

    async def fails() -> policy_pb2.ClearOverrideResponse:
        raise SpeculationError("no")

    with pytest.raises(SpeculationError):
        await ids.once(request, fails)
    work = Work()
    work.may_end.clear()
    waiting = asyncio.create_task(ids.once(request, work))
    await asyncio.sleep(0)
    await ids.close()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert work.done == 0

"""Operators in command of a real sidecar, over its socket."""

import asyncio
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from speculation.v1 import plan_pb2, policy_pb2, service_pb2
from tests.support.override_calls import (
    FLEET,
    clear_override,
    gammas,
    list_overrides,
    make_override_request,
    plan_under,
    set_override,
)
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    SteerClient,
    failure,
    make_profile,
    read_next,
    running_sidecar,
    wait_until,
    with_timeout,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_pin_is_in_every_row_at_once_and_named(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send()
        await stream.plan()
        began = time.monotonic()
        answer = await set_override(running, gamma=1)
        plan = await plan_under(stream, "o1")
        took = time.monotonic() - began
        assert set(gammas(plan).values()) == {1}
        assert all(row.reason == plan_pb2.REASON_OVERRIDE for row in plan.rows)
        assert plan.reason == plan_pb2.REASON_OVERRIDE
        assert "under o1" in plan.reason_detail
        assert took < PATIENCE_SECONDS
        assert answer.held.remaining_seconds == pytest.approx(3600, abs=60)
        assert [e.engine_id for e in answer.effects] == ["engine-0"]
        assert answer.effects[0].changes[0].gamma_after == 1
        # And it is gone as quickly.
        await clear_override(running)
        plan = await plan_under(stream)
        assert set(gammas(plan).values()) != {1}
        assert await list_overrides(running) == {}


async def test_an_engine_that_comes_later_is_under_it_from_its_first_plan(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await set_override(running, scope=FLEET, off=True)
        request = service_pb2.IntroduceRequest()
        await running.introduce()
        plan = (await running.status()).plan
        del request
        assert set(gammas(plan).values()) == {0}


async def test_a_batch_range_splits_the_rows_where_it_ends(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, gamma=2, low=10)
        gamma_by_size = gammas((await running.status()).plan)
        assert 9 in gamma_by_size
        assert all((gamma == 2) == (size >= 10) for size, gamma in gamma_by_size.items())
        explanation = await running.explain(12)
        assert explanation.limits.gamma_max == 2
        assert [o.override.override_id for o in explanation.overrides] == ["o1"]
        assert {a.gamma for a in explanation.arms if not a.forbidden} == {2}
        assert not (await running.explain(9)).limits.overrides


async def test_what_leaves_nothing_to_run_ends_in_plain_decoding_and_says_so(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        answer = await set_override(running, gamma=30)
        assert [(s.min_batch_size, s.max_batch_size) for s in answer.effects[0].stuck] == [(1, 16)]
        plan = (await running.status()).plan
        assert set(gammas(plan).values()) == {0}
        assert "leave nothing that this engine can run" in plan.reason_detail


async def test_it_ends_by_itself_on_time(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send()
        await stream.plan()
        began = time.monotonic()
        await set_override(running, gamma=1, request={"ttl_seconds": 0.4})
        await plan_under(stream, "o1")
        await plan_under(stream)
        assert 0.39 < time.monotonic() - began < PATIENCE_SECONDS
        # The record follows: ending on time does not wait for it.
        query = policy_pb2.QueryAuditRequest()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                records = (await with_timeout(running.policy.QueryAudit(query))).records
                if [r.action for r in records] == ["expire", "set"]:
                    break
                await asyncio.sleep(0.02)


async def test_a_repeated_request_changes_nothing_and_another_one_is_refused(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        first = await set_override(running, gamma=1)
        again = await set_override(running, gamma=1)
        assert again.repeated
        assert again.held.etag == first.held.etag
        code, text = await failure(running.policy.SetOverride(make_override_request(gamma=2)))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert first.held.etag in text
        replaced = await set_override(running, gamma=2, request={"etag": first.held.etag})
        assert not replaced.repeated
        code, text = await failure(
            running.policy.SetOverride(
                make_override_request(gamma=3, request={"etag": first.held.etag})
            )
        )
        assert code is grpc.StatusCode.ABORTED
        assert replaced.held.etag in text
        assert (await list_overrides(running))["o1"].override.rule.gamma == 2


async def test_a_request_repeated_after_the_end_does_not_bring_it_back(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await set_override(running, gamma=1)
        await clear_override(running)
        code, text = await failure(running.policy.SetOverride(make_override_request(gamma=1)))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "was cleared before" in text
        code, _ = await failure(
            running.policy.ClearOverride(
                policy_pb2.ClearOverrideRequest(override_id="o1", author="a", reason="r")
            )
        )
        assert code is grpc.StatusCode.NOT_FOUND


async def test_a_dry_run_shows_and_changes_nothing(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        running.sidecar.profiles.add(make_profile())
        await running.introduce()
        before = (await running.status()).plan
        answer = await set_override(running, scope=FLEET, off=True, request={"dry_run": True})
        assert {c.gamma_after for e in answer.effects for c in e.changes} == {0}
        assert (await running.status()).plan == before
        assert await list_overrides(running) == {}
        records = (
            await with_timeout(running.policy.QueryAudit(policy_pb2.QueryAuditRequest()))
        ).records
        assert not records


async def test_overrides_and_audit_outlive_the_sidecar(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        held = (await set_override(running, gamma=1, scope=FLEET, request={"for_ever": True})).held
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        assert set(gammas((await running.status()).plan).values()) == {1}
        restored_override = (await list_overrides(running))["o1"]
        assert restored_override.etag == held.etag
        assert not restored_override.HasField("remaining_seconds")
        await clear_override(running, etag=restored_override.etag)
        records = (
            await with_timeout(running.policy.QueryAudit(policy_pb2.QueryAuditRequest()))
        ).records
        assert [(r.action, r.author, r.reason) for r in records] == [
            ("clear", "bob", "it is well again"),
            ("set", "ann", "the drafter is ill"),
        ]
        assert records[0].before.rule.gamma == 1
        assert not records[0].HasField("after")
        who = f"uid {os.getuid()}, gid {os.getgid()}, pid {os.getpid()} ("
        assert all(record.origin.startswith(who) for record in records)


async def test_those_who_watch_see_what_is_there_and_what_changes(tmp_path: Path):
    kinds = policy_pb2.WatchOverridesResponse
    async with running_sidecar(tmp_path) as running:
        await set_override(running, name="old", gamma=1)
        watch: Any = running.policy.WatchOverrides(policy_pb2.WatchOverridesRequest())
        assert (await read_next(watch)).kind == kinds.KIND_PRESENT
        await set_override(running, name="new", off=True, request={"ttl_seconds": 0.3})
        news = [await read_next(watch) for _ in range(2)]
        assert [(n.kind, n.held.override.override_id) for n in news] == [
            (kinds.KIND_SET, "new"),
            (kinds.KIND_ENDED, "new"),
        ]
        watch.cancel()


async def test_exploration_can_be_forbidden(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        running.sidecar.profiles.add(make_profile())
        await running.introduce()
        await set_override(running, deny_exploration=True)
        explanation = await running.explain()
        assert explanation.limits.exploration_denied


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing demanded": ({}, "must demand something"),
    "no scope": ({"scope": {}, "off": True}, "scope: an engine, a model or the fleet"),
    "fleet not meant": ({"scope": {"fleet": False}, "off": True}, "scope: an engine, a model"),
    "empty engine": ({"scope": {"engine_id": ""}, "off": True}, "name the engine"),
    "gamma too large": ({"gamma": 65}, "gamma 65 must be in [0, 64]"),
    "pinned and bounded": ({"gamma": 3, "gamma_max": 5}, "gamma_min and gamma_max must be omitted"),
    "no time per token": ({"tpot_max_seconds": 0.0}, "tpot_max_seconds 0"),
    "endless time per token": ({"tpot_max_seconds": float("nan")}, "tpot_max_seconds nan"),
    "off and drafting": ({"off": True, "gamma_min": 1}, "off and drafting"),
    "empty range": ({"off": True, "low": 9, "high": 3}, "the range is empty"),
    "no author": ({"off": True, "author": ""}, "author: 0 characters"),
    "no reason": ({"off": True, "reason": ""}, "reason: 0 characters"),
    "long reason": ({"off": True, "reason": "x" * 600}, "reason: 600 characters"),
    "control characters": ({"off": True, "reason": "a\x1b[31m"}, "only printable"),
    "bad id": ({"name": "../../etc", "off": True}, "override id"),
    "time of zero": ({"off": True, "request": {"ttl_seconds": 0.0}}, "ttl_seconds 0"),
    "time in the past": ({"off": True, "request": {"ttl_seconds": -5.0}}, "ttl_seconds -5"),
    "time not a number": ({"off": True, "request": {"ttl_seconds": float("nan")}}, "nan"),
    "time without end": ({"off": True, "request": {"ttl_seconds": float("inf")}}, "set for_ever"),
    "time too long": ({"off": True, "request": {"ttl_seconds": 1e7}}, "at most 604800"),
    "not permanent": ({"off": True, "request": {"for_ever": False}}, "for_ever must be true"),
    "unknown regime": ({"regime": {"mode": 99}}, "is unspecified or unknown"),
}


@pytest.mark.parametrize(("fields", "text"), BAD.values(), ids=BAD.keys())
async def test_an_override_that_cannot_be_is_refused_and_says_why(
    tmp_path: Path, fields: dict[str, Any], text: str
):
    async with running_sidecar(tmp_path) as running:
        code, message = await failure(running.policy.SetOverride(make_override_request(**fields)))
        assert code is INVALID
        assert text in message
        assert await list_overrides(running) == {}


async def test_an_etag_that_is_none_and_a_page_that_is_none_are_refused(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        code, _ = await failure(
            running.policy.SetOverride(
                make_override_request(off=True, request={"etag": "nonsense"})
            )
        )
        assert code is grpc.StatusCode.ABORTED
        for query in ({"limit": 5000}, {"before_sequence": "x'; drop"}):
            code, _ = await failure(
                running.policy.QueryAudit(policy_pb2.QueryAuditRequest(**query))
            )
            assert code is INVALID


async def test_a_store_that_cannot_be_written_refuses_and_what_is_there_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, name="good", gamma=1)

        def full(*_: object) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        # Between the entry and its record, which are one transaction.
        monkeypatch.setattr("controller.store.database._insert_record", full)
        code, text = await failure(
            running.policy.SetOverride(make_override_request("bad", off=True))
        )
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "No space left on device; nothing was changed" in text
        answer = await with_timeout(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
        assert not answer.store.ok
        assert "No space left" in answer.store.detail
        assert not (await running.explain()).store.ok
        assert set(gammas((await running.status()).plan).values()) == {1}
        monkeypatch.undo()
        await set_override(running, name="bad", off=True)
        assert (await running.explain()).store.ok
    async with running_sidecar(tmp_path) as running:
        assert set(await list_overrides(running)) == {"good", "bad"}


async def test_text_that_is_no_utf_8_is_refused_and_the_sidecar_goes_on(tmp_path: Path):
    raw = (
        make_override_request(off=True, reason="because!")
        .SerializeToString()
        .replace(b"because!", b"bec\xff\xfese!")
    )
    async with running_sidecar(tmp_path) as running:
        call: Any = running.operators.unary_unary("/speculation.v1.PolicyService/SetOverride")
        for broken in (raw, b"\xff" * 50):
            code, text = await failure(call(broken))
            assert code is INVALID
            assert "the request cannot be read" in text
        assert await list_overrides(running) == {}


async def test_there_is_an_end_to_the_number_of_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("controller.service.state.override_registry.LIVE_ENTRIES_MAX", 3)
    async with running_sidecar(tmp_path) as running:
        for number in range(3):
            etag = (await set_override(running, name=f"o{number}", off=True)).held.etag
        code, text = await failure(
            running.policy.SetOverride(make_override_request("o3", off=True))
        )
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "3 overrides are in force" in text
        # One that is there can still be changed.
        await set_override(running, name="o2", gamma=1, request={"etag": etag})


async def test_the_narrower_scope_wins_in_the_plan(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await running.introduce("engine-1")
        await set_override(running, name="fleet", scope=FLEET, gamma_max=1)
        await set_override(running, name="mine", gamma=3)
        plans = {name: (await running.status(name)).plan for name in ("engine-0", "engine-1")}
        assert set(gammas(plans["engine-0"]).values()) == {3}
        assert max(gammas(plans["engine-1"]).values()) <= 1
        assert list(plans["engine-0"].overrides) == ["fleet", "mine"]
        assert list(plans["engine-1"].overrides) == ["fleet"]


async def test_many_operators_at_once_lose_nothing(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await asyncio.gather(
            *(set_override(running, name=f"o{i}", gamma_max=i % 8) for i in range(40))
        )
        assert len(await list_overrides(running)) == 40
        await asyncio.gather(*(clear_override(running, f"o{i}") for i in range(40)))
        assert await list_overrides(running) == {}
        await wait_until(lambda: not running.sidecar.override_registry.active())
        query = policy_pb2.QueryAuditRequest(limit=1000)
        records = (await with_timeout(running.policy.QueryAudit(query))).records
        assert len(records) == 80
        assert len({r.sequence for r in records}) == 80

"""GetOverride, lists in pages, and clearing what is gone."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from controller.client.paging import collect_pages_async
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.service.rpc import store_messages
from controller.store.interface import LIVE_ENTRIES_MAX, Actor
from speculation.v1 import policy_pb2, service_pb2
from tests.support.error_details import failure_details
from tests.support.override_calls import FLEET, list_overrides, set_override
from tests.support.service_harness import make_profile, running_sidecar, with_timeout

NAMES = [f"o{number}" for number in range(5)]


def clearing(name: str, **fields: Any) -> policy_pb2.ClearOverrideRequest:
    return policy_pb2.ClearOverrideRequest(
        override_id=name, author="bob", reason="it is well again", **fields
    )


def getting(running, name: str) -> Awaitable[policy_pb2.GetOverrideResponse]:
    return with_timeout(running.policy.GetOverride(policy_pb2.GetOverrideRequest(override_id=name)))


def policy_file(directory: Path) -> Path:
    path = directory / "policy.yaml"
    path.write_text("policies: [{name: p, fleet: true, reason: measured, gamma: 1}]")
    return path


async def test_an_override_is_got_by_its_id(tmp_path: Path):
    async with running_sidecar(tmp_path, policy=policy_file(tmp_path)) as running:
        set_one = (await set_override(running, scope=FLEET, gamma=1)).held
        held = (await getting(running, "o1")).held
        assert held.remaining_seconds <= set_one.remaining_seconds
        held.remaining_seconds = set_one.remaining_seconds
        assert held == set_one
        assert (await getting(running, "policy:p")).held.origin.endswith("policy.yaml")
        for name in ("o2", "", "x" * 10_000):
            assert (await failure_details(getting(running, name))).reason == "OVERRIDE_NOT_FOUND"


async def test_pages_of_overrides_add_up(tmp_path: Path):
    async with running_sidecar(tmp_path, policy=policy_file(tmp_path)) as running:
        for name in reversed(NAMES):
            await set_override(running, name=name, scope=FLEET, gamma=1)

        def page(size: int) -> Callable[[str], Awaitable[policy_pb2.ListOverridesResponse]]:
            kind = policy_pb2.ListOverridesRequest
            return lambda token: with_timeout(
                running.policy.ListOverrides(kind(page_size=size, page_token=token))
            )

        def names(answer: policy_pb2.ListOverridesResponse) -> list[str]:
            return [held.override.override_id for held in answer.overrides]

        first = await page(4)("")
        assert names(first) == NAMES[:4]
        second = await page(4)(first.next_page_token)
        assert names(second) == [*NAMES[4:], "policy:p"]
        assert not second.next_page_token
        assert first.store.ok
        assert second.policy.ok
        for size in (0, 1, 4):
            listing = await collect_pages_async(page(size), "overrides")
            assert names(listing) == [*NAMES, "policy:p"]
            assert not listing.next_page_token


async def test_a_client_without_pages_sees_as_many_overrides_as_there_can_be(tmp_path: Path):
    """Older clients send no page size and read no token."""
    worst = "\N{GRINNING FACE}"
    async with running_sidecar(tmp_path) as running:
        for number in range(LIVE_ENTRIES_MAX):
            await running.sidecar.override_registry.set_override(
                *largest(f"{number:03}".ljust(128, "x"), worst)
            )
        answer = await with_timeout(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
        assert len(answer.overrides) == LIVE_ENTRIES_MAX
        assert not answer.next_page_token


def largest(name: str, character: str) -> tuple[Any, ...]:
    denied = tuple(character * 62 + f"{number:02}" for number in range(16))
    override = Override(
        name, Scope(ScopeKind.MODEL, character * 256), Rule(deny_drafters=denied),
        character * 128, character * 512,
    )  # fmt: skip
    return override, 3600.0, "", Actor("ann", "test", "here")


async def test_pages_of_profiles_add_up_and_the_newest_comes_first(tmp_path: Path):
    days = [f"2020-01-0{day}" for day in range(1, 6)]
    async with running_sidecar(tmp_path) as running:
        for day in (days[3], days[0], days[4], days[1], days[2]):
            text = make_profile(f"model of {day}", measured_at=day).to_json()
            await with_timeout(
                running.profiling.PushProfile(service_pb2.PushProfileRequest(profile_json=text))
            )

        def page(size: int) -> Callable[[str], Awaitable[service_pb2.ListProfilesResponse]]:
            kind = service_pb2.ListProfilesRequest
            return lambda token: with_timeout(
                running.profiling.ListProfiles(kind(page_size=size, page_token=token))
            )

        for size in (0, 1, 2, 5):
            listing = await collect_pages_async(page(size), "profiles")
            assert [row.measured_at for row in listing.profiles] == days[::-1]
        first = await page(2)("")
        # What is pushed meanwhile moves nothing that is still to come.
        text = make_profile("model of 2020-01-01", measured_at="2020-02-01").to_json()
        await with_timeout(
            running.profiling.PushProfile(service_pb2.PushProfileRequest(profile_json=text))
        )
        second = await page(2)(first.next_page_token)
        assert [row.measured_at for row in second.profiles] == [days[2], days[1]]


async def test_pages_of_the_audit_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running_sidecar(tmp_path) as running:
        for name in NAMES:
            await set_override(running, name=name, scope=FLEET, gamma=1)

        def page(limit: int) -> Callable[[str], Awaitable[policy_pb2.QueryAuditResponse]]:
            kind = policy_pb2.QueryAuditRequest
            return lambda token: with_timeout(
                running.policy.QueryAudit(kind(limit=limit, page_token=token))
            )

        async def names(limit: int) -> list[str]:
            listing = await collect_pages_async(page(limit), "records")
            return [record.override_id for record in listing.records]

        for limit in (0, 1, 2, 5):
            assert await names(limit) == NAMES[::-1]
        assert not (await page(5)("")).next_page_token
        # A page that would not fit into a message ends earlier.
        monkeypatch.setattr(store_messages, "BYTES_MAX", 1)
        assert len((await page(5)("")).records) == 1
        assert await names(5) == NAMES[::-1]
        both = policy_pb2.QueryAuditRequest(page_token="5", before_sequence="4")
        assert (await failure_details(running.policy.QueryAudit(both))).field == "page_token"


async def test_clearing_what_is_gone_is_no_error_if_the_caller_says_so(tmp_path: Path):
    async with running_sidecar(tmp_path, policy=policy_file(tmp_path)) as running:
        await set_override(running, scope=FLEET, gamma=1)
        request = clearing("o1", allow_missing=True)
        assert not (await with_timeout(running.policy.ClearOverride(request))).missing
        answer = await with_timeout(running.policy.ClearOverride(request))
        assert answer.missing
        assert not answer.effects
        # Everything else is refused as before.
        await set_override(running, name="o2", scope=FLEET, gamma=1)
        changed = clearing("o2", allow_missing=True, etag="1-x")
        assert (
            await failure_details(running.policy.ClearOverride(changed))
        ).reason == "OVERRIDE_CHANGED"
        policy = clearing("policy:p", allow_missing=True)
        assert (
            await failure_details(running.policy.ClearOverride(policy))
        ).reason == "OVERRIDE_NOT_FOUND"
        nobody = policy_pb2.ClearOverrideRequest(override_id="o9", allow_missing=True)
        assert (await failure_details(running.policy.ClearOverride(nobody))).field == "author"
        assert set(await list_overrides(running)) == {"o2", "policy:p"}

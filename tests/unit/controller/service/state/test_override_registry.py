"""What of a store is in force: as many entries as may be, the newest, and what is understood."""

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.service.net.errors import TooManyOverridesError
from controller.service.state.override_registry import OverrideRegistry
from controller.store.database import Database, StoredEntry
from controller.store.file_store import FileStore
from controller.store.interface import LIVE_ENTRIES_MAX, Actor
from controller.wire.overrides import override_to_json
from speculation.v1 import policy_pb2, policy_pb2_grpc
from tests.support.credentials import free_address, token_line
from tests.support.service_harness import failure, running_sidecar, with_timeout
from tests.unit.controller.service.sessions.small_registry import registry

ANN = Actor("ann", "because", "uid 1000")


def override(name: str) -> Override:
    return Override(name, Scope(ScopeKind.FLEET), Rule(gamma=1), "ann", "because")


def database_of(folder: Path, bodies: Iterable[tuple[str, str]]) -> None:
    """A database with these live entries, of ascending revisions."""
    folder.mkdir(parents=True, exist_ok=True)
    database = Database(folder / "overrides.db")
    database.replace(
        [
            StoredEntry(name, number, body, None, time.time(), "")
            for number, (name, body) in enumerate(bodies, 1)
        ]
    )
    database.close()


async def opened(folder: Path) -> OverrideRegistry:
    override_registry = OverrideRegistry(FileStore(folder), registry())
    await override_registry.open()
    return override_registry


def in_force(override_registry: OverrideRegistry) -> set[str]:
    return {held.override.override_id for held in override_registry.list_active()}


async def test_of_a_database_with_too_many_the_newest_are_in_force(tmp_path: Path):
    names = [f"o{number}" for number in range(LIVE_ENTRIES_MAX + 30)]
    database_of(tmp_path, ((name, override_to_json(override(name))) for name in names))
    override_registry = await opened(tmp_path)
    try:
        assert in_force(override_registry) == set(names[30:])
        assert override_registry.health.ok
        assert override_registry.health.unusable_count == 30
        assert set(override_registry.health.unusable) <= set(names[:30])
        with pytest.raises(TooManyOverridesError):
            await override_registry.set_override(override("another"), None, "", ANN)
        # One that ends makes room for the newest of the others, and one of those can be ended, too.
        await override_registry.clear_override("o100", "", ANN)
        assert in_force(override_registry) == set(names[29:]) - {"o100"}
        assert override_registry.is_unusable("o28")
        await override_registry.clear_override("o28", "", ANN)
        assert override_registry.health.unusable_count == 28
        await override_registry.clear_override("o101", "", ANN)
        assert "o27" in in_force(override_registry)
    finally:
        await override_registry.close()


async def test_as_many_as_may_be_are_set_at_once_and_no_more(tmp_path: Path):
    names = [f"o{number}" for number in range(LIVE_ENTRIES_MAX - 3)]
    database_of(tmp_path, ((name, override_to_json(override(name))) for name in names))
    override_registry = await opened(tmp_path)
    try:
        setting = (
            override_registry.set_override(override(f"new{number}"), None, "", ANN)
            for number in range(10)
        )
        done = await asyncio.gather(*setting, return_exceptions=True)
        assert sum(isinstance(item, TooManyOverridesError) for item in done) == 7
        assert len(in_force(override_registry)) == LIVE_ENTRIES_MAX
    finally:
        await override_registry.close()


NOT_UNDERSTOOD = {
    "newer": '{"overrideId": "newer", "fieldOfTheFuture": 1}',
    "text": "no JSON",
    "deep": "[" * 50_000,
    "large": '{"minBatchSize": 1e400}',
    "alias": override_to_json(override("other")),
    "\x1b[31mid": override_to_json(override("good")),
    "escape": json.dumps({"\x1b]0;pwn\x07": 1}),
}


async def test_what_is_not_understood_is_named_in_plain_text_and_stops_nothing(tmp_path: Path):
    bodies = NOT_UNDERSTOOD | {"good": override_to_json(override("good"))}
    database_of(tmp_path, bodies.items())
    override_registry = await opened(tmp_path)
    try:
        assert in_force(override_registry) == {"good"}
        health = override_registry.health
        assert health.unusable_count == len(health.unusable) == len(NOT_UNDERSTOOD)
        assert all(f"{name}{reason}".isprintable() for name, reason in health.unusable.items())
        await override_registry.set_override(override("another"), None, "", ANN)
        for name in NOT_UNDERSTOOD:
            await override_registry.clear_override(name, "", ANN)
        assert override_registry.health.unusable_count == 0
        assert in_force(override_registry) == {"good", "another"}
    finally:
        await override_registry.close()


async def test_whoever_may_act_on_some_engines_ends_nothing_that_may_be_for_others(tmp_path: Path):
    database_of(tmp_path / "controller.sock.state", NOT_UNDERSTOOD.items())
    address, access = free_address(), tmp_path / "access"
    access.write_text(token_line("read,override", "secret", "pod-a engine:pod-a-*"))
    metadata = (("authorization", "Bearer secret"),)
    async with (
        running_sidecar(tmp_path, tcp=address, access=access) as running,
        grpc.aio.insecure_channel(address) as channel,
    ):
        policy: Any = policy_pb2_grpc.PolicyServiceStub(channel)
        asked = policy_pb2.ClearOverrideRequest(override_id="newer", author="a", reason="b")
        code, _ = await failure(policy.ClearOverride(asked, metadata=metadata))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        # Of an operator it is taken, and the state of the store names the others.
        await with_timeout(running.policy.ClearOverride(asked))
        store = (
            await with_timeout(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
        ).store
        assert store.unusable_count == len(NOT_UNDERSTOOD) - 1
        assert not any(line.startswith("newer:") for line in store.unusable)

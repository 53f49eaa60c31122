"""Profiles of the fleet under attack: floods of introductions and of lists beside foreign ones."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from controller.core.cost.profile import Profile
from controller.service.state.profile_registry import identity_of
from controller.store.interface import ACCEPTANCE, PROFILES, Blob, BlobKind, StoreUnavailableError
from speculation.v1 import service_pb2
from tests.support.service_harness import (
    RunningSidecar,
    failure,
    make_profile,
    running_sidecar,
    wait_until,
    with_timeout,
)

FOREIGN = 6
DAYS = ("2020-01-01", "2020-01-02")


async def push(running: RunningSidecar, *profiles: Profile) -> None:
    for profile in profiles:
        request = service_pb2.PushProfileRequest(profile_json=profile.to_json())
        await with_timeout(running.profiling.PushProfile(request))


async def listed(running: RunningSidecar) -> Sequence[service_pb2.ShelvedProfile]:
    answer = await with_timeout(running.profiling.ListProfiles(service_pb2.ListProfilesRequest()))
    return answer.profiles


@asynccontextmanager
async def among_foreign(folder: Path) -> AsyncIterator[RunningSidecar]:
    """A sidecar with profiles of engines that none of its own resembles."""
    async with running_sidecar(folder, warm_start=False) as running:
        for number in range(FOREIGN):
            await push(running, *(make_profile(f"foreign-{number}", day) for day in DAYS))
        yield running


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts profiles that are parsed, by their target model."""
    counter, parse = Counter[str](), Profile.from_json

    def counted(text: str) -> Profile:
        profile = parse(text)
        counter[profile.fingerprint.target_model] += 1
        return profile

    monkeypatch.setattr(Profile, "from_json", counted)
    return counter


class Gate:
    """Stands before the reads of a sidecar's store: counts them, and lets them through if open."""

    def __init__(
        self, running: RunningSidecar, monkeypatch: pytest.MonkeyPatch, kind: BlobKind
    ) -> None:
        self.open = asyncio.Event()
        self.reads = Counter[str]()
        self.failing: Exception | None = None
        blobs = running.sidecar.store.blobs
        read = blobs.items

        async def items(wanted_kind: BlobKind, name: str) -> Sequence[Blob]:
            if wanted_kind is kind:
                self.reads[name] += 1
                await self.open.wait()
                if self.failing is not None:
                    raise self.failing
            return await read(wanted_kind, name)

        monkeypatch.setattr(blobs, "items", items)


async def test_introductions_read_no_profile_of_another_engine(
    tmp_path: Path, parsed: Counter[str]
):
    async with among_foreign(tmp_path) as running:
        parsed.clear()
        for number in range(20):
            await running.introduce("again")
            await running.introduce(f"engine-{number}")
        await wait_until(lambda: not running.sidecar._fleet_profiles.searches)
        assert not parsed
        # Whoever asks learns why, and each profile is read once for all who ask.
        await push(running, make_profile("foreign-0", "2020-01-03"))
        parsed.clear()
        request = service_pb2.GetProfileRequest(engine_id="again")
        for _ in range(5):
            code, text = await failure(running.profiling.GetProfile(request))
            assert (code, "it has none for 'target'" in text) == (grpc.StatusCode.NOT_FOUND, True)
        assert parsed == {f"foreign-{n}": len(DAYS) + (n == 0) for n in range(FOREIGN)}


async def test_engines_that_need_the_same_profile_share_one_search(
    tmp_path: Path, parsed: Counter[str], monkeypatch: pytest.MonkeyPatch
):
    async with among_foreign(tmp_path) as running:
        gate = Gate(running, monkeypatch, PROFILES)
        for number in range(20):
            await running.introduce(f"engine-{number}")
        identity = identity_of(make_profile())
        profiles = [make_profile(measured_at=day) for day in DAYS]
        for profile in profiles:
            blobs = running.sidecar.store.blobs
            await blobs.put(PROFILES, identity, profile.profile_id, profile.to_json())
        parsed.clear()
        await wait_until(lambda: gate.reads)
        gate.open.set()
        sessions = list(running.sidecar.registry)
        assert len(sessions) == 20
        await wait_until(lambda: all(session.core.profile_id for session in sessions))
        assert gate.reads == {identity: 1}
        assert parsed == {"target": len(DAYS)}


async def test_an_engine_that_comes_again_and_again_has_one_search_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with among_foreign(tmp_path) as running:
        gate = Gate(running, monkeypatch, PROFILES)
        searches = running.sidecar._fleet_profiles.searches
        for number in range(30):
            await running.introduce("evil", target_model=f"other-{number}")
            await running.introduce("twin", target_model="other-0")
            assert len(searches) <= 2
        assert len(gate.reads) == 1
        gate.open.set()
        await wait_until(lambda: not searches)
        # The first one had begun; of the others only the last one's session is not over.
        assert len(gate.reads) <= 3
        assert not set(gate.reads) & {identity_of(make_profile(f"other-{n}")) for n in range(1, 29)}


async def test_a_search_that_fails_keeps_no_other_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with among_foreign(tmp_path) as running:
        gate = Gate(running, monkeypatch, PROFILES)
        gate.open.set()
        for error in (StoreUnavailableError("it is away"), ValueError("a mistake")):
            gate.failing = error
            await running.introduce()
            await wait_until(lambda: not running.sidecar._fleet_profiles.searches)
        gate.failing = None
        await push(running, make_profile())
        await wait_until(
            lambda: running.sidecar.registry.find_by_engine("engine-0").core.profile_id
        )


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_a_profile_that_comes_while_it_is_searched_for_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
):
    """The search has looked already when the profile is pushed, and not yet ended."""
    async with running_sidecar(tmp_path, warm_start=False) as running:
        looked, go_on = asyncio.Event(), asyncio.Event()
        blobs = running.sidecar.store.blobs
        read = blobs.items

        async def items(kind: BlobKind, name: str) -> Sequence[Blob]:
            blobs = await read(kind, name)
            looked.set()
            await go_on.wait()
            return blobs

        monkeypatch.setattr(blobs, "items", items)
        await running.introduce()
        await wait_until(looked.is_set)
        if is_interrupted:
            running.sidecar.supervisor.cancel("profile_searches")
            profile = make_profile()
            await blobs.put(PROFILES, identity_of(profile), profile.profile_id, profile.to_json())
        else:
            await push(running, make_profile())
        go_on.set()
        await wait_until(
            lambda: running.sidecar.registry.find_by_engine("engine-0").core.profile_id
        )


async def test_engines_that_need_the_same_estimates_share_one_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with running_sidecar(tmp_path) as running:
        gate = Gate(running, monkeypatch, ACCEPTANCE)
        for number in range(10):
            await running.introduce(f"engine-{number}")
            await running.introduce("again", target_model=f"other-{number}")
        searches = running.sidecar._fleet_estimates.searches
        assert len(searches) == 11
        gate.open.set()
        await wait_until(lambda: not searches)
        # One for those who waited when it began, and one for all who have come since.
        assert sum(gate.reads.values()) <= 3
        assert len(gate.reads) == 2


async def test_lists_read_each_profile_once(
    tmp_path: Path, parsed: Counter[str], monkeypatch: pytest.MonkeyPatch
):
    async with among_foreign(tmp_path) as running:
        parsed.clear()
        gate = Gate(running, monkeypatch, PROFILES)
        gate.open.set()
        answers = await asyncio.gather(*(listed(running) for _ in range(30)))
        assert {len(rows) for rows in answers} == {FOREIGN}
        assert set(gate.reads.values()) == {1}
        # What is pushed here is listed at once, and the others are not parsed again.
        await push(running, make_profile("foreign-0", "2020-01-03"))
        assert [len(row.measurements) for row in await listed(running)] == [3, *[2] * (FOREIGN - 1)]
        expected = {f"foreign-{number}": len(DAYS) for number in range(FOREIGN)}
        # The first one's: when it was pushed, and then all three of it.
        assert parsed == expected | {"foreign-0": len(DAYS) + 1 + 3}


async def test_a_profile_that_no_engine_could_have_is_not_listed(tmp_path: Path):
    async with among_foreign(tmp_path) as running:
        await push(running, make_profile("x" * 100_000))
        assert len(await listed(running)) == FOREIGN


async def test_a_profile_that_cannot_be_merged_spoils_neither_its_identity_nor_the_list(
    tmp_path: Path,
):
    """Each of the two is a profile, and together they have more steps than a profile may have."""
    async with among_foreign(tmp_path) as running:
        good = make_profile(measured_at=DAYS[0])
        most = [replace(cell, steps=2**31 - 1) for cell in good.cells]
        await push(running, good, replace(good, measured_at=DAYS[1], cells=tuple(most)))
        rows = {row.profile_id: list(row.measurements) for row in await listed(running)}
        assert len(rows) == FOREIGN + 1
        assert rows[good.profile_id] == [good.profile_id]
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.core.profile_id == good.profile_id)
        request = service_pb2.GetProfileRequest(engine_id="engine-0")
        answer = await with_timeout(running.profiling.GetProfile(request))
        assert answer.profile_json == good.to_json()


async def test_profiles_that_are_brought_at_once_are_parsed_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parse, parsing, most = Profile.from_json, 0, 0

    def slow(text: str) -> Profile:
        nonlocal parsing, most
        parsing += 1
        most = max(most, parsing)
        time.sleep(0.01)
        parsing -= 1
        return parse(text)

    async with running_sidecar(tmp_path, warm_start=False) as running:
        monkeypatch.setattr(Profile, "from_json", slow)
        await asyncio.gather(*(push(running, make_profile(f"m-{n}")) for n in range(10)))
        assert len(await listed(running)) == 10
    assert most == 1

"""Policy from a file at a real sidecar: in force, displaced, changed, bad, gone."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.recording.events import Overridden
from controller.recording.recording import RecordingPart, find
from controller.recording.replay import replay
from controller.service.metrics.sidecar import OF_THE_SIDECAR, SidecarSnapshot
from controller.settings.policy_file import PolicyFileError
from speculation.v1 import policy_pb2
from tests.support.override_calls import FLEET, asked, clear, gammas, listed, set_
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    Running,
    SteerClient,
    failure,
    report_message,
    serving,
    soon,
    until,
    written,
)

SCHEDULE = """\
policies:
  - name: day
    fleet: true
    reason: measured
    schedule:
      - {batch: 1-4, gamma: 3}
      - {batch: 5-, gamma: 1}
"""
BOUND = "policies:\n  - {name: bound, model: target, reason: memory, at_most: 2}\n"
BAD = "policies:\n  - {name: bound, model: target, reason: memory, at_mots: 2}\n"


class Mounted:
    """A ConfigMap as a kubelet mounts it: the file is a link into a directory that is swapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "mount"
        self._folder.mkdir()
        self._number = 0
        self.path = self._folder / "policy.yaml"

    def write(self, text: str) -> None:
        self._number += 1
        content = self._folder / f"..{self._number}"
        content.mkdir()
        (content / "policy.yaml").write_text(text)
        link = self._folder / "..data_tmp"
        link.symlink_to(content.name)
        link.replace(self._folder / "..data")
        if not self.path.is_symlink():
            self.path.symlink_to("..data/policy.yaml")
        before = self._folder / f"..{self._number - 1}"
        if before.exists():
            shutil.rmtree(before)

    def remove(self) -> None:
        self.path.unlink()


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


async def planned(running: Running) -> dict[int, int]:
    return gammas((await running.status()).plan)


async def audited(running: Running) -> policy_pb2.AuditRecord:
    """The newest record, once there is one: it is written beside what the sidecar does."""
    request = policy_pb2.QueryAuditRequest(limit=1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (found := (await soon(running.policy.QueryAudit(request))).records):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[0]


async def news_of(watch: Any) -> policy_pb2.WatchOverridesResponse:
    news: policy_pb2.WatchOverridesResponse = await soon(watch.read())
    return news


async def status(running: Running) -> policy_pb2.PolicyStatus:
    answer = await soon(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
    assert answer.HasField("policy")
    return answer.policy


def scheduled(plan: dict[int, int]) -> bool:
    return all(gamma == (3 if size <= 4 else 1) for size, gamma in plan.items())


async def test_a_schedule_is_in_force_from_the_first_plan_and_listed_with_its_origin(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        assert scheduled(await planned(running))
        found = await listed(running)
        assert list(found) == ["policy:day:1", "policy:day:5"]
        held = found["policy:day:1"]
        assert (held.origin, held.override.from_file) == (str(mounted.path), True)
        assert not held.HasField("remaining_seconds")
        lines = (await running.sidecar._status_cache.state())["overrides"]
        assert {line["author"] for line in lines} == {f"policy file {mounted.path}"}
        explained = await running.explain(12)
        assert list(explained.limits.overrides) == ["policy:day:5"]
        assert (await status(running)).ok


async def test_an_override_displaces_it_whatever_its_scope_and_it_comes_back(
    tmp_path: Path, mounted: Mounted
):
    mounted.write("policies:\n  - {name: pod, engine: engine-0, reason: r, gamma: 3}\n")
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        answer = await set_(running, scope=FLEET, gamma=1)
        assert answer.effects[0].constrains
        assert set((await planned(running)).values()) == {1}
        found = await listed(running)
        assert {name: held.origin for name, held in found.items()} == {
            "o1": "", "policy:pod": str(mounted.path)
        }  # fmt: skip
        await clear(running)
        assert set((await planned(running)).values()) == {3}


async def test_a_change_of_the_mounted_map_reaches_the_engine_and_the_audit(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    async with serving(tmp_path, policy=mounted.path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send()
        await stream.plan()
        watch = running.policy.WatchOverrides(policy_pb2.WatchOverridesRequest())
        assert {(await news_of(watch)).held.override.override_id for _ in range(2)} == {
            "policy:day:1", "policy:day:5"
        }  # fmt: skip
        mounted.write(BOUND)
        plan = await stream.plan()
        assert max(gammas(plan).values()) <= 2
        news = {
            (it.kind, it.held.override.override_id)
            for it in [await news_of(watch) for _ in range(3)]
        }
        kinds = policy_pb2.WatchOverridesResponse.Kind
        assert news == {
            (kinds.KIND_ENDED, "policy:day:1"),
            (kinds.KIND_ENDED, "policy:day:5"),
            (kinds.KIND_SET, "policy:bound"),
        }
        record = await audited(running)
        assert (record.action, record.origin) == ("policy", str(mounted.path))
        assert record.reason == "1 entries, 2 before"


async def test_a_bad_file_is_shown_and_what_it_said_before_stays_in_force(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        registry = running.sidecar.override_registry
        mounted.write(BAD)
        await until(lambda: registry.policy.error)
        assert scheduled(await planned(running))
        told = await status(running)
        assert not told.ok
        assert told.detail == f"{mounted.path}, line 2: at_mots is not a key of the policy file"
        assert measured(running)["speculation_policy_ok"] == 0
        assert measured(running)["speculation_policy_entries"] == 2
        mounted.write(BOUND)
        await until(lambda: not registry.policy.error)
        assert list(await listed(running)) == ["policy:bound"]
        assert measured(running)["speculation_policy_ok"] == 1


def measured(running: Running) -> dict[str, float]:
    registry = running.sidecar.override_registry
    view = SidecarSnapshot([], [], registry.policy, registry.health, {})
    return {
        sample.name: sample.value for family in OF_THE_SIDECAR for sample in written(family, view)
    }


async def test_a_file_that_goes_takes_its_policy_with_it(tmp_path: Path, mounted: Mounted):
    mounted.write(SCHEDULE)
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        mounted.remove()
        await until(lambda: not running.sidecar.override_registry.policy.overrides)
        assert not await listed(running)
        assert (await status(running)).ok


async def test_a_sidecar_that_restarts_with_a_bad_file_goes_on_with_what_it_said_before(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    async with serving(tmp_path, policy=mounted.path) as running:
        kept = running.sidecar._settings.state_path / "policy.yaml"
        assert kept.stat().st_mode & 0o777 == 0o640
    mounted.write(BAD)
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        assert scheduled(await planned(running))
        assert "at_mots" in (await status(running)).detail


async def test_a_copy_that_cannot_be_kept_keeps_no_policy_out(tmp_path: Path, mounted: Mounted):
    mounted.write(SCHEDULE)
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        registry = running.sidecar.override_registry
        kept = running.sidecar._settings.state_path / "policy.yaml"
        kept.unlink()
        (kept / "in the way").mkdir(parents=True)
        mounted.write(BOUND)
        await until(lambda: len(registry.policy.overrides) == 1)
        mounted.remove()
        await until(lambda: not registry.policy.overrides)
        mounted.write(SCHEDULE)
        await until(lambda: len(registry.policy.overrides) == 2)


async def test_a_first_start_with_a_bad_file_is_refused(tmp_path: Path, mounted: Mounted):
    mounted.write(BAD)
    with pytest.raises(PolicyFileError, match="line 2: at_mots is not a key"):
        async with serving(tmp_path, policy=mounted.path):
            pass
    with pytest.raises(PolicyFileError, match="there is no directory"):
        async with serving(tmp_path, policy=tmp_path / "away" / "policy.yaml"):
            pass


async def test_without_a_file_in_its_directory_there_is_no_policy_until_one_comes(
    tmp_path: Path, mounted: Mounted
):
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        assert (await status(running)).ok
        assert not await listed(running)
        mounted.write(BOUND)
        await until(lambda: running.sidecar.override_registry.policy.overrides)
        assert max((await planned(running)).values()) <= 2


async def test_without_the_setting_nothing_is_said_of_a_policy(tmp_path: Path):
    async with serving(tmp_path) as running:
        answer = await soon(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
        assert not answer.HasField("policy")
        assert "speculation_policy_ok" not in measured(running)


async def test_nobody_sets_or_clears_policy_by_a_call(tmp_path: Path, mounted: Mounted):
    mounted.write(SCHEDULE)
    async with serving(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        code, why = await failure(clear(running, "policy:day:1"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert str(mounted.path) in why
        code, why = await failure(set_(running, name="policy:mine", gamma=1))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "file-based policy" in why
        # What only the sidecar sets is ignored in a request.
        request = asked(off=True)
        request.override.from_file = True
        answer = await soon(running.policy.SetOverride(request))
        assert not answer.held.override.from_file
        assert not (await listed(running))["o1"].override.from_file


async def test_a_recording_carries_it_and_replays_to_the_same_plans(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    records = tmp_path / "record"
    async with serving(tmp_path, policy=mounted.path, record_directory=records) as running:
        stream = SteerClient(running, await running.introduce())
        for step in range(40):
            await stream.send(report_message(step, gamma=3, accepted_counts=[1, 1, 2, 0]))
        await set_(running, scope=FLEET, gamma=1)
        await until(lambda: next(iter(running.sidecar.registry)).core.reports == 40)
        mounted.write(BOUND)
        registry = running.sidecar.override_registry
        await until(lambda: len(registry.policy.overrides) == 1)
    verdict = replay(find(records))
    assert verdict.is_same
    (path,) = find(records).paths
    part = RecordingPart(path)
    assert {term.override.from_file for term in part.opening.terms} == {True}
    changes = [it.event.terms for it in part.moments() if isinstance(it.event, Overridden)]
    assert [{term.override.from_file for term in terms} for terms in changes] == [{True, False}] * 2

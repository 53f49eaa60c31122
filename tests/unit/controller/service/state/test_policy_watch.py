"""Policy from a file at a real sidecar: in force, displaced, changed, bad, gone."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import grpc
import pytest

from controller.recording.recording import SegmentReader, find_recording
from controller.recording.replay import replay
from controller.service.metrics.sidecar import SIDECAR_FAMILIES, SidecarSnapshot
from controller.service.state import policy_watch
from controller.settings.policy_file import Policy, PolicyFileError
from controller.util.files import EQUAL_READS_MIN
from speculation.v1 import policy_pb2
from tests.support.override_calls import (
    FLEET,
    clear_override,
    gammas,
    list_overrides,
    make_override_request,
    set_override,
)
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    RunningSidecar,
    SteerClient,
    failure,
    render_family,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
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


async def planned(running: RunningSidecar) -> dict[int, int]:
    return gammas((await running.status()).plan)


async def audited(running: RunningSidecar) -> policy_pb2.AuditRecord:
    """The newest record, once there is one: it is written beside what the sidecar does."""
    request = policy_pb2.QueryAuditRequest(limit=1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            audit_answer = (await with_timeout(running.policy.QueryAudit(request))).records
            if audit_answer:
                return audit_answer[0]
            await asyncio.sleep(0.01)


async def news_of(watch: Any) -> policy_pb2.WatchOverridesResponse:
    news: policy_pb2.WatchOverridesResponse = await with_timeout(watch.read())
    return news


async def status(running: RunningSidecar) -> policy_pb2.PolicyStatus:
    answer = await with_timeout(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
    assert answer.HasField("policy")
    return answer.policy


def scheduled(plan: dict[int, int]) -> bool:
    return all(gamma == (3 if size <= 4 else 1) for size, gamma in plan.items())


async def test_a_schedule_is_in_force_from_the_first_plan_and_listed_with_its_origin(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        assert scheduled(await planned(running))
        held_by_name = await list_overrides(running)
        assert list(held_by_name) == ["policy:day:1", "policy:day:5"]
        held = held_by_name["policy:day:1"]
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
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        answer = await set_override(running, scope=FLEET, gamma=1)
        assert answer.effects[0].constrains
        assert set((await planned(running)).values()) == {1}
        held_by_name = await list_overrides(running)
        assert {name: held.origin for name, held in held_by_name.items()} == {
            "o1": "", "policy:pod": str(mounted.path)
        }  # fmt: skip
        await clear_override(running)
        assert set((await planned(running)).values()) == {3}


async def test_a_change_of_the_mounted_map_reaches_the_engine_and_the_audit(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
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
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        registry = running.sidecar.override_registry
        mounted.write(BAD)
        await wait_until(lambda: registry.policy.error)
        assert scheduled(await planned(running))
        file_status = await status(running)
        assert not file_status.ok
        assert file_status.detail == (
            f"{mounted.path}, line 2: at_mots is not a key of the policy file: did you mean "
            "at_most?"
        )
        assert measured(running)["speculation_policy_ok"] == 0
        assert measured(running)["speculation_policy_entries"] == 2
        mounted.write(BOUND)
        await wait_until(lambda: not registry.policy.error)
        assert list(await list_overrides(running)) == ["policy:bound"]
        assert measured(running)["speculation_policy_ok"] == 1


def measured(running: RunningSidecar) -> dict[str, float]:
    registry = running.sidecar.override_registry
    view = SidecarSnapshot([], [], registry.policy, registry.health, {})
    return {
        sample.name: sample.value
        for family in SIDECAR_FAMILIES
        for sample in render_family(family, view)
    }


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch):
    """A file that is gone does not have to stay away for long."""
    monkeypatch.setattr(policy_watch, "_MISSING_CHECKS", 3)


async def test_a_file_that_goes_takes_its_policy_with_it(
    tmp_path: Path, mounted: Mounted, soon_gone: None
):
    mounted.write(SCHEDULE)
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        mounted.remove()
        await wait_until(lambda: not running.sidecar.override_registry.policy.overrides)
        assert not await list_overrides(running)
        assert (await status(running)).ok


async def test_a_sidecar_that_restarts_with_a_bad_file_goes_on_with_what_it_said_before(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        kept = running.sidecar._settings.state_path / "policy.yaml"
        assert kept.stat().st_mode & 0o777 == 0o640
    mounted.write(BAD)
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        assert scheduled(await planned(running))
        assert "at_mots" in (await status(running)).detail


async def test_a_copy_that_cannot_be_kept_keeps_no_policy_out(
    tmp_path: Path, mounted: Mounted, soon_gone: None
):
    mounted.write(SCHEDULE)
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        registry = running.sidecar.override_registry
        kept = running.sidecar._settings.state_path / "policy.yaml"
        kept.unlink()
        (kept / "in the way").mkdir(parents=True)
        mounted.write(BOUND)
        await wait_until(lambda: len(registry.policy.overrides) == 1)
        mounted.remove()
        await wait_until(lambda: not registry.policy.overrides)
        mounted.write(SCHEDULE)
        await wait_until(lambda: len(registry.policy.overrides) == 2)


@asynccontextmanager
async def looked_at_by_hand(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], Policy | None]]:
    """A sidecar whose watch waits, and what one look of it finds."""
    monkeypatch.setattr(policy_watch, "POLL_SECONDS", 3600)
    async with running_sidecar(folder, policy=path) as running:
        watch = running.sidecar._policy_watch
        assert watch._file is not None
        yield partial(watch._check_file, watch._file)


async def test_a_change_counts_when_two_looks_in_a_row_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "policy.yaml"
    path.write_text(BOUND)
    async with looked_at_by_hand(tmp_path, path, monkeypatch) as look:
        assert look() is None
        for bound in (3, 4, 5, 6):
            path.write_text(BOUND.replace("at_most: 2", f"at_most: {bound}"))
            assert look() is None
        changed = look()
        assert changed is not None
        assert [override.rule.gamma_max for override in changed.overrides] == [6]
        # What is in force is not looked for twice.
        path.write_text(BOUND)
        assert look() is None
        assert look() is None


async def test_a_file_that_has_lost_entries_has_to_stay_the_same_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "policy.yaml"
    path.write_text(SCHEDULE)
    async with looked_at_by_hand(tmp_path, path, monkeypatch) as look:
        path.write_text(SCHEDULE.removesuffix("      - {batch: 5-, gamma: 1}\n"))
        look_results = [look() for _ in range(policy_watch._SHORTER_CHECKS)]
        assert look_results[:-1] == [None] * (len(look_results) - 1)
        assert len(look_results) > EQUAL_READS_MIN
        assert look_results[-1] is not None
        assert len(look_results[-1].overrides) == 1
        path.write_text(SCHEDULE)
        # An empty list is the beginning of nothing.
        path.write_text("policies: []\n")
        assert look() is None
        assert look() == replace(Policy(path), read_at=ANY)


async def test_a_file_that_is_gone_has_to_stay_away_and_its_directory_has_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "policy.yaml"
    path.write_text(BOUND)
    async with looked_at_by_hand(tmp_path, path, monkeypatch) as look:
        path.unlink()
        look_results = [look() for _ in range(policy_watch._MISSING_CHECKS)]
        assert look_results[:-1] == [None] * (len(look_results) - 1)
        assert len(look_results) > policy_watch._SHORTER_CHECKS
        assert look_results[-1] == replace(Policy(path), read_at=ANY)
        folder.rmdir()
        unmounted = look()
        assert unmounted is not None
        assert "No such file" in unmounted.error
        assert len(unmounted.overrides) == 1


@pytest.mark.parametrize("content", ["", "# policy\n", BOUND[:40], BAD, "policies:\n"])
async def test_an_empty_or_half_written_file_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
):
    path = tmp_path / "policy.yaml"
    path.write_text(BOUND)
    async with looked_at_by_hand(tmp_path, path, monkeypatch) as look:
        path.write_text(content)
        assert look() is None
        refused = look()
        assert refused is not None
        assert refused.error
        assert [override.override_id for override in refused.overrides] == ["policy:bound"]
    # Nor does it after a restart.
    async with running_sidecar(tmp_path, policy=path) as running:
        assert list(await list_overrides(running)) == ["policy:bound"]
        assert not (await status(running)).ok


async def test_a_start_without_the_file_goes_on_with_the_copy_until_it_is_gone_for_good(
    tmp_path: Path, mounted: Mounted, soon_gone: None
):
    mounted.write(BOUND)
    async with running_sidecar(tmp_path, policy=mounted.path):
        pass
    mounted.remove()
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        registry = running.sidecar.override_registry
        assert [override.override_id for override in registry.policy.overrides] == ["policy:bound"]
        await wait_until(lambda: not registry.policy.overrides)
        assert not (running.sidecar._settings.state_path / "policy.yaml").exists()


async def test_a_change_that_could_not_be_put_into_force_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "policy.yaml"
    path.write_text(BOUND)
    async with running_sidecar(tmp_path, policy=path) as running:
        registry = running.sidecar.override_registry
        use = registry.use_policy
        failures: list[Policy] = []

        async def fail_once(policy: Policy) -> None:
            if not failures:
                failures.append(policy)
                raise RuntimeError("no room")
            await use(policy)

        monkeypatch.setattr(registry, "use_policy", fail_once)
        path.write_text(BOUND.replace("at_most: 2", "at_most: 1"))
        await wait_until(lambda: registry.policy.overrides[0].rule.gamma_max == 1)
        assert failures
        # Then it is done with: it is not put into force again and again.
        watch = running.sidecar._policy_watch
        await wait_until(
            lambda: watch._file is not None and watch._last_processed == watch._file.snapshot
        )


async def test_a_first_start_with_a_bad_file_is_refused(tmp_path: Path, mounted: Mounted):
    mounted.write(BAD)
    with pytest.raises(PolicyFileError, match="line 2: at_mots is not a key"):
        async with running_sidecar(tmp_path, policy=mounted.path):
            pass
    with pytest.raises(PolicyFileError, match="there is no directory"):
        async with running_sidecar(tmp_path, policy=tmp_path / "away" / "policy.yaml"):
            pass


async def test_without_a_file_in_its_directory_there_is_no_policy_until_one_comes(
    tmp_path: Path, mounted: Mounted
):
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        assert (await status(running)).ok
        assert not await list_overrides(running)
        mounted.write(BOUND)
        await wait_until(lambda: running.sidecar.override_registry.policy.overrides)
        assert max((await planned(running)).values()) <= 2


async def test_without_the_setting_nothing_is_said_of_a_policy(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        answer = await with_timeout(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
        assert not answer.HasField("policy")
        assert "speculation_policy_ok" not in measured(running)


async def test_nobody_sets_or_clears_policy_by_a_call(tmp_path: Path, mounted: Mounted):
    mounted.write(SCHEDULE)
    async with running_sidecar(tmp_path, policy=mounted.path) as running:
        await running.introduce()
        code, message = await failure(clear_override(running, "policy:day:1"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert str(mounted.path) in message
        code, message = await failure(set_override(running, name="policy:mine", gamma=1))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "file-based policy" in message
        # What only the sidecar sets is ignored in a request.
        request = make_override_request(off=True)
        request.override.from_file = True
        answer = await with_timeout(running.policy.SetOverride(request))
        assert not answer.held.override.from_file
        assert not (await list_overrides(running))["o1"].override.from_file


async def test_a_recording_carries_it_and_replays_to_the_same_plans(
    tmp_path: Path, mounted: Mounted
):
    mounted.write(SCHEDULE)
    records = tmp_path / "record"
    async with running_sidecar(tmp_path, policy=mounted.path, record_directory=records) as running:
        stream = SteerClient(running, await running.introduce())
        for step in range(40):
            await stream.send(report_message(step, gamma=3, accepted_counts=[1, 1, 2, 0]))
        await set_override(running, scope=FLEET, gamma=1)
        await wait_until(lambda: next(iter(running.sidecar.registry)).core.reports == 40)
        mounted.write(BOUND)
        registry = running.sidecar.override_registry
        await wait_until(lambda: len(registry.policy.overrides) == 1)
    verdict = replay(find_recording(records))
    assert verdict.is_same
    (path,) = find_recording(records).paths
    part = SegmentReader(path)
    assert {override.from_file for override in part.opening.overrides} == {True}
    changes = [it.arguments[0] for it in part.events() if it.kind == "overrides"]
    assert [{override.from_file for override in them} for them in changes] == [{True, False}] * 2

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from controller.core.cost.profile import Profile
from controller.core.settings import PlannerSettings
from controller.service.reload import settings_change
from controller.settings.settings import RELOADED, Settings, setting_keys
from controller.wire.explanations import explain
from speculation.v1 import service_pb2
from tests.support.service_harness import (
    RunningSidecar,
    make_profile,
    report_message,
    running_sidecar,
    with_timeout,
)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


async def reload(running: RunningSidecar, directory: Path, **settings: Any) -> list[Any]:
    """The log's lines."""
    sidecar = running.sidecar
    address = {"address": f"unix:{directory}/controller.sock", "metrics_port": 0}

    def read() -> Settings:
        return Settings.load(address | settings)

    with structlog.testing.capture_logs() as lines:
        sidecar._settings = await sidecar._reloader.reload(sidecar._settings, read)
    return lines


def older(profile: Profile) -> Profile:
    cells = tuple(dataclasses.replace(c, step_seconds=2 * c.step_seconds) for c in profile.cells)
    return dataclasses.replace(profile, cells=cells, measured_at="2019-01-01")


async def test_what_can_change_does_and_what_cannot_is_named(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        lines = await reload(
            running,
            tmp_path,
            log_level="error",
            max_engines=7,
            session_idle_seconds=8.0,
            override_default_seconds=9.0,
            override_max_seconds=90.0,
            ready_with="guess",
            last_lease_seconds=10.0,
            planner={"lease_seconds": 11.0},
            tcp="127.0.0.1:1",
            redis_url="redis://:hunter2@nowhere:1/0",
        )
        sidecar = running.sidecar
        assert logging.getLogger().level == logging.ERROR
        assert (sidecar.registry.max_engines, sidecar.registry.idle_seconds) == (7, 8.0)
        assert (
            sidecar._policy_servicer.default_lifetime_seconds,
            sidecar._policy_servicer.max_lifetime_seconds,
        ) == (9.0, 90.0)
        assert sidecar._readiness.ready_with == "guess"
        settings = sidecar._settings
        assert (settings.last_lease_seconds, settings.planner.lease_seconds) == (10.0, 11.0)
        assert (settings.tcp, settings.redis_url) == (None, None)
        assert [line["event"] for line in lines] == ["settings_reloaded", "settings_need_restart"]
        assert set(lines[0]["changed"]) == {
            "log_level", "max_engines", "session_idle_seconds", "override_default_seconds",
            "override_max_seconds", "ready_with", "last_lease_seconds", "planner.lease_seconds",
        }  # fmt: skip
        assert set(lines[1]["settings"]) == {"tcp", "redis_url"}
        assert "hunter2" not in str(lines)
        [line] = await reload(running, tmp_path, **{n: getattr(settings, n) for n in RELOADED})
        assert (line["event"], line["changed"]) == ("settings_reloaded", [])


async def test_engines_that_are_steered_get_the_new_constants_and_keep_what_was_learnt(
    tmp_path: Path,
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        core = running.sidecar.registry.find_by_engine("engine-0").core
        for message in map(report_message, range(1, 50)):
            await with_timeout(
                running.speculation.Decide(
                    service_pb2.DecideRequest(
                        session_id=running.sidecar.registry.find_by_engine("engine-0").session_id,
                        report=message,
                    )
                )
            )
        beliefs = core.traffic.acceptance_snapshots()
        planner, training = {"lease_seconds": 2.0, "policy": "tide"}, {"threshold": 9}
        await reload(running, tmp_path, planner=planner, training=training)
        assert running.sidecar.registry.find_by_engine("engine-0").core is core
        assert core.traffic.acceptance_snapshots() == beliefs
        assert explain(core).policy == "tide"
        await running.introduce("later")
        assert (await running.status("later")).plan.lease_ms == 2000


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"metrics_port": -1}, "metrics_port"),
        ({"nosuch": 1}, "nosuch"),
        ({"planner": {"probe_share": 5}}, "probe_share"),
        ({"profiles": ["/nowhere.json"]}, "/nowhere.json"),
    ],
)
async def test_bad_settings_change_nothing(tmp_path: Path, bad: dict[str, Any], text: str):
    async with running_sidecar(tmp_path, max_engines=3) as running:
        before, level = running.sidecar._settings, logging.getLogger().level
        good = {"max_engines": 9, "log_level": "error", "planner": {"lease_seconds": 1.0}}
        [line] = await reload(running, tmp_path, **(good | bad))
        assert (line["event"], line["log_level"]) == ("settings_not_reloaded", "error")
        assert text in line["error"]
        assert running.sidecar._settings is before
        assert running.sidecar.registry.max_engines == 3
        assert logging.getLogger().level == level
        await running.introduce()
        assert (await running.status()).plan.lease_ms == 5000


async def test_profiles_are_read_again(tmp_path: Path):
    path = tmp_path / "p.json"
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        path.write_text(make_profile().to_json())
        lines = await reload(running, tmp_path, profiles=[path])
        assert {"profile_loaded", "profile_found"} <= {line["event"] for line in lines}
        assert (await running.status()).profile_id == make_profile().profile_id
        # The same file again, or an older one, changes nothing.
        path.with_name("q.json").write_text(older(make_profile()).to_json())
        lines = await reload(running, tmp_path, profiles=[path, path.with_name("q.json")])
        assert "profile_found" not in {line["event"] for line in lines}
        newer = dataclasses.replace(older(make_profile()), measured_at="2021-01-01")
        path.write_text(newer.to_json())
        await reload(running, tmp_path, profiles=[path])
        assert (await running.status()).profile_id == newer.profile_id


async def test_a_profile_that_was_measured_since_is_not_displaced_by_the_file(tmp_path: Path):
    (tmp_path / "p.json").write_text(make_profile(measured_at="2019-06-01").to_json())
    async with running_sidecar(tmp_path, profiles=[tmp_path / "p.json"]) as running:
        await running.introduce()
        measured = dataclasses.replace(older(make_profile()), measured_at="2020-06-01")
        install = service_pb2.InstallProfileRequest(profile_json=measured.to_json())
        await with_timeout(running.profiling.InstallProfile(install))
        await reload(running, tmp_path, profiles=[tmp_path / "p.json"])
        assert (await running.status()).profile_id == measured.profile_id


def test_every_setting_is_either_changed_or_waits():
    now = Settings.load()
    new = now.model_copy(
        update={"planner": PlannerSettings(shift_z=9.0), "reflection": False, "drain_seconds": 1.0}
    )
    settings_difference = settings_change(now, new)
    assert settings_difference.changed == ("drain_seconds", "planner.shift_z")
    assert settings_difference.needs_restart == ("reflection",)
    assert settings_difference.settings.reflection
    assert settings_difference.settings.planner.shift_z == 9.0
    assert {key.partition(".")[0] for key in setting_keys()} > RELOADED

"""What a sidecar answers when an override is set: its effects, what shadows it, and refusals."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.service.state.override_registry import OverrideRegistry
from controller.store.interface import Health
from speculation.v1 import plan_pb2, policy_pb2, service_pb2
from tests.support.override_calls import (
    ENGINE,
    FLEET,
    clear_override,
    gammas,
    list_overrides,
    make_override_request,
    set_override,
)
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    engine_message,
    failure,
    running_sidecar,
    with_timeout,
)

NEEDED = {"require_effect": True}
KIND = policy_pb2.OverrideEffect


async def refusal(
    running: RunningSidecar, dry_run: bool, **fields: Any
) -> tuple[grpc.StatusCode, str]:
    """How a request is refused that has to have an effect; nothing may be in force by it."""
    before = set(await list_overrides(running))
    request = NEEDED | fields.pop("request", {}) | {"dry_run": dry_run}
    code_and_text = await failure(
        running.policy.SetOverride(make_override_request(request=request, **fields))
    )
    assert set(await list_overrides(running)) == before
    return code_and_text


async def effect_of(running: RunningSidecar, **fields: Any) -> policy_pb2.OverrideEffect:
    """The effect on the one engine that is in its scope."""
    (effect,) = (await set_override(running, **fields)).effects
    return effect


async def test_a_second_pin_wins_over_the_older_one_even_if_it_is_larger(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, name="first", gamma=1, request=NEEDED)
        effect = await effect_of(running, name="second", gamma=3, request=NEEDED)
        assert [change.gamma_after for change in effect.changes] == [3]
        assert set(gammas((await running.status()).plan).values()) == {3}
        # The older one is still there, and its effect comes back when the newer one ends.
        await clear_override(running, "second")
        assert set(gammas((await running.status()).plan).values()) == {1}


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_fleet_wide_pin_that_every_engine_shadows_is_refused_and_names_the_shadow(
    tmp_path: Path, dry_run: bool
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, name="mine", gamma=2)
        code, text = await refusal(running, dry_run, name="all", scope=FLEET, gamma=0)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text == "it would change nothing: engine engine-0: shadowed by mine"


async def test_a_fleet_wide_pin_says_where_it_acts_and_what_shadows_it(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await running.introduce("engine-1")
        await set_override(running, name="mine", gamma=2)
        answer = await set_override(running, name="all", scope=FLEET, gamma=1, request=NEEDED)
        shadowed, free = answer.effects
        assert (shadowed.engine_id, free.engine_id) == ("engine-0", "engine-1")
        assert list(shadowed.shadowed_by) == ["mine"]
        assert not shadowed.constrains
        assert free.constrains
        assert {change.gamma_after for change in free.changes} == {1}
        assert set(gammas((await running.status()).plan).values()) == {2}


async def test_engines_whose_model_has_no_name_are_not_listed_as_models(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce(target_model="")
        other = {"target_model": "other"}
        code, text = await refusal(running, False, name="m", scope=other, gamma=0)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "it knows no model by name" in text


async def test_off_for_the_fleet_beats_a_pin_of_one_engine(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, name="mine", gamma=2)
        effect = await effect_of(running, name="all", scope=FLEET, off=True, request=NEEDED)
        assert {change.gamma_after for change in effect.changes} == {0}
        assert set(gammas((await running.status()).plan).values()) == {0}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"gamma": 6}, "it has no draft length 6; it has 0, 1, 2, 3"),
        ({"gamma_min": 9}, "it has no draft length 9 to 64"),
        ({"drafter": "nosuch"}, "it has no drafter nosuch; it has mtp"),
        ({"deny_drafters": ["mtpp"]}, "it has no drafter mtpp; it has mtp"),
        ({"regime": {"mode": plan_pb2.REGIME_MODE_COLLECT}}, "it cannot collect"),
        ({"regime": {"mode": plan_pb2.REGIME_MODE_ONLINE, "stride": 5}}, "it cannot update"),
    ],
)
async def test_what_no_engine_in_scope_can_do_is_refused(
    tmp_path: Path, fields: dict[str, Any], text: str, dry_run: bool
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        code, message = await refusal(running, dry_run, **fields)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text in message


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("scope", "code", "text"),
    [
        (
            {"engine_id": "nosuch"},
            grpc.StatusCode.NOT_FOUND,
            "this sidecar knows no engine nosuch; it knows engine-0",
        ),
        (
            {"target_model": "nosuch"},
            grpc.StatusCode.FAILED_PRECONDITION,
            "this sidecar knows no model nosuch; it knows target",
        ),
    ],
)
async def test_names_that_nobody_has_are_refused(
    tmp_path: Path, scope: dict[str, Any], code: grpc.StatusCode, text: str, dry_run: bool
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        assert await refusal(running, dry_run, scope=scope, off=True) == (code, text)


@pytest.mark.parametrize("scope", [FLEET, ENGINE])
async def test_without_any_engine_nothing_can_have_an_effect(tmp_path: Path, scope: dict[str, Any]):
    async with running_sidecar(tmp_path) as running:
        _, text = await refusal(running, dry_run=True, scope=scope, off=True)
        assert text == "no engine has introduced itself to this sidecar"


@pytest.mark.parametrize(
    "fields",
    [
        {"gamma": 6},
        {"drafter": "nosuch"},
        {"scope": {"engine_id": "later"}, "off": True},
        {"gamma_max": 64},
    ],
)
async def test_an_older_client_and_one_that_allows_it_set_what_has_no_effect_yet(
    tmp_path: Path, fields: dict[str, Any]
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, **fields)
        assert set(await list_overrides(running)) == {"o1"}


async def test_a_bound_that_holds_the_engine_where_it_is_has_an_effect(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        # Without a profile an engine begins at gamma = 0.
        assert set(gammas((await running.status()).plan).values()) == {0}
        _, text = await refusal(running, dry_run=False, gamma_max=3)
        assert text == "it would change nothing: engine engine-0: its choices stay the same"
        effect = await effect_of(running, gamma_max=1, request=NEEDED)
        assert effect.constrains
        assert not effect.changes
        _, text = await refusal(running, dry_run=False, name="o2", gamma_max=2)
        assert text == "it would change nothing: engine engine-0: shadowed by o1"


async def test_the_regime_and_probing_are_effects_too(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        able = engine_message("able")
        able.capabilities.can_update_online = True
        await with_timeout(running.speculation.Introduce(service_pb2.IntroduceRequest(engine=able)))
        scope = {"engine_id": "able"}
        online = {"mode": plan_pb2.REGIME_MODE_ONLINE, "stride": 5}
        effect = await effect_of(running, scope=scope, regime=online, request=NEEDED)
        assert effect.regime_changes
        assert not effect.HasField("regime_before")
        assert effect.regime_after.stride == 5
        effect = await effect_of(running, name="o2", scope=scope, deny_updates=True, request=NEEDED)
        assert effect.regime_before.stride == 5
        assert effect.regime_after.mode == plan_pb2.REGIME_MODE_OFF
        _, text = await refusal(running, False, name="o3", scope=scope, regime=online)
        assert "shadowed by o2" in text
        await set_override(running, name="o4", scope=scope, deny_exploration=True, request=NEEDED)


async def test_it_says_when_the_engine_follows(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        session = await running.introduce()
        effect = await effect_of(running, name="o1", gamma=1)
        assert effect.timing == KIND.TIMING_NEXT_CONTACT
        stream = SteerClient(running, session)
        await stream.send()
        await stream.plan()
        effect = await effect_of(running, name="o2", gamma=2)
        assert effect.timing == KIND.TIMING_NEXT_STEP
        measuring = running.profiling.Measure()
        await with_timeout(
            measuring.write(
                service_pb2.MeasureRequest(engine_id="engine-0", drafter="mtp", gamma=1)
            )
        )
        await with_timeout(measuring.read())
        effect = await effect_of(running, name="o3", gamma=3)
        assert effect.timing == KIND.TIMING_AFTER_MEASUREMENT
        measuring.cancel()


async def test_a_repeated_request_shows_its_engines_and_the_end_that_it_has(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        hour = NEEDED | {"ttl_seconds": 3600.0}
        first = await set_override(running, gamma=1, request=hour)
        again = await set_override(running, gamma=1, request=hour)
        assert again.repeated
        assert not again.end_moved
        assert again.held.etag == first.held.etag
        assert [effect.engine_id for effect in again.effects] == ["engine-0"]
        assert not again.effects[0].changes


@pytest.mark.parametrize(
    ("lifetime", "seconds"),
    [({"ttl_seconds": 7200.0}, 7200), ({"ttl_seconds": 60.0}, 60), ({"for_ever": True}, None)],
)
async def test_the_same_id_with_another_lifetime_moves_the_end(
    tmp_path: Path, lifetime: dict[str, Any], seconds: float | None
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, gamma=1, request=NEEDED | {"ttl_seconds": 3600.0})
        tried = await set_override(running, gamma=1, request=NEEDED | lifetime | {"dry_run": True})
        assert tried.end_moved
        assert (await list_overrides(running))["o1"].remaining_seconds == pytest.approx(3600, abs=5)
        moved = await set_override(running, gamma=1, request=NEEDED | lifetime)
        assert moved.end_moved
        assert not moved.repeated
        held = (await list_overrides(running))["o1"]
        assert held.etag == moved.held.etag
        if seconds is None:
            assert not held.HasField("remaining_seconds")
        else:
            assert held.remaining_seconds == pytest.approx(seconds, abs=5)
        assert (await set_override(running, gamma=1, request=NEEDED | lifetime)).repeated
        query = policy_pb2.QueryAuditRequest()
        records = (await with_timeout(running.policy.QueryAudit(query))).records
        assert [record.action for record in records] == ["replace", "set"]


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_dry_run_refuses_what_the_call_refuses(tmp_path: Path, dry_run: bool):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        first = await set_override(running, gamma=1)
        again: dict[str, Any] = {"dry_run": dry_run}

        async def status(**fields: Any) -> grpc.StatusCode:
            return (await failure(running.policy.SetOverride(make_override_request(**fields))))[0]

        taken, gone = grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.NOT_FOUND
        assert await status(gamma=2, request=again) is taken
        old = again | {"etag": "999-abcdefabcdef"}
        assert await status(gamma=2, request=old) is grpc.StatusCode.ABORTED
        assert await status(name="o2", gamma=2, request=old) is gone
        assert await status(gamma=2, request=again | {"etag": "x"}) is grpc.StatusCode.ABORTED
        await clear_override(running)
        assert await status(gamma=1, request=again) is taken
        assert await status(gamma=1, request=again | {"etag": first.held.etag}) is not None


async def test_a_dry_run_refuses_where_the_store_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        trouble = Health(False, "No space left on device", 1.0)
        monkeypatch.setattr(OverrideRegistry, "health", trouble)
        code, text = await failure(
            running.policy.SetOverride(make_override_request(off=True, request={"dry_run": True}))
        )
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "No space left on device" in text


async def test_clearing_says_what_comes_back(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, name="stale", gamma=6)
        await set_override(running, name="good", gamma=2)
        (effect,) = (await clear_override(running, "good")).effects
        assert effect.constrains
        assert [(s.min_batch_size, s.max_batch_size) for s in effect.stuck] == [(1, 16)]
        (effect,) = (await clear_override(running, "stale")).effects
        assert effect.constrains


async def test_explain_names_what_decides_the_draft_length(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await set_override(running, name="all", scope=FLEET, gamma=1)
        await set_override(running, name="mine", gamma=2, drafter="mtp")
        limits = (await running.explain()).limits
        assert list(limits.gamma_by) == ["mine"]
        assert limits.drafter_by == "mine"
        assert list(limits.overrides) == ["all", "mine"]

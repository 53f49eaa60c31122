"""A bound on the time per output token as an operator sets it: effects, plans, explanations."""

from pathlib import Path

import grpc
import pytest

from speculation.v1 import plan_pb2, policy_pb2
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
    RunningSidecar,
    SteerClient,
    failure,
    make_profile,
    report_message,
    running_sidecar,
    session_metrics,
    step_seconds,
    with_timeout,
)

NEEDED = {"require_effect": True}
# This rule drafts 1 token.  In batches above 13 that takes more than 8 ms a token, and drafts of 2
# and 3 tokens take less.
TIDE = {"policy": "tide", "tide_gamma": 1}
BOUND = 0.008


async def introduced(running: RunningSidecar) -> None:
    running.sidecar.profiles.add(make_profile())
    await running.introduce()


def ranges(ranged_items: "object") -> list[tuple[int, int]]:
    return [(it.min_batch_size, it.max_batch_size) for it in ranged_items]  # type: ignore[attr-defined]


async def test_it_is_set_followed_shown_and_cleared(tmp_path: Path):
    async with running_sidecar(tmp_path, planner=TIDE) as running:
        running.sidecar.profiles.add(make_profile())
        stream = SteerClient(running, await running.introduce())
        await stream.send()
        assert set(gammas(await stream.plan()).values()) == {1}
        tried = await set_override(
            running, tpot_max_seconds=BOUND, request=NEEDED | {"dry_run": True}
        )
        assert await list_overrides(running) == {}
        done = await set_override(running, tpot_max_seconds=BOUND, request=NEEDED)
        (effect,) = done.effects
        assert effect == tried.effects[0]
        assert effect.constrains
        assert not effect.above_bound
        assert [change.gamma_before for change in effect.changes] == [1]
        plan = await plan_under(stream, "o1")
        last = plan.rows[-1]
        assert (last.gamma, last.reason) == (
            effect.changes[0].gamma_after, plan_pb2.REASON_OVERRIDE,
        )  # fmt: skip
        assert gammas(plan)[8] == 1
        # What was stored is what was asked, to the last bit.
        assert (await list_overrides(running))["o1"].override.rule.tpot_max_seconds == BOUND
        shown = await running.explain(16)
        assert (shown.limits.tpot_max_seconds, shown.limits.tpot_by) == (BOUND, "o1")
        assert (shown.bound.seconds, shown.bound.override_id) == (BOUND, "o1")
        assert (shown.bound.excluded_drafter, shown.bound.excluded_gamma) == ("mtp", 1)
        assert shown.bound.attainable
        assert shown.bound.kept_up_to == 16
        chosen = next(arm for arm in shown.arms if arm.chosen)
        assert shown.bound.expected_seconds == chosen.seconds_per_token <= BOUND
        assert not (await running.explain(4)).bound.HasField("excluded_gamma")
        await clear_override(running)
        assert set(gammas(await plan_under(stream)).values()) == {1}
        assert not (await running.explain(16)).HasField("bound")


async def test_where_nothing_keeps_it_the_answer_says_which_batches(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await introduced(running)
        # In a batch of 16 no choice takes less than 7.6 ms a token.
        answer = await set_override(running, tpot_max_seconds=0.0065, request=NEEDED)
        (above,) = ranges(answer.effects[0].above_bound)
        assert above[1] == 16
        assert 1 < above[0] < 16
        assert not answer.effects[0].stuck
        shown = await running.explain(16)
        assert not shown.bound.attainable
        assert shown.bound.kept_up_to == above[0] - 1
        assert (await running.explain(above[0] - 1)).bound.attainable
        # A batch range that leaves them out has nothing to say.
        answer = await set_override(running, name="o2", high=above[0] - 1, tpot_max_seconds=0.006)
        await clear_override(running, "o1")
        assert not (await running.explain(16)).HasField("bound")


async def test_the_strictest_of_several_holds_and_shadows_the_others(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await introduced(running)
        await set_override(
            running, name="fleet", scope=FLEET, tpot_max_seconds=0.02, request=NEEDED
        )
        # The narrower scope and the newer command do not loosen a bound.
        code, text = await failure(
            running.policy.SetOverride(
                make_override_request("mine", tpot_max_seconds=0.03, request=NEEDED)
            )
        )
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text == "it would change nothing: engine engine-0: shadowed by fleet"
        tighter = await set_override(running, name="mine", tpot_max_seconds=0.01, request=NEEDED)
        assert tighter.effects[0].constrains
        shown = await running.explain(8)
        assert (shown.bound.seconds, shown.bound.override_id) == (0.01, "mine")
        assert list(shown.limits.overrides) == ["fleet", "mine"]
        await clear_override(running, "mine")
        assert (await running.explain(8)).bound.override_id == "fleet"


async def test_a_setting_that_is_stricter_holds_and_an_override_below_it_has_an_effect(
    tmp_path: Path,
):
    async with running_sidecar(tmp_path, planner={"tpot_ceiling_seconds": 0.02}) as running:
        await introduced(running)
        shown = await running.explain(8)
        assert (shown.bound.seconds, shown.bound.override_id) == (0.02, "")
        code, text = await failure(
            running.policy.SetOverride(make_override_request(tpot_max_seconds=0.02, request=NEEDED))
        )
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "its setting planner.tpot_ceiling_seconds, 20 ms a token, is as strict" in text
        answer = await set_override(running, tpot_max_seconds=0.015, request=NEEDED)
        assert not answer.effects[0].unable
        assert (await running.explain(8)).bound.override_id == "o1"


@pytest.mark.parametrize("pin", [{"gamma": 2}, {"off": True}])
async def test_where_nothing_is_left_to_choose_a_bound_has_no_effect(
    tmp_path: Path, pin: dict[str, object]
):
    async with running_sidecar(tmp_path) as running:
        await introduced(running)
        await set_override(running, name="pin", **pin)
        code, text = await failure(
            running.policy.SetOverride(
                make_override_request(tpot_max_seconds=BOUND, request=NEEDED)
            )
        )
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text == "it would change nothing: engine engine-0: shadowed by pin"


async def test_a_repeated_request_changes_nothing_and_another_bound_is_other_content(
    tmp_path: Path,
):
    async with running_sidecar(tmp_path) as running:
        await introduced(running)
        await set_override(running, tpot_max_seconds=BOUND)
        assert (await set_override(running, tpot_max_seconds=BOUND)).repeated
        code, _ = await failure(
            running.policy.SetOverride(make_override_request(tpot_max_seconds=0.009))
        )
        assert code is grpc.StatusCode.ALREADY_EXISTS


async def test_a_bound_and_its_audit_outlive_the_sidecar(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await set_override(running, scope=FLEET, tpot_max_seconds=BOUND, request={"for_ever": True})
    async with running_sidecar(tmp_path) as running:
        await introduced(running)
        assert (await running.explain(16)).bound.seconds == BOUND
        records = (
            await with_timeout(running.policy.QueryAudit(policy_pb2.QueryAuditRequest()))
        ).records
        assert [record.after.rule.tpot_max_seconds for record in records] == [BOUND]


async def test_without_a_bound_every_answer_is_what_older_clients_know(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await introduced(running)
        await set_override(running, gamma_max=2)
        shown = await running.explain(8)
        assert not shown.HasField("bound")
        assert not shown.limits.HasField("tpot_max_seconds")
        assert shown.limits.tpot_by == ""
        assert not (await list_overrides(running))["o1"].override.rule.HasField("tpot_max_seconds")


async def test_the_metrics_show_the_bound_and_whether_it_binds(tmp_path: Path):
    async with running_sidecar(tmp_path, planner=TIDE) as running:
        running.sidecar.profiles.add(make_profile())
        stream = SteerClient(running, await running.introduce())
        seen = {"batch_size": 16, "kv_tokens": 8192, "gamma": 1, "accepted_counts": [5, 11]}
        report = report_message(1, step_seconds=step_seconds(1, 16), **seen)
        await stream.send(report)
        await stream.plan()
        session = running.sidecar.registry.find_by_engine("engine-0")
        names = ["seconds", "kept", "binds", "batch_size"]
        bound = [(f"speculation_tpot_bound_{name}",) for name in names]
        metric_values = session_metrics(session)
        assert not set(bound) & set(metric_values)
        assert metric_values["speculation_expected_tpot_seconds",] > 0.007
        await set_override(running, tpot_max_seconds=BOUND)
        metric_values = session_metrics(session)
        assert [metric_values[name] for name in bound] == [BOUND, 1, 1, 16]
        await clear_override(running)
        await set_override(running, name="tight", tpot_max_seconds=0.001)
        metric_values = session_metrics(session)
        assert [metric_values[name] for name in bound] == [0.001, 0, 1, 0]

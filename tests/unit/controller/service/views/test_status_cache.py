import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.plan import Plan
from controller.service.sessions import counters, session_logs
from controller.service.sessions.counters import POINT_FIELDS, History
from controller.service.views import engine_status
from controller.service.views.engine_status import survival_curves
from controller.wire.explanations import Explanation, PositionEstimate, explain
from speculation.v1 import policy_pb2, service_pb2
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)

A, N, T, S = (POINT_FIELDS.index(f) for f in ("accept_length", "batch_size", "time", "unsteered"))


async def decide(running: RunningSidecar, session_id: str, step: int, **changes: Any) -> None:
    request = service_pb2.DecideRequest(
        session_id=session_id, report=report_message(step, **changes)
    )
    await with_timeout(running.speculation.Decide(request))


def counted_explanations(monkeypatch: pytest.MonkeyPatch) -> "Counter[str]":
    """By engine, from now on."""
    counted = Counter[str]()

    def counting(core: EngineController, batch_size: int = 0) -> Explanation:
        counted[core.spec.engine_id] += 1
        return explain(core, batch_size)

    monkeypatch.setattr(engine_status, "explain", counting)
    return counted


async def test_however_many_look_each_engine_explains_itself_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, counted = VirtualClock(), counted_explanations(monkeypatch)
    async with running_sidecar(tmp_path, clock) as running:
        status_cache = running.sidecar._status_cache
        for name in ("a", "b"):
            await running.introduce(name)
        for _ in range(3):
            overview = running.inspection.Overview(service_pb2.OverviewRequest())
            await asyncio.gather(
                with_timeout(overview),
                status_cache.lines(),
                status_cache.state(),
                status_cache.engine("a", 0.0),
            )
        assert counted == {"a": 1, "b": 1}
        clock.advance(1.0)
        # As long as the first look took, or a second at least.
        status_cache._lines_until = min(status_cache._lines_until, clock.now())
        await status_cache.lines()
        assert counted == {"a": 2, "b": 2}


async def test_many_engines_are_looked_at_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = VirtualClock()
    monkeypatch.setattr("controller.service.views.status_cache._SHARE_MAX", 1e-9)
    async with running_sidecar(tmp_path, clock) as running:
        await running.introduce()
        lines = await running.sidecar._status_cache.lines()
        clock.advance(60.0)
        assert await running.sidecar._status_cache.lines() is lines


async def test_a_point_says_what_happened_since_the_one_before(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        session_id = await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        seen = session.history = History(["mtp"], session.counters)
        session.add_history_point(100.0)
        rates = [seen.generated_per_second]
        assert seen.points_since(0.0)[0][N:] == [
            None,
            session.plan.row_for(1).arm.gamma,
            0,
            *[None] * 3,
        ]
        await decide(running, session_id, 1, accepted_counts=[1, 1, 2])
        await decide(running, session_id, 2, accepted_counts=[0, 0, 4], flags={"unsteered": True})
        session.add_history_point(101.0)
        # In a second, of which the steps took 20 ms.
        assert [*rates, seen.generated_per_second] == [None, 21.0]
        point = seen.points_since(100.0)
        # 8 sequences, 13 accepted tokens, 21 tokens in 20 ms.
        gamma = session.plan.row_for(4).arm.gamma
        assert point == [[101.0, 4, gamma, 0, 21 / 8, pytest.approx(1050.0), 0.5]]
        assert seen.accept_length == 21 / 8
        session.add_history_point(102.0)
        assert seen.points_since(101.0)[0][A] is None
        assert seen.accept_length is None


async def test_a_history_keeps_the_newest_points_in_order(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        seen = session.history = History(["mtp"], session.counters)
        for second in range(counters.POINTS_MAX + 150):
            session.add_history_point(float(second))
        times = [point[T] for point in seen.points_since(-1.0)]
        assert times == [float(t) for t in range(150, counters.POINTS_MAX + 150)]
        assert [point[T] for point in seen.points_since(747.0)] == [748.0, 749.0]


async def test_histories_are_kept_while_nobody_looks(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.history.points_since(0.0))
        assert (await running.sidecar._status_cache.engine("engine-0", 0.0))["points"]


async def test_the_link_is_named(tmp_path: Path):
    async with running_sidecar(tmp_path, VirtualClock()) as running:
        status_cache, clock = running.sidecar._status_cache, running.sidecar._clock
        assert isinstance(clock, VirtualClock)

        async def link() -> str:
            clock.advance(1e6)
            return (await status_cache.lines())[0].link

        stream = SteerClient(running, await running.introduce())
        assert await link() == "away"
        await stream.send()
        await stream.plan()
        assert await link() == "waiting"
        await stream.send(report_message(1, flags={"unsteered": True}))
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.counters.reports == 1)
        assert await link() == "alone"
        await stream.send(report_message(2))
        await wait_until(lambda: session.counters.reports == 2)
        assert await link() == "steered"


async def test_what_only_other_batches_are_told_is_not_in_the_trail(tmp_path: Path):
    async with running_sidecar(tmp_path, VirtualClock()) as running:
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        plan, runs = session.plan, session.plan.rows[0].arm
        other = next(arm for arm in session.spec.arms if arm != runs)

        def make_plan(row: int) -> Plan:
            rows = list(plan.rows)
            rows[row] = replace(rows[row], arm=other)
            return replace(plan, rows=tuple(rows))

        session._adopt_plan(make_plan(-1), 0)
        assert not session.plan_log
        session._adopt_plan(plan, 0)
        session._adopt_plan(make_plan(0), 0)
        assert [change.arm for change in session.plan_log] == [f"{other.drafter} {other.gamma}"]


async def test_the_trail_has_what_the_running_batch_was_told(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        session_id = await running.introduce()
        await decide(running, session_id, 1)
        session = running.sidecar.registry.find_by_engine("engine-0")
        gamma = session.plan.row_for(4).arm.gamma
        override = policy_pb2.Override(
            override_id="look", scope=policy_pb2.Scope(engine_id="engine-0"),
            rule=policy_pb2.OverrideRule(gamma=3 - gamma),
            author="somebody", reason="a look",
        )  # fmt: skip
        await with_timeout(
            running.policy.SetOverride(policy_pb2.SetOverrideRequest(override=override))
        )
        await decide(running, session_id, 2)
        change = session.plan_log[-1]
        assert (change.was, change.arm) == (f"mtp {gamma}", f"mtp {3 - gamma}")
        assert change.batch_size == 4
        assert change.overrides == session.plan.overrides != ()
        state = await running.sidecar._status_cache.state()
        (held,) = state["overrides"]
        assert (held["author"], held["reason"]) == ("somebody", "a look")
        assert held["ends_at"] > held["created_at"]
        assert session.plan_log.maxlen == session_logs.PLAN_LOG_LENGTH


def test_survival_multiplies_and_its_band_widens_where_evidence_ends():
    known = PositionEstimate("mtp", 1, 0.8, 400.0, deviation=0.02)
    unknown = PositionEstimate("mtp", 2, 0.5, 0.0, deviation=0.3)
    of_a_class = PositionEstimate("mtp", 1, 0.1, 9.0, "code", 0.1)
    (curve,) = survival_curves([known, unknown, of_a_class])
    assert curve["survival"] == pytest.approx([0.8, 0.4])
    # exp(±1.96 · 0.025)
    assert curve["low"][0] == pytest.approx(0.8 * 0.95218, rel=1e-4)
    assert curve["high"][0] == pytest.approx(0.8 / 0.95218, rel=1e-4)
    assert curve["low"][1] < 0.2
    assert curve["high"][1] == 1.0

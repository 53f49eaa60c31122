"""What counts as a decision: what the engine shall do changes, and not only why or until when."""

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm
from controller.core.plan import Plan, Probe, Reason, Regime, RegimeMode
from controller.core.settings import PlannerSettings
from controller.service.sessions.session import EngineSession, SessionObserver
from controller.wire.engines import engine_from_proto
from tests.support.service_harness import engine_message


class Heard(SessionObserver):
    """Keeps the decisions that it was informed of."""

    def __init__(self) -> None:
        self.decisions: list[tuple[Plan, int]] = []

    def on_plan_changed(self, session: EngineSession, before: Plan, began: int) -> None:
        self.decisions.append((before, began))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def session(clock: VirtualClock) -> EngineSession:
    spec = engine_from_proto(engine_message())
    core = EngineController(spec, PlannerSettings(), None, clock)
    return EngineSession("secret", core, clock, observer=Heard())


def collect_decisions(session: EngineSession, plan: Plan) -> list[tuple[Plan, int]]:
    """What is reported about this plan, and logged."""
    observer = session._observer
    assert isinstance(observer, Heard)
    heard = observer.decisions = []
    with capture_logs() as lines:
        session._adopt_plan(plan, 7)
    assert [line["event"] for line in lines] == ["plan_changed"] * len(heard)
    return heard


def with_row(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, epoch=2, rows=(replace(plan.rows[0], **changes), *plan.rows[1:]))


OTHER_ARM = Arm("mtp", 1)
PROBE = Probe(1, OTHER_ARM, 3)


def test_another_choice_in_any_row_is_told_with_the_plan_before_it(session: EngineSession):
    before = session.plan
    assert before.rows[0].arm != OTHER_ARM
    assert collect_decisions(session, with_row(before, arm=OTHER_ARM)) == [(before, 7)]


@pytest.mark.parametrize(
    "change",
    [
        {"regime": Regime(RegimeMode.ONLINE, 5)},
        {"draft_version": 3},
        {"overrides": ("pin",)},
    ],
)
def test_so_is_another_regime_version_or_override(session: EngineSession, change: dict[str, Any]):
    assert len(collect_decisions(session, replace(session.plan, epoch=2, **change))) == 1


def test_so_are_rows_that_end_elsewhere(session: EngineSession):
    plan = session.plan
    assert len(collect_decisions(session, replace(plan, rows=plan.rows[1:]))) == 1
    assert len(collect_decisions(session, with_row(session.plan, max_batch_size=1))) == 1


@pytest.mark.parametrize("change", [{"reason": Reason.HOLD}, {"probe": PROBE}])
def test_a_reason_or_a_probe_is_no_decision(session: EngineSession, change: dict[str, Any]):
    assert collect_decisions(session, with_row(session.plan, **change)) == []


def test_a_renewed_lease_is_no_decision(session: EngineSession):
    assert collect_decisions(session, replace(session.plan, epoch=2, reason=Reason.LEASE)) == []


def test_decision_ids_tell_sessions_and_epochs_apart(session: EngineSession, clock: VirtualClock):
    first = session.decision_id
    session._adopt_plan(replace(session.plan, epoch=2), 0)
    other = EngineSession("secret", session.core, clock)
    assert len({first, session.decision_id, other.decision_id}) == 3
    assert session.decision_id.endswith("-2")
    assert "secret" not in first


def test_a_plan_is_as_old_as_it_is(session: EngineSession, clock: VirtualClock):
    clock.advance(3.0)
    assert session.plan_age_seconds == 3.0
    session._adopt_plan(replace(session.plan, epoch=2), 0)
    assert session.plan_age_seconds == 0.0

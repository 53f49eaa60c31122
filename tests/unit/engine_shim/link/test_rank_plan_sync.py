"""What rank 0 takes in, all ranks adopt, and then choose alike."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.link import rank_plan_sync
from engine_shim.link.messages import ArrivedPlan, table_digest
from engine_shim.link.plan_follower import PlanFollower, Source, make_safe_default
from engine_shim.link.rank_plan_sync import RankPlanSync, RankUpdate
from speculation.v1.engine_pb2 import Drafter
from speculation.v1.plan_pb2 import Plan, PlanRow, Probe

DRAFTERS = [Drafter(name="eagle3", gammas=[0, 1, 3, 5])]
LEASE = 10.0
GRACE = 5.0


class Link:
    """Rank 0's: gives the plans it is given."""

    def __init__(self) -> None:
        self.plan: ArrivedPlan | None = None

    def receive(self) -> ArrivedPlan | None:
        plan, self.plan = self.plan, None
        return plan


class ThreeRanks:
    """Three ranks; `broadcast` as SGLang does it."""

    def __init__(self) -> None:
        self.link = Link()
        link: Any = self.link
        self.ranks = [RankPlanSync(PlanFollower(DRAFTERS, make_safe_default(1), GRACE), link)]
        self.ranks += [
            RankPlanSync(PlanFollower(DRAFTERS, make_safe_default(1), GRACE), None)
            for _ in range(2)
        ]

    def outgoing_updates(self) -> list[RankUpdate]:
        assert all(rank.outgoing_updates() == [] for rank in self.ranks[1:])
        return self.ranks[0].outgoing_updates()

    def broadcast(self, updates: list[RankUpdate]) -> None:
        for rank in self.ranks:
            # The sender gets its own list back, as from SGLang's broadcast.
            received = updates if rank is self.ranks[0] else pickle.loads(pickle.dumps(updates))
            for update in received:
                rank.adopt(update)

    def choose(self, batch_size: int = 1) -> tuple[int, Source]:
        first, *others = [rank.choose(batch_size) for rank in self.ranks]
        assert all(other == first for other in others)
        return first.gamma, first.source


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rank_plan_sync, "monotonic", lambda: time.now)
    return time


def row(bound: int, gamma: int, probe: Probe | None = None, *, asleep: bool = False) -> PlanRow:
    return PlanRow(
        max_batch_size=bound, drafter="eagle3", gamma=gamma, probe=probe, drafter_asleep=asleep
    )


def plan_of(epoch: int, now: float, *rows: PlanRow, session: int = 1) -> ArrivedPlan:
    plan_message = Plan(epoch=epoch, rows=rows, lease_ms=round(LEASE * 1e3), session=session)
    return ArrivedPlan(plan_message, round(now * 1e9), table_digest(plan_message))


def plan(epoch: int, gamma: int, now: float, probe: Probe | None = None) -> ArrivedPlan:
    return plan_of(epoch, now, row(64, gamma, probe))


PROBE = Probe(probe_id=7, drafter="eagle3", gamma=3, steps=2)


def test_a_plan_is_chosen_from_once_all_have_it(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    assert engine.outgoing_updates() == []
    engine.link.plan = plan(1, 5, clock.now)
    updates = engine.outgoing_updates()
    assert engine.choose() == (1, Source.SAFE_DEFAULT)
    engine.broadcast(updates)
    assert engine.choose() == (5, Source.PLAN)
    assert engine.outgoing_updates() == []


def test_a_lost_broadcast_is_sent_again_until_it_arrives(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    engine.link.plan = plan(1, 5, clock.now)
    first = engine.outgoing_updates()
    clock.now += 1
    again = engine.outgoing_updates()
    assert [update.plan for update in again] == [update.plan for update in first]
    engine.broadcast(again)
    assert engine.outgoing_updates() == []
    # What was only held back does no harm.
    engine.broadcast(first)
    assert engine.choose() == (5, Source.PLAN)


def test_a_newer_plan_overtakes_one_that_was_lost(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    engine.link.plan = plan(1, 5, clock.now)
    held_back = engine.outgoing_updates()
    engine.link.plan = plan(2, 3, clock.now)
    engine.broadcast(engine.outgoing_updates())
    engine.broadcast(held_back)
    assert engine.choose() == (3, Source.PLAN)


def test_a_plan_of_an_ended_session_does_not_come_back(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    engine.link.plan = plan(9, 5, clock.now)
    held_back = engine.outgoing_updates()
    # A sidecar that was started again counts its plans from the start.
    engine.link.plan = plan_of(1, clock.now, row(64, 3), session=2)
    engine.broadcast(engine.outgoing_updates())
    engine.broadcast(held_back)
    assert engine.choose() == (3, Source.PLAN)


def test_time_passes_for_all_at_once(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    engine.link.plan = plan(1, 5, clock.now)
    engine.broadcast(engine.outgoing_updates())
    seen = []
    for _ in range(40):
        clock.now += 0.5
        updates = engine.outgoing_updates()
        before = engine.choose()
        engine.broadcast(updates)
        seen.append(len(updates))
        assert updates or engine.choose() == before
    assert sum(seen) == 2
    assert engine.choose() == (1, Source.SAFE_DEFAULT)
    engine.link.plan = plan(2, 3, clock.now)
    engine.broadcast(engine.outgoing_updates())
    assert engine.choose() == (3, Source.PLAN)


def test_a_lapse_that_was_lost_is_told_again(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    engine.link.plan = plan(1, 5, clock.now)
    engine.broadcast(engine.outgoing_updates())
    clock.now += LEASE + 0.1
    assert len(engine.outgoing_updates()) == 1
    clock.now += GRACE
    engine.broadcast(engine.outgoing_updates())
    assert engine.choose() == (1, Source.SAFE_DEFAULT)
    assert engine.outgoing_updates() == []


def test_a_copy_that_was_held_back_does_not_stop_the_clock(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    engine.link.plan = plan(1, 5, clock.now)
    held_back = engine.outgoing_updates()
    clock.now += LEASE + 0.1
    again = engine.outgoing_updates()
    engine.broadcast([*held_back, *again])
    engine.broadcast(engine.outgoing_updates())
    assert engine.choose() == (5, Source.GRACE)


def test_the_steps_of_a_probe_are_counted_alike(clock: SimpleNamespace) -> None:
    engine = ThreeRanks()
    engine.link.plan = plan(1, 5, clock.now, PROBE)
    engine.broadcast(engine.outgoing_updates())
    assert [engine.choose()[0] for _ in range(4)] == [3, 3, 5, 5]


def test_a_lone_rank_adopts_and_chooses_what_several_would(clock: SimpleNamespace) -> None:
    several, link = ThreeRanks(), Link()
    alone = RankPlanSync(PlanFollower(DRAFTERS, make_safe_default(1), GRACE), link)  # type: ignore[arg-type]
    rows = (row(2, 5, PROBE), row(64, 0, asleep=True))
    for number in range(80):
        if number in {10, 30}:
            link.plan = several.link.plan = plan_of(number, clock.now, *rows)
        several.broadcast(several.outgoing_updates())
        alone.receive_and_adopt()
        for size in (1, 1, 3):
            chosen = alone.choose(size)
            assert (chosen.gamma, chosen.source) == several.choose(size)
        clock.now += 0.5
    assert several.ranks[0]._plan_follower.lapses == alone._plan_follower.lapses == 1
    assert alone.choose(1).source is Source.SAFE_DEFAULT


def test_a_choice_is_made_anew_for_another_batch_another_plan_and_in_a_probe(
    clock: SimpleNamespace,
) -> None:
    link = Link()
    alone = RankPlanSync(PlanFollower(DRAFTERS, make_safe_default(1), GRACE), link)  # type: ignore[arg-type]
    link.plan = plan_of(1, clock.now, row(2, 5), row(64, 3))
    alone.receive_and_adopt()
    assert alone.choose(1) is alone.choose(1)
    assert [alone.choose(size).gamma for size in (1, 3, 3, 2)] == [5, 3, 3, 5]
    link.plan = plan(2, 0, clock.now, Probe(probe_id=9, drafter="eagle3", gamma=3, steps=1))
    alone.receive_and_adopt()
    assert [alone.choose(2).gamma for _ in range(3)] == [3, 0, 0]

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.link import plan_follower
from engine_shim.link.errors import UnusablePlanError
from engine_shim.link.messages import MAX_PACKET_BYTES, ArrivedPlan, encode_plan
from engine_shim.link.plan_follower import PlanFollower, Source, StepChoice, make_safe_default
from speculation.v1.engine_pb2 import Drafter
from speculation.v1.plan_pb2 import (
    REGIME_MODE_COLLECT,
    REGIME_MODE_OFF,
    REGIME_MODE_ONLINE,
    MixtureRule,
    Plan,
    PlanRow,
    Probe,
    Regime,
)

DRAFTERS = [
    Drafter(name="eagle3", gammas=[0, 1, 3, 5]),
    Drafter(name="dflash", gammas=[0, 7]),
]
ARMS = [(drafter.name, gamma) for drafter in DRAFTERS for gamma in drafter.gammas]
SAFE = make_safe_default(1)
GRACE_SECONDS = 10.0


def plan(
    epoch: int,
    *rows: PlanRow,
    session: int = 1,
    arrival: float = 0.0,
    lease_ms: int = 2000,
    digest: int = 0,
) -> ArrivedPlan:
    plan_message = Plan(epoch=epoch, rows=rows, lease_ms=lease_ms, session=session)
    return ArrivedPlan(plan_message, int(arrival * 1e9), digest)


def row(bound: int, gamma: int, probe: Probe | None = None, *, asleep: bool = False) -> PlanRow:
    return PlanRow(
        max_batch_size=bound, drafter="eagle3", gamma=gamma, probe=probe, drafter_asleep=asleep
    )


def probe_of(probe_id: int, gamma: int, steps: int) -> Probe:
    return Probe(probe_id=probe_id, drafter="eagle3", gamma=gamma, steps=steps)


def steered() -> PlanFollower:
    return PlanFollower(DRAFTERS, SAFE, GRACE_SECONDS)


def test_without_a_plan_the_safe_default_runs():
    state = steered()
    assert state.choose(4, 0.0) == SAFE
    assert state.choose(4, 1e9).source is Source.SAFE_DEFAULT
    assert state.lapses == 0


def test_each_batch_size_gets_its_bucket_and_the_last_row_serves_all_larger_ones():
    state = steered()
    assert state.accept(plan(1, row(1, 5), row(8, 3), row(32, 0)), 0.0)
    gammas = [state.choose(b, 0.1).gamma for b in (1, 2, 8, 9, 32, 33, 10_000)]
    assert gammas == [5, 3, 3, 0, 0, 0, 0]


def test_lease_then_grace_then_safe_default_then_steered_again():
    state = steered()
    state.accept(plan(1, row(8, 3)), 0.0)
    assert state.choose(4, 1.999).source is Source.PLAN
    assert state.choose(4, 2.0) == StepChoice(0, 3, False, 1, 0, Source.GRACE, 1)
    assert state.choose(4, 11.999).source is Source.GRACE
    assert state.choose(4, 12.0) == SAFE
    assert state.lapses == 1
    state.accept(plan(2, row(8, 5), arrival=20.0), 20.0)
    assert state.choose(4, 20.0) == StepChoice(0, 5, False, 2, 0, Source.PLAN, 1)
    assert state.choose(4, 22.5).source is Source.GRACE
    assert state.lapses == 2


def test_rows_that_fit_the_engine_do_not_make_an_older_plan_fit():
    state, newer = steered(), plan(2, row(8, 3))
    assert state.accept(newer, 0.0)
    assert not state.accept(plan(1, row(8, 3)), 0.0)
    assert state.plan == newer.plan


def test_rows_that_are_known_by_their_digest_are_not_read_again():
    state = steered()
    assert state.accept(plan(1, row(8, 3), digest=5), 0.0)
    assert state.accept(plan(2, digest=5), 0.0)
    assert (state.choose(4, 0.1).epoch, state.choose(4, 0.1).gamma) == (2, 3)
    # Without one, each table is looked at.
    assert not state.accept(plan(3), 0.0)
    assert not state.accept(plan(4, row(8, 2), digest=6), 0.0)
    assert not state.accept(plan(5, row(8, 2), digest=6), 0.0)
    assert state.accept(plan(6, row(8, 5), digest=7), 0.0)
    assert state.choose(4, 0.1).gamma == 5


def test_the_drafter_is_updated_under_a_plan_that_says_so_and_not_in_free_flight():
    state = steered()
    assert state.update_stride(0.0) == 0
    for epoch, (mode, stride, expected) in enumerate(
        [
            (REGIME_MODE_ONLINE, 5, 5),
            (REGIME_MODE_OFF, 0, 0),
            (REGIME_MODE_COLLECT, 0, 0),
            (REGIME_MODE_ONLINE, 20, 20),
        ]
    ):
        arrived_plan = plan(epoch, row(8, 3))
        arrived_plan.plan.regime.CopyFrom(Regime(mode=mode, stride=stride))
        assert state.accept(arrived_plan, 0.0)
        assert state.update_stride(1.0) == expected
    assert state.update_stride(2.5) == 20  # grace
    assert state.update_stride(12.0) == 0


def test_the_lease_counts_from_the_arrival_at_the_agent():
    state = steered()
    state.accept(plan(1, row(8, 3), arrival=100.0), 101.5)
    assert state.choose(1, 101.9).source is Source.PLAN
    assert state.choose(1, 102.0).source is Source.GRACE


def test_an_arrival_in_the_future_counts_as_now():
    state = steered()
    state.accept(plan(1, row(8, 3), arrival=1e6), 5.0)
    assert state.choose(1, 7.1).source is Source.GRACE


def test_an_older_epoch_is_refused_and_the_same_one_renews_the_lease():
    state = steered()
    state.accept(plan(5, row(8, 3)), 0.0)
    assert not state.accept(plan(4, row(8, 5), arrival=1.0), 1.0)
    assert state.choose(1, 1.0).gamma == 3
    assert state.accept(plan(5, row(8, 3), arrival=1.5), 1.5)
    assert state.choose(1, 3.0).source is Source.PLAN


def test_a_new_session_begins_its_epochs_again():
    state = steered()
    state.accept(plan(500, row(8, 3)), 0.0)
    assert state.accept(plan(1, row(8, 5), session=2, arrival=1.0), 1.0)
    assert state.choose(1, 1.0)[:2] == (0, 5)


@pytest.mark.parametrize(
    "bad",
    [
        row(9, 2),
        PlanRow(max_batch_size=9, drafter="medusa", gamma=0),
        row(9, 3, Probe(probe_id=1, drafter="dflash", gamma=5, steps=1)),
    ],
)
def test_a_plan_with_an_arm_that_the_engine_lacks_changes_nothing(bad):
    state = steered()
    state.accept(plan(1, row(8, 3)), 0.0)
    assert not state.accept(plan(2, row(4, 5), bad), 0.0)
    assert state.choose(1, 0.1).epoch == 1


def good(**changes: Any) -> Plan:
    plan_fields: dict[str, Any] = {"epoch": 1, "rows": [row(4, 3)], "lease_ms": 1}
    return Plan(**(plan_fields | changes))


def rule(**changes: Any) -> MixtureRule:
    known: dict[str, Any] = {
        "drafter": "dflash",
        "gamma": 7,
        "main_expected": 1.5,
        "free_expected": [0.5, 2.0],
    }
    return MixtureRule(**({**known, "least_match": 2, "ratio_weight": 0.125} | changes))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (good(rows=[]), "0 rows"),
        (good(rows=[row(n + 1, 3) for n in range(513)]), "513 rows"),
        (good(rules=[rule()] * 256), "256 rules"),
        (good(lease_ms=0), "no lease"),
        (good(rows=[row(4, 3), row(4, 3)]), "4 after 4"),
        (good(rows=[row(0, 3)]), "0 after 0"),
        (good(rows=[row(1, 7)]), "did not introduce gamma 7 of drafter 'eagle3'"),
        (good(rows=[row(1, 1, asleep=True)]), "with the drafter asleep"),
        (good(rows=[row(1, 1, probe_of(1, 3, 1), asleep=True)]), "with the drafter asleep"),
        (good(rows=[row(1, 1, probe_of(1, 3, 0))]), "has no steps"),
        (good(rows=[row(1, 1, probe_of(0, 3, 2))]), "probe 0 has no steps"),
        (good(rules=[rule(drafter="medusa")]), "drafter 'medusa'"),
        (good(rules=[rule(gamma=3)]), "did not introduce gamma 3"),
        (good(rules=[rule(least_match=0)]), "for matches of 0 tokens"),
        (good(rules=[rule(free_expected=[])]), "a rule for 0 match lengths"),
        (good(rules=[rule(free_expected=[1.0] * 17)]), "a rule for 17 match lengths"),
        (good(rules=[rule(main_expected=float("inf"))]), "a rule with the numbers"),
        (good(rules=[rule(main_expected=float("nan"))]), "a rule with the numbers"),
        (good(rules=[rule(main_expected=65.0)]), "a rule with the numbers"),
        (good(rules=[rule(free_expected=[-1.0])]), "a rule with the numbers"),
        (good(rules=[rule(ratio_weight=1.5)]), "a rule with the numbers"),
    ],
)
def test_a_plan_that_the_engine_cannot_run_is_refused(bad: Plan, message: str):
    state = steered()
    with pytest.raises(UnusablePlanError, match=message):
        state.check(ArrivedPlan(bad, 0))
    assert not state.accept(ArrivedPlan(bad, 0), 0.0)
    assert state.plan is None


def test_the_largest_plan_is_usable():
    rows = [row(n + 1, 3) for n in range(plan_follower.MAX_ROWS)]
    rules = [rule(free_expected=[1.0] * 16)] * plan_follower.MAX_RULES
    largest = ArrivedPlan(good(rows=rows, rules=rules), 0, table_digest=1)
    assert len(encode_plan(largest)) <= MAX_PACKET_BYTES
    assert steered().accept(largest, 0.0)


def test_rules_are_kept_for_as_long_as_the_plan_has_the_same():
    state = steered()
    assert state.mixture_rules == ()
    for epoch in (1, 2):
        state.accept(ArrivedPlan(good(epoch=epoch, rules=[rule()]), 0, table_digest=3), 0.0)
        if epoch == 1:
            first = state.mixture_rules
    assert list(first) == [rule()]
    assert state.mixture_rules is first


@pytest.mark.parametrize("mode", [-1, 9, 2**31 - 1])
def test_a_regime_that_this_version_does_not_know_asks_for_nothing(mode: int):
    state, plan_message = steered(), good()
    plan_message.regime.mode, plan_message.regime.stride = mode, 5  # type: ignore[assignment]
    assert state.accept(ArrivedPlan(plan_message, 0), 0.0)
    assert (state.update_stride(0.0), state.collects_signals(0.0)) == (0, False)


def test_a_probe_runs_for_its_steps_in_its_bucket_only():
    state = steered()
    state.accept(plan(1, row(4, 3), row(16, 1, probe_of(77, 5, 3))), 0.0)
    chosen = [state.choose(b, 0.1) for b in (8, 2, 8, 8, 8, 8)]
    assert [c.gamma for c in chosen] == [5, 3, 5, 5, 1, 1]
    assert [c.probe_id for c in chosen] == [77, 0, 77, 77, 0, 0]


def test_a_row_that_sleeps_does_so_only_in_its_steps_without_a_draft():
    state = steered()
    drafting = row(4, 3, probe_of(1, 0, 1), asleep=True)
    plain = row(16, 0, probe_of(2, 3, 1), asleep=True)
    state.accept(plan(1, drafting, plain), 0.0)
    chosen = [state.choose(b, 0.1) for b in (2, 2, 8, 8)]
    assert [(c.gamma, c.asleep) for c in chosen] == [(0, True), (3, False), (3, False), (0, True)]


def test_a_renewed_plan_continues_its_probe_and_never_starts_it_again():
    state = steered()
    probe = probe_of(77, 5, 3)
    state.accept(plan(1, row(8, 1, probe)), 0.0)
    assert state.choose(4, 0.1).gamma == 5
    state.accept(plan(2, row(8, 1, probe)), 0.2)
    assert [state.choose(4, 0.3).gamma for _ in range(4)] == [5, 5, 1, 1]
    state.accept(plan(3, row(8, 1)), 0.4)
    state.accept(plan(4, row(8, 1, probe)), 0.5)
    assert state.choose(4, 0.6).gamma == 1


def test_a_new_session_may_use_a_probe_identifier_again():
    state = steered()
    probe = probe_of(1, 5, 1)
    state.accept(plan(1, row(8, 1, probe)), 0.0)
    assert [state.choose(4, 0.1).gamma for _ in range(2)] == [5, 1]
    state.accept(plan(1, row(8, 1, probe), session=2), 0.2)
    assert [state.choose(4, 0.3).gamma for _ in range(2)] == [5, 1]


def test_a_probe_rests_during_grace_and_goes_on_with_the_next_lease():
    state = steered()
    probe = probe_of(1, 5, 2)
    state.accept(plan(1, row(8, 1, probe)), 0.0)
    assert state.choose(4, 0.1).gamma == 5
    assert state.choose(4, 3.0)[1] == 1
    state.accept(plan(2, row(8, 1, probe), arrival=4.0), 4.0)
    assert [state.choose(4, 4.1).gamma for _ in range(2)] == [5, 1]


def test_the_memory_of_probes_is_bounded():
    state = steered()
    for epoch in range(1, 10_000):
        state.accept(plan(epoch, row(8, 1, probe_of(epoch, 5, 1))), 0.0)
    assert len(state._probe_steps_left) <= plan_follower._MAX_REMEMBERED_PROBES


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.4, 1.0, 5.0, 30.0])),
        st.tuples(st.just("choose"), st.integers(1, 40)),
        st.tuples(
            st.just("plan"),
            st.tuples(
                st.integers(1, 2),  # session
                st.integers(1, 6),  # epoch
                st.sampled_from([1, 500, 3000]),  # lease_ms
                st.sampled_from([0.0, 0.3, 4.0, -9.0]),  # age on arrival, seconds
                st.lists(
                    st.tuples(
                        st.sampled_from([*ARMS, ("eagle3", 2)]),
                        st.none() | st.tuples(st.integers(1, 4), st.integers(1, 3)),
                    ),
                    min_size=1,
                    max_size=4,
                ),
            ),
        ),
    ),
    max_size=60,
)


def _make_plan(arguments, now: float) -> ArrivedPlan:
    session, epoch, lease_ms, age, entries = arguments
    rows = [
        PlanRow(
            max_batch_size=8 * (i + 1),
            drafter=arm[0],
            gamma=arm[1],
            probe=None if probe is None else probe_of(probe[0], 5, probe[1]),
        )
        for i, (arm, probe) in enumerate(entries)
    ]
    return plan(epoch, *rows, session=session, arrival=now - age, lease_ms=lease_ms)


@given(OPERATIONS)
def test_every_choice_is_a_row_of_the_newest_plan_within_its_lease_and_grace(operations):
    state = steered()
    now = 1000.0
    newest: Plan | None = None
    lease_end = float("-inf")
    probed: Counter[int] = Counter()
    promised: dict[int, int] = {}
    for operation, argument in operations:
        if operation == "wait":
            now += argument
        elif operation == "plan":
            arrived = _make_plan(argument, now)
            issued = arrived.plan
            usable = all((r.drafter, r.gamma) in ARMS for r in issued.rows)
            same = newest is not None and newest.session == issued.session
            fresh = not same or newest is None or issued.epoch >= newest.epoch
            assert state.accept(arrived, now) == (usable and fresh)
            if not (usable and fresh):
                continue
            if not same:
                probed.clear()
                promised.clear()
            for r in issued.rows:
                if r.HasField("probe"):
                    promised.setdefault(r.probe.probe_id, r.probe.steps)
            newest = issued
            lease_end = min(arrived.arrival_ns * 1e-9, now) + issued.lease_ms * 1e-3
        else:
            choice = state.choose(argument, now)
            if newest is None or now >= lease_end + GRACE_SECONDS:
                assert choice == SAFE
                continue
            assert choice.source is (Source.PLAN if now < lease_end else Source.GRACE)
            assert (choice.session, choice.epoch) == (newest.session, newest.epoch)
            matching = [r for r in newest.rows if argument <= r.max_batch_size]
            r = matching[0] if matching else newest.rows[-1]
            if choice.probe_id:
                assert r.HasField("probe")
                assert choice.source is Source.PLAN
                assert (choice.probe_id, choice.gamma) == (r.probe.probe_id, r.probe.gamma)
                probed[choice.probe_id] += 1
                assert probed[choice.probe_id] <= promised[choice.probe_id]
            else:
                assert state.drafter_names[choice.drafter_index] == r.drafter
                assert (choice.gamma, choice.asleep) == (r.gamma, r.drafter_asleep)
                if r.HasField("probe") and choice.source is Source.PLAN:
                    assert probed[r.probe.probe_id] == promised[r.probe.probe_id]

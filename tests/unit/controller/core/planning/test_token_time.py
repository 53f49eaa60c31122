"""A bound on the time per output token: whose it is, what it excludes, and what it leaves alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.table import Costs
from controller.core.engine_spec import Arm
from controller.core.plan import Reason
from controller.core.planning.baseline_planners import TidePlanner
from controller.core.planning.observation_schedule import ObservationScheduler
from controller.core.planning.overrides import NO_LIMITS, Limits
from controller.core.planning.planner import Planner, Values
from controller.core.planning.token_time import TokenTimeBound, token_time_bounds
from controller.core.settings import PlannerSettings

ARMS = [Arm("mtp", g) for g in (0, 1, 2, 3)]
BATCH = 8
PLAIN = PlannerSettings(probe_share=0.0)
RESTLESS = ShiftProbabilities(any_shift=0.02, better_shift=0.02)


def values(ms: Any, catch_up: float = 0.0) -> Values:
    """Values of arms that take `ms` a token; ms: by arm, or [arms][rows].

    Every second draft is accepted.
    """
    tpot = np.asarray(ms, dtype=float).reshape(len(ARMS), -1) / 1e3
    expected = np.repeat([[arm.gamma / 2] for arm in ARMS], tpot.shape[1], axis=1)
    seconds = tpot * (1 + expected)
    return Values(
        ARMS, TrafficCurves({}, {}, {}), expected,
        Costs(seconds, np.zeros(seconds.shape, dtype=bool)),
        np.full(tpot.shape, catch_up), CatchUpPrice(0.0, 0.0), BATCH / tpot,
    )  # fmt: skip


def planner(
    *bounds: TokenTimeBound | None, feasible: Any = None, settings: PlannerSettings = PLAIN
) -> Planner:
    planner_under_test = Planner(ARMS, tuple(range(1, len(bounds) + 1)), settings)
    limit(planner_under_test, *bounds, feasible=feasible)
    return planner_under_test


def limit(owner: Planner, *bounds: TokenTimeBound | None, feasible: Any = None) -> None:
    if feasible is not None:
        feasible = np.array([feasible] * len(bounds), dtype=bool).T
    owner.set_rows(tuple(range(1, len(bounds) + 1)), feasible, None, bounds)


SETTING, COMMAND = TokenTimeBound(0.01), TokenTimeBound(0.01, "slow")


@pytest.mark.parametrize(
    ("ceiling", "asked", "bound"),
    [
        (0.0, None, None),
        (0.02, None, TokenTimeBound(0.02)),
        (0.0, 0.03, TokenTimeBound(0.03, "o")),
        (0.02, 0.03, TokenTimeBound(0.02)),
        (0.03, 0.02, TokenTimeBound(0.02, "o")),
        # What the setting demands anyway is not the override's doing.
        (0.02, 0.02, TokenTimeBound(0.02)),
    ],
)
def test_of_setting_and_override_the_stricter_one_holds(ceiling, asked, bound):
    limits = NO_LIMITS if asked is None else Limits(tpot_max_seconds=asked, tpot_by="o")
    assert token_time_bounds(ceiling, [limits]) == (() if bound is None else (bound,))


def test_rows_have_bounds_of_their_own():
    limits = [NO_LIMITS, Limits(tpot_max_seconds=0.02, tpot_by="o")]
    assert token_time_bounds(0.0, limits) == (None, TokenTimeBound(0.02, "o"))


@given(
    st.lists(st.floats(1.0, 100.0), min_size=4, max_size=4),
    st.floats(1.0, 100.0),
    st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
)
@settings(max_examples=200, deadline=None)
def test_at_one_batch_size_a_bound_never_costs_throughput(ms, bound, feasible):
    # The arm with the most tokens per second is the one with the smallest time per token.  An arm
    # that takes exactly as long as the bound allows may keep it or not: rounding decides.
    assume(all(abs(one - bound) > 1e-9 * bound for one in ms))
    free, bounded = (
        planner(None, feasible=feasible),
        planner(TokenTimeBound(bound / 1e3), feasible=feasible),
    )
    assert bounded.update(values(ms)) == free.update(values(ms))
    assert bounded.pop_excluded() == {}


def test_where_nothing_keeps_it_the_choice_is_the_one_without_a_bound():
    free, bounded = planner(None), planner(SETTING)
    # The last one is the smallest time per token, after gains within and beyond the margin.
    for ms, arm in (
        ([12.0, 11.0, 11.5, 13.0], 1),
        ([10.95, 11.0, 12.0, 13.0], 1),
        ([10.7, 11.0, 12.0, 13.0], 0),
    ):
        assert bounded.update(values(ms)) == free.update(values(ms)) == [arm]
        assert bounded.reasons == free.reasons
        assert bounded.pop_excluded() == {}


def test_only_what_may_run_can_keep_it():
    # gamma = 2 keeps the bound and is forbidden: of those that are left the fastest runs.
    ours = planner(SETTING, feasible=[True, True, False, False])
    assert ours.update(values([12.0, 11.0, 9.0, 10.5])) == [1]


def test_what_may_not_run_does_not_make_a_bound_look_kept():
    # In the first row only gamma = 2 keeps the bound, and it is forbidden.
    two, left = values(np.array([[10.95, 11.0, 9.0, 13.0]] * 2).T), [True, True, False, False]
    ours = planner(SETTING, SETTING, feasible=left)
    assert ours.update(values(np.array([[12.0, 9.0, 9.0, 13.0]] * 2).T)) == [1, 1]
    # As nothing that may run keeps it, gamma = 1 is kept for the margin.
    assert ours.update(two) == [1, 1]
    assert ours.pop_excluded() == {}


def looked_by(ms: Any, bound: TokenTimeBound | None) -> tuple[int, float]:
    """The arm by which plain decoding looks at drafting, and the steps between two looks."""
    looking, row_values = PlannerSettings(), values(ms)
    ours = planner(bound, settings=looking)
    assert ours.update(row_values) == [0]
    may = ours.probe_candidates(row_values, 0, looking.probe_share)
    schedule = ObservationScheduler(ARMS, looking).schedule(
        row_values.tokens_per_second[:, 0].tolist(), row_values.costs.seconds[:, 0].tolist(), BATCH,
        CatchUpPrice(0.0, 0.0), RESTLESS, None if may is None else may.tolist(),
    )  # fmt: skip
    assert schedule is not None
    return schedule.probes[0][0], schedule.interval_steps


def test_plain_decoding_looks_by_an_arm_that_keeps_the_bound():
    # The cheapest look is a draft of 1.  Plain decoding has no room beside the bound for a probe
    # that takes longer.
    ms = [9.92, 10.01, 9.99, 12.0]
    assert looked_by(ms, None)[0] == 1
    assert looked_by(ms, SETTING)[0] == 2


def test_where_no_draft_keeps_the_bound_looking_costs_what_it_costs_without_one():
    # While plain decoding has room, any draft may look that could keep the bound.
    ms = [9.0, 10.5, 10.6, 12.0]
    assert looked_by(ms, SETTING) == looked_by(ms, None)


def test_an_arm_that_breaks_the_bound_is_left_whatever_the_change_costs():
    free, bounded = planner(None), planner(SETTING)
    for ours in (free, bounded):
        assert ours.update(values([12.0, 9.0, 11.0, 11.0])) == [1]
    # A second of catching up is not won back within two by 3 %.
    dear = values([9.9, 10.2, 11.0, 11.0], catch_up=1.0)
    assert free.update(dear) == [1]
    assert free.reasons == [Reason.HOLD]
    assert bounded.update(dear) == [0]


def test_noise_at_the_bound_does_not_switch():
    ours = planner(SETTING)
    ours.update(values([9.99, 10.0, 11.0, 11.0]))
    rng = np.random.default_rng(0)
    for _ in range(500):
        ours.update(values(np.array([9.99, 10.0, 11.0, 11.0]) * rng.uniform(0.996, 1.004, 4)))
    assert ours.switches == 0


def test_without_measured_costs_a_bound_is_judged_by_the_bad_case():
    ours = planner(SETTING)
    ms, doubt = values([10.5, 9.0, 12.0, 12.0]), np.array([[1.0], [0.8], [0.5], [0.5]])
    # gamma = 1 keeps the bound only if its guessed cost is right.
    assert ours.update(ms, doubt) == [0]
    assert ours.update(ms, np.array([[1.0], [0.95], [0.5], [0.5]])) == [1]


def test_a_published_rule_chooses_within_the_bound():
    settings_ = PlannerSettings(policy="tide", tide_gamma=3)
    ours = TidePlanner(ARMS, (1, 2), settings_)
    assert ours.update(values(np.array([[12.0, 9.0, 9.5, 11.0]] * 2).T)) == [3, 3]
    limit(ours, COMMAND, None)
    assert ours.update(values(np.array([[12.0, 9.0, 9.5, 11.0]] * 2).T)) == [1, 3]
    assert ours.reasons == [Reason.OVERRIDE, Reason.EXPLOIT]
    assert ours.pop_excluded() == {0: 3}
    # What was taken is forgotten: it is no state.
    assert ours.pop_excluded() == {}
    # Nothing keeps it: not the rule's arm, but the one with the smallest time per token.
    assert ours.update(values(np.array([[14.0, 12.0, 11.0, 13.0]] * 2).T)) == [2, 3]


def probed(ours: Planner, ms: Any) -> list[int]:
    """The draft lengths that may be probed after a decision."""
    row_values = values(ms)
    ours.update(row_values)
    may = ours.probe_candidates(row_values, 0, 0.0)
    assert may is not None
    return [arm.gamma for arm, ok in zip(ARMS, may, strict=True) if ok]


def test_what_breaks_the_bound_is_not_probed_but_for_gamma_0():
    assert probed(planner(SETTING), [12.0, 9.0, 9.5, 10.5]) == [0, 1, 2]
    forbidden = planner(SETTING, feasible=[False, True, True, True])
    assert probed(forbidden, [12.0, 9.0, 9.5, 10.5]) == [1, 2]
    assert planner(None).probe_candidates(values([12.0, 9.0, 9.5, 10.5]), 0, 0.0) is None


def test_where_nothing_keeps_the_bound_everything_may_be_probed():
    ours = planner(SETTING)
    ours.update(values([12.0, 11.0, 11.5, 13.0]))
    assert ours.probe_candidates(values([12.0, 11.0, 11.5, 13.0]), 0, 0.0) is None
    left = planner(SETTING, feasible=[True, True, False, False])
    assert probed(left, [12.0, 11.0, 9.5, 13.0]) == [0, 1]


def test_plain_decoding_looks_at_what_could_keep_the_bound_while_it_has_room_for_it():
    looking = PlannerSettings(probe_share=0.01)
    # With every draft accepted, a draft of 1 would take 8.25 ms a token, of 2 8 ms, of 3 8.13 ms.
    assert probed(planner(SETTING, settings=looking), [9.8, 11.0, 12.0, 13.0]) == [0, 1, 2, 3]
    assert probed(planner(SETTING, settings=looking), [9.95, 11.0, 12.0, 13.0]) == [0]
    tight = planner(TokenTimeBound(0.00805), settings=looking)
    assert probed(tight, [7.9, 11.0, 12.0, 13.0]) == [0, 2]


def test_an_idle_drafter_may_be_probed_like_one_that_nothing_shows():
    arms = [Arm("mtp", 0), Arm("mtp", 1), Arm("dflash", 1), Arm("dflash", 3)]
    looking = PlannerSettings(probe_share=0.01)

    def may(*ms: float) -> list[Arm]:
        ours = Planner(arms, (1,), looking)
        limit(ours, SETTING)
        row_values = values(ms)
        ours.update(row_values)
        allowed = ours.probe_candidates(row_values, 0, 0.0)
        assert allowed is not None
        return [arm for arm, ok in zip(arms, allowed, strict=True) if ok]

    # With every draft accepted, a draft of 3 would take 7.5 ms, and one of 1 no less than it does.
    assert may(12.0, 9.0, 9.5, 12.0) == arms
    assert may(12.0, 9.0, 10.5, 12.0) == [arms[0], arms[1], arms[3]]
    assert may(12.0, 9.95, 10.5, 12.0) == arms[:2]

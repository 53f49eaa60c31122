"""What is lost against plain decoding stays within an allowance."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance.estimator import AcceptanceEstimator
from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.table import Costs
from controller.core.engine_spec import Arm
from controller.core.planning.constraints import constrain_rows
from controller.core.planning.loss_account import LossAccount
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.planning.planner import Values
from controller.core.settings import PlannerSettings
from tests.support.virtual_engine import engine_spec

ARMS = (Arm("mtp", 0), Arm("mtp", 1), Arm("mtp", 3))
SPEC = engine_spec(gammas=(0, 1, 3))
CALM = ShiftProbabilities(any_shift=1e-4, better_shift=0.0)
CONSTRAINTS = constrain_rows((), SPEC, (1, 8, 64), ARMS)
SETTINGS = PlannerSettings()
DEBT_MAX_STEPS = SETTINGS.debt_max_steps
ALLOWANCE_PER_STEP = SETTINGS.debt_allowance_per_step


def values(expected=(0.0, 0.5, 1.0), cost=(1.0, 1.2, 2.0)):
    """Values whose step at gamma = 0 takes 10 ms in every row."""
    rows = len(CONSTRAINTS.upper_batch_sizes)
    table = np.repeat(np.array(expected)[:, None], rows, axis=1)
    seconds = 0.01 * np.repeat(np.array(cost)[:, None], rows, axis=1)
    return Values(
        ARMS, TrafficCurves({}, {}, {}), table, Costs(seconds, np.zeros(seconds.shape, dtype=bool)),
        np.zeros_like(seconds), CatchUpPrice(0.0, 0.0), (1 + table) / seconds,
    )  # fmt: skip


def run(account, arm, steps, engine=None, extra=0.0, hazard=CALM):
    for _ in range(steps):
        account.observe(arm, 8, extra)
    account.commit(engine or values(), CONSTRAINTS, hazard)


def test_a_step_owes_what_it_takes_beyond_its_tokens_in_plain_steps():
    account = LossAccount(ARMS, SETTINGS)
    # 2 plain steps of time, 1.2 of tokens.
    run(account, 2, 3, values(expected=(0.0, 0.5, 0.2)))
    assert account.debt_steps == pytest.approx(3 * (0.8 - ALLOWANCE_PER_STEP))


def test_gains_pay_debts_and_are_not_saved_up():
    account = LossAccount(ARMS, SETTINGS)
    run(account, 1, 1000)
    assert account.debt_steps == 0.0
    run(account, 0, 1, extra=0.03)
    assert account.debt_steps == pytest.approx(3 - ALLOWANCE_PER_STEP)
    run(account, 1, 100)
    assert account.debt_steps == 0.0


def test_plain_decoding_earns_the_allowance():
    account = LossAccount(ARMS, SETTINGS)
    run(account, 0, 1, extra=0.04)
    assert account.loss_budget_steps < ALLOWANCE_PER_STEP * 2
    run(account, 0, 100)
    assert account.loss_budget_steps == pytest.approx(101 * ALLOWANCE_PER_STEP)


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=600))
@settings(max_examples=60, deadline=None)
def test_whoever_asks_for_room_loses_no_more_than_the_allowance_in_any_stretch(prices):
    account, lost = LossAccount(ARMS, SETTINGS), []
    for price in prices:
        spends = price <= account.loss_budget_steps
        run(account, 0, 1, extra=0.01 * price if spends else 0.0)
        lost.append(price if spends else 0.0)
    for begin in range(len(lost)):
        for end in (begin + 1, (begin + len(lost)) // 2 + 1, len(lost)):
            assert (
                sum(lost[begin:end]) <= DEBT_MAX_STEPS + ALLOWANCE_PER_STEP * (end - begin) + 1e-9
            )


def test_where_gamma_0_may_not_run_nothing_is_owed():
    pinned = Override("pin", Scope(ScopeKind.FLEET), Rule(gamma=3), "ann", "why")
    account, constraints = (
        LossAccount(ARMS, SETTINGS),
        constrain_rows((pinned,), SPEC, (1, 8, 64), ARMS),
    )
    account.observe(2, 8, 1.0)
    account.commit(values(), constraints, CALM)
    assert account.debt_steps == 0.0


def test_drafters_may_be_exchanged_for_a_share_of_what_drafting_has_gained():
    account = LossAccount(ARMS, SETTINGS)
    before = account.limits(values()).wake_up_steps
    # Each gains 0.3 of a plain step.
    run(account, 1, 100)
    assert account.limits(values()).wake_up_steps > before + 10
    assert account.loss_budget_steps == pytest.approx(DEBT_MAX_STEPS)


def test_looking_may_cost_more_where_better_traffic_returns_often():
    often = ShiftProbabilities(any_shift=1e-2, better_shift=1e-2)
    calm, busy = LossAccount(ARMS, SETTINGS), LossAccount(ARMS, SETTINGS)
    run(calm, 1, 100)
    run(busy, 1, 100, hazard=often)
    assert busy.loss_budget_steps > calm.loss_budget_steps + 1


def test_an_expensive_waking_is_done_in_the_end():
    account = LossAccount(ARMS, SETTINGS)
    run(account, 0, 10_000)
    assert account.limits(values()).wake_up_steps == pytest.approx(20)
    run(account, 0, 1, extra=0.2)
    assert account.limits(values()).wake_up_steps < DEBT_MAX_STEPS


@pytest.mark.parametrize(
    ("steps", "least", "most"), [(1, DEBT_MAX_STEPS, 12.0), (5000, 14.0, 16.0)]
)
def test_an_expensive_waking_is_done_at_once_where_drafting_surely_pays(steps, least, most):
    estimator = AcceptanceEstimator(3, SETTINGS)
    for _ in range(steps):
        estimator.observe([4, 2, 1, 1])
    curves = {"mtp": estimator.curve()}
    traffic = TrafficCurves(curves, {}, curves)
    wake_up_values = replace(values(), traffic=traffic, catch_up_seconds=np.full((3, 3), 0.1))
    waking = np.broadcast_to(
        LossAccount(ARMS, SETTINGS).limits(wake_up_values).wake_up_steps, (3, 3)
    )
    # Drafting gains 0.3 of a plain step a step: 50 of them pay for 15.
    assert least <= waking[1, 0] <= most
    # Three drafts gain nothing.
    assert waking[2, 0] == DEBT_MAX_STEPS


def test_gamma_0_needs_no_margin_once_half_is_lost():
    account = LossAccount(ARMS, SETTINGS)
    assert not account.limits(values()).prefers_off
    run(account, 0, 1, extra=0.01 * 0.6 * DEBT_MAX_STEPS)
    assert account.limits(values()).prefers_off

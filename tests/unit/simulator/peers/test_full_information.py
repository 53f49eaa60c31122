"""Every drafter is scored in every step, so that nothing has to be explored."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.controller_policy import FINGERPRINT
from simulator.curves import IndependentCurves
from simulator.engine import EngineOptions, simulate
from simulator.errors import InvalidInputError
from simulator.peers.full_information import FullInformationChoice
from simulator.peers.static import StaticPolicy
from simulator.policy import IdleCounts
from simulator.workload import ClosedLoop, PhaseStart, WorkloadPhase
from tests.unit.simulator.peers.loop import ARMS, profile_of, record
from tests.unit.simulator.small import GAMMAS, surface

COSTS = surface(("mtp", "eagle"))
TWO = COSTS.arms
OFF, MTP_3, EAGLE_0, EAGLE_3 = 0, 2, 4, 6


def make_policy(**changes):
    return FullInformationChoice(TWO, COSTS.make_profile(FINGERPRINT, [1, 4, 16, 32]), **changes)


def traffic(**acceptance):
    """A pool in which the drafters accept so often, at every position."""
    rng = np.random.default_rng(0)
    lengths = np.full(64, 200, dtype=np.int64)
    curves = {name: [rate] * 8 for name, rate in acceptance.items()}
    return IndependentCurves("two", curves).pool(rng, 64, lengths, lengths)


def loop(*kinds, batch=4, tokens=2000):
    return ClosedLoop(
        tuple(
            WorkloadPhase(
                f"{i}", pool, batch, batch * tokens, PhaseStart.CHANGED if i else PhaseStart.DRAINED
            )
            for i, pool in enumerate(kinds)
        )
    )


def run(policy, workload, **changes):
    return simulate(workload, COSTS, policy, EngineOptions(**changes), 0)


def test_it_finds_the_better_drafter_and_never_looks_at_the_other_one_again():
    workload = loop(traffic(mtp=0.3, eagle=0.9))
    result = run(make_policy(), workload)
    drafters = [TWO[arm].drafter for arm in result.trace.arms if TWO[arm].gamma > 0]
    # The first steps run before much is known.
    assert set(drafters[20:]) == {"eagle"}
    best = max(run(StaticPolicy(TWO, arm), workload).tokens_per_second for arm in range(len(TWO)))
    assert result.tokens_per_second > 0.97 * best


def test_drafters_that_change_places_are_noticed_while_idle():
    workload = loop(traffic(mtp=0.2, eagle=0.9), traffic(mtp=0.9, eagle=0.2))
    result = run(make_policy(), workload)
    (shift, _) = result.trace.phase_starts[1]
    before = [TWO[arm].drafter for arm in result.trace.arms[shift - 100 : shift]]
    after = [TWO[arm].drafter for arm in result.trace.arms[shift + 100 : shift + 200]]
    assert before.count("eagle") > 95
    assert after.count("mtp") > 95


def test_where_no_draft_pays_it_decodes_plainly_and_comes_back():
    bad, good = traffic(mtp=0.02, eagle=0.02), traffic(mtp=0.02, eagle=0.9)
    result = run(make_policy(), loop(bad, good))
    (shift, _) = result.trace.phase_starts[1]
    gammas = [TWO[arm].gamma for arm in result.trace.arms]
    assert gammas[shift - 100 : shift].count(0) > 90
    assert gammas[shift + 200 : shift + 300].count(0) == 0


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2), st.sampled_from((1, 4, 16, 32)))
def test_the_arm_that_it_runs_is_worth_most(rates, batch_size):
    policy = make_policy()
    n, depth = 100_000, GAMMAS[-1]
    for drafter, rate in zip(("mtp", "eagle"), rates, strict=True):
        reached = [round(n * rate**k) for k in range(depth)]
        accepted = [round(n * rate ** (k + 1)) for k in range(depth)]
        step = replace(record(OFF, TWO, [1]), idle_counts=[IdleCounts(drafter, reached, accepted)])
        policy.observe(step, 0.0)
    values = [
        (1 + sum(rates[i // 4] ** (k + 1) for k in range(arm.gamma))) / COSTS.seconds[i, batch_size]
        for i, arm in enumerate(TWO)
    ]
    chosen = policy.choose(batch_size, 0.0).arm
    # A position that was never reached leans on the one before it.
    assert values[chosen] == pytest.approx(max(values), rel=1e-3)


def test_the_drafter_that_ran_counts_its_own_positions():
    policy = make_policy()
    policy.observe(record(MTP_3, TWO, [0, 0, 0, 10_000]), 0.0)
    policy.observe(record(EAGLE_3, TWO, [10_000, 0, 0, 0]), 0.0)
    assert policy.expected[MTP_3] == pytest.approx(3, abs=0.01)
    assert policy.expected[EAGLE_3] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("batch_size", "steps"), [(1, 400), (16, 25), (400, 20)])
def test_it_forgets_by_sequences_though_not_at_once(batch_size, steps):
    policy = make_policy()
    policy.observe(record(1, TWO, [0, batch_size]), 0.0)
    for _ in range(steps):
        policy.observe(record(OFF, TWO, [batch_size]), 0.0)
    left = np.exp(-1) * batch_size
    assert policy.expected[1] == pytest.approx((left + 4 * 0.8) / (left + 4))


def test_no_drafter_sleeps():
    policy = make_policy()
    policy.observe(record(1, TWO, [10_000, 0]), 0.0)
    policy.observe(record(5, TWO, [10_000, 0]), 0.0)
    choice = policy.choose(4, 0.0)
    assert TWO[choice.arm].gamma == 0
    assert choice.asleep is False


def test_it_asks_for_every_position_that_a_drafter_can_have():
    assert make_policy().idle_positions == max(GAMMAS)


def test_one_drafter_is_no_choice():
    with pytest.raises(InvalidInputError, match="only \\['mtp'\\] can draft"):
        FullInformationChoice(ARMS, profile_of())


def test_a_profile_without_its_arms_is_refused():
    with pytest.raises(InvalidInputError, match="no batch size is measured at both"):
        FullInformationChoice(TWO, profile_of(TWO[:4]))

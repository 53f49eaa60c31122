"""Mixtures in the simulated engine: their costs, who sees their arms, and what they are worth."""

import dataclasses

import numpy as np
import pytest

from controller.core.engine_spec import Arm
from simulator.comparison.contestants import (
    make_controller,
    peer_factories,
    policy_names,
    static_factories,
)
from simulator.comparison.truth import Truth, hindsight_rules, mixture_steps
from simulator.copying import CopyingSource
from simulator.engine import EngineOptions, simulate
from simulator.errors import InvalidInputError
from simulator.peers.static import StaticPolicy
from simulator.scenarios.scenario_file import standard_scenarios
from simulator.surface import MixtureCost, add_mixtures
from simulator.workload import ClosedLoop, WorkloadPhase

EDITING = standard_scenarios("rows/editing")[0]
MIXTURE = "eagle+ngram"


def requests(count=40, output=60):
    lengths = np.full(count, output, dtype=np.int64)
    return CopyingSource("").pool(np.random.default_rng(1), count, lengths, lengths)


def played(policy, workload, options=EDITING.options, surface=EDITING.surface):
    return simulate(workload, surface, policy, options, 0)


def test_a_step_costs_what_the_main_drafters_does_and_a_lookup():
    plain = EDITING.surface.without_mixtures
    mixed_surface = add_mixtures(plain, {"m": MixtureCost("eagle", "ngram", 1e-4, 0.1)})
    eagle = mixed_surface.arms.index(Arm("eagle", 3))
    mixed = mixed_surface.arms.index(Arm("m", 3))
    for batch, kv in ((1, 400), (16, 40_000)):
        seconds = mixed_surface.step_seconds(batch, kv)
        assert seconds[mixed] == pytest.approx(1.1 * seconds[eagle] + 1e-4)
    assert [arm.gamma for arm in mixed_surface.arms if arm.drafter == "m"] == [1, 2, 3, 4, 6]
    assert mixed_surface.without_mixtures.arms == plain.arms


@pytest.mark.parametrize(
    ("name", "main", "free", "fault"),
    [
        ("eagle", "eagle", "ngram", "is already a drafter"),
        ("m", "eagle", "other", "'other' is not one of"),
        ("m", "ngram", "eagle", "'eagle' is not a lookup"),
        ("m", "ngram", "ngram", "'ngram' is not a lookup"),
    ],
)
def test_a_mixture_of_anything_else_is_refused(name, main, free, fault):
    with pytest.raises(InvalidInputError, match=fault):
        add_mixtures(EDITING.surface.without_mixtures, {name: MixtureCost(main, free)})


def test_peers_do_not_see_the_arms_of_a_mixture():
    short = ClosedLoop((WorkloadPhase("short", requests(), 8, 3000),))
    names = static_factories(EDITING.surface)
    runs = {name: played(make(), short) for name, make in names.items()}
    mixed = {i for i, arm in enumerate(EDITING.surface.arms) if arm.drafter == MIXTURE}
    for name, make in peer_factories(EDITING, runs).items():
        if name != "sglang-adaptive":
            assert not mixed & set(played(make(), short).trace.arms), name
    assert f"static-{MIXTURE}-3" in policy_names(EDITING)


def test_a_mixture_replayed_alone_takes_the_steps_that_the_engine_does():
    pool, surface = requests(), EDITING.surface
    rules = hindsight_rules([pool], surface.drafters)
    mixture = [d.name for d in surface.drafters].index(MIXTURE)
    alone = mixture_steps(pool, surface.drafters, mixture, rules)
    loop = ClosedLoop((WorkloadPhase("one", pool, 1, None),))
    for row, gamma in enumerate(surface.drafters[mixture].gammas):
        arm = surface.arms.index(Arm(MIXTURE, gamma))
        run = played(StaticPolicy(surface.arms, arm, rules), loop, EngineOptions(noise=0.0))
        assert run.steps == alone[row].sum()


def test_rules_in_hindsight_are_means_by_match_length():
    pool = requests()
    rule = next(r for r in hindsight_rules([pool], EDITING.surface.drafters) if r.arm.gamma == 3)
    assert rule.main_expected == pytest.approx(np.minimum(pool.accepted["eagle"], 3).mean())
    longest = np.minimum(pool.accepted["ngram"], 3)[pool.matches == 5].mean()
    assert rule.free_expected[-1] == pytest.approx(longest)
    assert hindsight_rules([pool], EDITING.surface.without_mixtures.drafters) == ()


def test_where_nobody_knows_match_lengths_there_is_one_rule_for_all_rows():
    pool = dataclasses.replace(requests(), matches=None)
    rule = next(r for r in hindsight_rules([pool], EDITING.surface.drafters) if r.arm.gamma == 3)
    mean = np.minimum(pool.accepted["ngram"], 3).mean()
    assert rule.free_expected == pytest.approx((mean, 0, 0, 0))


def test_a_mixture_and_its_main_drafter_have_nothing_to_catch_up_with():
    class InTurn:
        def __init__(self, *arms):
            self.makers = [StaticPolicy(EDITING.surface.arms, arm) for arm in arms]

        def choose(self, batch_size, now):
            self.makers.reverse()
            return self.makers[0].choose(batch_size, now)

        def observe(self, record, now):
            pass

    arms = EDITING.surface.arms
    eagle, ngram, mixed = (arms.index(Arm(name, 2)) for name in ("eagle", "ngram", MIXTURE))
    dear = dataclasses.replace(EDITING.surface, catch_up_pass_seconds=1.0)
    loop = ClosedLoop((WorkloadPhase("p", requests(), 4, 200),))
    still = EngineOptions(noise=0.0)

    def longest(*pair):
        ends = np.array(played(InTurn(*pair), loop, still, dear).trace.ends)
        return np.diff(ends).max()

    assert longest(eagle, mixed) < 0.1
    assert longest(ngram, mixed) > 1.0


def test_the_controller_finds_the_mixture_and_beats_every_single_drafter():
    workload = EDITING.workload(0)
    truth = Truth(workload, EDITING.surface)
    single = [
        played(StaticPolicy(EDITING.surface.arms, i), workload).tokens_per_second
        for i, arm in enumerate(EDITING.surface.without_mixtures.arms)
        if arm.gamma in {2, 3, 4}
    ]
    policy = make_controller(EDITING)
    ours = played(policy, workload)
    mixed = [EDITING.surface.arms[arm].drafter == MIXTURE for arm in ours.trace.arms]
    assert np.mean(mixed) > 0.8
    assert ours.tokens_per_second > 1.03 * max(single)
    best = StaticPolicy(
        EDITING.surface.arms, EDITING.surface.arms.index(Arm(MIXTURE, 4)), truth.rules
    )
    assert ours.tokens_per_second > 0.97 * played(best, workload).tokens_per_second
    (use,) = policy.controller.mixture_estimators.usages().values()
    assert 0.1 < use.free_share < 0.9
    assert use.gained > 0

"""What the property test of the safety net measures with, and what it draws."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from simulator.engine import EngineOptions
from simulator.peers.static import StaticPolicy
from simulator.policy import ArmChoice
from simulator.scenarios.fields import FieldLocations
from simulator.scenarios.scenario_file import load_scenario, parse_scenario
from tests.support.against_off import against_off
from tests.support.dealing import draw_number
from tests.support.random_scenarios import scenarios
from tests.unit.simulator.small import GAMMAS, scenario, surface

NOISY = EngineOptions(noise=0.1, outlier_share=0.01)


class Turns:
    """Runs these arms in turn."""

    def __init__(self, *choices):
        self.choices, self.asked = choices, 0

    def choose(self, batch_size, now):
        self.asked += 1
        return self.choices[(self.asked - 1) % len(self.choices)]

    def observe(self, record, now):
        pass


def played(drawn_scenario, policy):
    comparison = against_off(drawn_scenario, policy)
    assert comparison is not None
    return comparison


def small(acceptance=0.5, **options):
    """Four sequences, all their drafts accepted with this probability."""
    return scenario((acceptance,), tokens=3000, options=replace(NOISY, **options))


def test_off_is_worth_as_much_as_off_in_every_window_whatever_the_noise():
    comparison = played(small(), StaticPolicy(surface().arms, 0))
    assert comparison.worst == pytest.approx(1.0)
    assert comparison.overall == pytest.approx(1.0)
    assert comparison.plain == 1.0


def test_an_arm_is_worth_its_expected_tokens_for_its_true_cost():
    comparison = played(small(), StaticPolicy(surface().arms, 2))
    seconds = surface().seconds[:, 4]
    tokens = 1 + 0.5 + 0.25 + 0.125
    # The context term is small here; requests end within a draft occasionally.
    assert comparison.overall == pytest.approx(tokens * seconds[0] / seconds[2], rel=0.04)
    assert comparison.worst == pytest.approx(comparison.overall, rel=1e-3)


def test_a_kept_drafter_a_switch_and_catching_up_are_paid_for():
    def overall(*choices, **options):
        return played(small(0.0, **options), Turns(*choices)).overall

    assert overall(ArmChoice(0, asleep=False), warm_factor=1.05) == pytest.approx(1 / 1.05)
    every = [ArmChoice(0)] * 9
    free, priced = (overall(*every, ArmChoice(1), switch_seconds=price) for price in (0.0, 1e-3))
    off = 0.005 + 2e-5 * 4
    # Two of ten steps switch.
    assert 1 / priced - 1 / free == pytest.approx(2 * 1e-3 / (10 * off), rel=0.02)
    catching_up = replace(small(0.0), surface=surface(catch_up=1e-5))
    asleep = played(catching_up, Turns(*every, ArmChoice(1)))
    # Nine steps of four sequences were missed.
    assert 1 / asleep.overall - 1 / free == pytest.approx(36 * 1e-5 / (10 * off), rel=0.02)
    assert asleep.change == pytest.approx(36 * 1e-5 / (10 * off), rel=0.1)


def test_a_stale_drafter_is_worth_what_it_accepts():
    choices = [*[ArmChoice(0)] * 5, ArmChoice(1)]
    stale = {"stale_after": 2, "stale_steps": 1, "stale_acceptance": 0.0}
    holes, whole = (played(small(1.0, **o), Turns(*choices)).overall for o in (stale, {}))
    nothing = played(small(0.0), Turns(*choices)).overall
    assert holes == pytest.approx(nothing, rel=0.01)
    assert whole > 1.1 * holes


def test_the_worst_window_is_where_a_policy_is_worst():
    class LateFailure(Turns):
        def choose(self, batch_size, now):
            self.asked += 1
            return ArmChoice(0 if self.asked <= 700 else len(GAMMAS) - 1)

    comparison = played(small(0.0), LateFailure())
    assert comparison.begins >= 700
    assert comparison.worst < comparison.overall < 1


def test_by_request_a_step_is_worth_what_the_requests_of_its_batch_accept():
    """Long requests, one at a time, which accept more or less than their kind's mean."""
    document = {
        "name": "levels",
        "cost": {"published": "h100-llama3.1-8b", "drafters": ["eagle"]},
        "traffic": {
            "chat": {
                "geometric": {"eagle": 0.6},
                "memory": {"level_spread": 2.0, "passage_spread": 0.0, "passage_tokens": 8},
                "output_tokens_mean": 1000,
                "context_tokens_mean": 400,
            }
        },
        "phases": [{"kind": "chat", "batch": 1, "tokens": 20_000}],
    }
    level_scenario = parse_scenario(document, FieldLocations("levels")).make_scenario(Path())
    arm = next(i for i, arm in enumerate(level_scenario.surface.arms) if arm.gamma == 3)
    comparisons = [
        against_off(level_scenario, StaticPolicy(level_scenario.surface.arms, arm), by_request=each)
        for each in (False, True)
    ]  # fmt: skip
    assert comparisons[0] is not None
    assert comparisons[1] is not None
    assert comparisons[1].overall == pytest.approx(comparisons[0].overall, rel=0.1)
    assert comparisons[0].worst == pytest.approx(comparisons[0].overall, rel=0.02)
    assert comparisons[1].worst < 0.8 * comparisons[1].overall


def test_a_run_without_500_steps_has_no_window():
    assert against_off(scenario((0.5,), tokens=300), StaticPolicy(surface().arms, 0)) is None


@given(scenarios())
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
def test_every_draw_is_a_scenario_of_the_schema(tmp_path_factory, drawn):
    folder = tmp_path_factory.mktemp("drawn")
    drawn_scenario = drawn.make_scenario(folder)
    read = load_scenario(drawn.write(folder, "again", "a comment"))
    assert read.name == "again"
    assert (read.surface.seconds == drawn_scenario.surface.seconds).all()
    assert read.options == drawn_scenario.options
    assert read.profile == drawn_scenario.profile


def test_a_number_deals_the_same_scenario_again_and_others_differ():
    first, again = (draw_number(scenarios(), 7) for _ in range(2))
    assert first == again
    assert draw_number(scenarios(), 8) != first


def test_draws_cover_the_schema_evenly():
    """A third and more of what there is two of; nothing that is optional is rare."""
    drawn = [one for one in (draw_number(scenarios(), n) for n in range(400)) if one is not None]
    assert len(drawn) > 390
    seen: Counter[str] = Counter()
    for one in drawn:
        document = one.document
        seen.update(f"cost {name}" for name in document["cost"])
        seen.update(f"engine {name}" for name in document["engine"])
        seen.update(["profile none"] if document["profile"] is None else
                    [f"profile {name}" for name in document["profile"]])  # fmt: skip
        seen.update({f"kind {name}" for kind in document["traffic"].values() for name in kind})
        seen["arrivals"] += "arrivals" in document
        for phase in document.get("phases", ()):
            seen.update({f"phase {name}" for name in phase} | {phase.get("begins")})
    for name in (
        "cost formula", "cost table", "cost published", "cost switch_seconds", "cost scale",
        "cost catch_up_pass_seconds", "cost catch_up_seconds_per_token", "arrivals",
        "engine outlier_share", "engine pace", "engine prefill", "engine stale_steps",
        "profile none", "profile factor", "profile drafting", "profile by_arm",
        "profile by_batch_size", "profile context_term", "profile kv_tokens_per_sequence",
        "kind geometric", "kind positions", "kind survival", "kind memory", "kind mix",
        "phase tokens", "phase context_tokens_mean", "changed", "replaced", "drained",
    ):  # fmt: skip
        assert seen[name] > 0.02 * len(drawn), name

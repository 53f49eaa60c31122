"""Every mechanism of the ablation bench is really switched off, and the tables say what changed."""

import json
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.model import CostModel
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm
from controller.core.planning.exploration import ProbeSituation
from controller.core.planning.observation_schedule import ObservationScheduler
from controller.core.settings import PlannerSettings
from simulator.comparison.contestants import make_controller
from simulator.engine import simulate
from simulator.policy import ArmChoice, Policy, StepRecord
from simulator.scenarios.scenario_file import Scenario, standard_scenarios
from tests.support.dealing import draw_number
from tests.support.random_scenarios import scenarios
from tools.bench import ablation_bench
from tools.bench.ablation_bench import compare, markdown
from tools.bench.ablation_mechanisms import AS_IS, MECHANISMS, Mechanism, Patch
from tools.bench.measurement import run

BY_NAME = {mechanism.name: mechanism for mechanism in MECHANISMS}
BY_BATCH = "acceptance-by-batch/20"
# By mechanism: a scenario in which it acts soon, by its name or as the number of a random one, and
# the steps after which it has acted.  All others act in 160 steps of BY_BATCH.
ACTS_IN: dict[str, tuple[str | int, int]] = {
    "looks from gamma 0": (11, 540),
    "idle drafters' hope": (29, 90),
    "step share of looks": (23, 130),
    "scaled credit": ("wrong-profile/none", 40),
    "pay-back rule": (26, 190),
    "switch margin": (BY_BATCH, 330),
    "discounts": ("wrong-profile/none", 40),
    "reachable arms": ("wrong-profile/none", 40),
    "moderate CUSUM": ("recurring/drafters/20", 50),
    "window test": ("traffic/B=16", 340),
    "unobserved better shifts": (22, 130),
    "idle fading": ("drafters", 40),
    "request classes": ("mixed-classes", 60),
    "unused proposals": ("rows/chat", 40),
    "neighbours' share": ("wrong-profile/random30", 40),
    "surprise": (0, 310),
    "outlier confirmation": ("noise", 240),
    "disagreement": (0, 60),
    "fading of cells": ("load/h100", 40),
    "price of a switch": ("switch-price/B=1", 40),
    "fit of catch-up costs": (11, 60),
    "loss account": (11, 20),
    "limit on wake-ups": (21, 30),
    "first runs": (6, 20),
    "gain share": (26, 20),
    "return share": (35, 90),
    "cautious pay-back": (21, 150),
    "caution of the account": (11, 20),
    "no margin in debt": (11, 30),
}


class StoppedError(Exception):
    """A run has had its steps."""


class StoppingPolicy:
    """A policy that ends the run after a number of steps."""

    def __init__(self, policy: Policy, steps: int) -> None:
        self._policy, self._steps_left = policy, steps

    def choose(self, batch_size: int, now: float) -> ArmChoice:
        """The policy's choice.  Raises StoppedError after the last step."""
        if self._steps_left == 0:
            raise StoppedError
        self._steps_left -= 1
        return self._policy.choose(batch_size, now)

    def observe(self, record: StepRecord, now: float) -> None:
        """Tells the policy."""
        self._policy.observe(record, now)


class WatchedPolicy(StoppingPolicy):
    """Keeps the choices, and the numbers behind them."""

    def __init__(self, scenario: Scenario, settings: PlannerSettings, steps: int) -> None:
        policy = make_controller(scenario, settings)
        super().__init__(policy, steps)
        self._core = policy.controller
        self.history: list[object] = []

    def choose(self, batch_size: int, now: float) -> ArmChoice:
        choice = super().choose(batch_size, now)
        self.history.append((choice.arm, choice.probe_id, self._core.explorer.credit_seconds))
        return choice

    def observe(self, record: StepRecord, now: float) -> None:
        super().observe(record, now)
        values, account = self._core.decision.values, self._core._loss_account
        limits = account.limits(values)
        self.history.append((
            values.tokens_per_second.tobytes(),
            account.loss_budget_steps,
            account.first_run_budget_steps,
            repr(limits),
            self._core.traffic.shift_probabilities,
            self._core.explorer.gamma_zero_budget_share,
        ))  # fmt: skip


@cache
def scenario_of(case: str | int) -> Scenario:
    if isinstance(case, int):
        drawn = draw_number(scenarios(), case)
        assert drawn is not None
        with tempfile.TemporaryDirectory() as folder:
            return drawn.make_scenario(Path(folder))
    return next(one for one in standard_scenarios(case) if one.name == case)


@cache
def history(name: str, case: str | int, steps: int) -> list[object]:
    mechanism, scenario = BY_NAME.get(name, AS_IS), scenario_of(case)
    with mechanism.switched_off() as settings:
        policy = WatchedPolicy(scenario, settings, steps)
        with pytest.raises(StoppedError):
            simulate(scenario.workload(0), scenario.surface, policy, scenario.options, 0)
    return policy.history


def decided_core(settings: PlannerSettings) -> EngineController:
    """A controller after a few steps of BY_BATCH."""
    scenario = scenario_of(BY_BATCH)
    policy = WatchedPolicy(scenario, settings, 40)
    with pytest.raises(StoppedError):
        simulate(scenario.workload(0), scenario.surface, policy, scenario.options, 0)
    return policy._core


def measured_purpose(settings: PlannerSettings) -> str:
    """The probe of an arm that looks expensive and was not measured for long."""
    core = decided_core(settings)
    values = core.decision.values
    known = core.decision.estimates.uncertainty
    drift = np.ones_like(known.drift)
    best_arm = int(values.tokens_per_second[:, 0].argmax())
    drift[best_arm] = 4.0
    stale = replace(known, drift=drift, current_step=known.current_step + 5000)
    current_arm = (best_arm + 1) % len(core.arms)
    core.explorer.cancel()
    core.explorer._reports = 1000
    situation = ProbeSituation(
        values, stale, 0, 1, current_arm, ShiftProbabilities(0.001, 0.001), 0
    )
    core.explorer.start_probe_if_worthwhile(situation, 0.0)
    return core.explorer.purpose


def looking_budget(settings: PlannerSettings) -> float:
    """The share of time for looks after they have found better traffic five times."""
    scheduler = ObservationScheduler((Arm("a", 0), Arm("a", 1)), settings)
    schedule = scheduler.schedule(
        [100.0, 90.0], [0.01, 0.012], 4, CatchUpPrice(0.0, 0.0),
        ShiftProbabilities(0.001, 0.001, 0.001, 5.0),
    )  # fmt: skip
    assert schedule is not None
    return schedule.budget_share


def wake_up_budget(settings: PlannerSettings) -> float:
    """The plain steps for a wake-up, long after the last one."""
    core = decided_core(settings)
    core._loss_account._steps_since_wake_up = 50_000.0
    return float(np.max(core._loss_account.limits(core.decision.values).wake_up_steps))


def costs_after_a_leap(settings: PlannerSettings) -> list[float]:
    """The factors on the costs after a known cell takes 1.4 times as long as before."""
    arms = (Arm("a", 0), Arm("a", 1))
    cost_model = CostModel(arms, (1, 2), None, settings)
    for arm, factor in [(0, 1.0)] * 40 + [(1, 1.0)] * 40 + [(0, 1.0)] * 10 + [(1, 1.4)] * 8:
        seconds = 0.02 * (1 + 0.2 * arm)
        predicted_seconds = cost_model.predict(arm, 1, 100)
        cost_model.observe((arm, 0), 100.0, predicted_seconds, factor * seconds)
        cost_model.commit()
    factors: list[float] = cost_model.drift().ravel().tolist()
    return factors


# What is rare in any scenario is shown in a situation that is made for it.
SHOWN_BY = {
    "stale costs": measured_purpose,
    "found factor": looking_budget,
    "rate of wake-ups": wake_up_budget,
    "leaps": costs_after_a_leap,
}


@pytest.mark.parametrize("name", SHOWN_BY)
def test_switching_it_off_changes_what_is_rare(name: str) -> None:
    with BY_NAME[name].switched_off() as settings:
        off = SHOWN_BY[name](settings)
    assert off != SHOWN_BY[name](PlannerSettings())


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in SHOWN_BY])
def test_switching_it_off_changes_a_decision_or_a_number(name: str) -> None:
    case, steps = ACTS_IN.get(name, (BY_BATCH, 160))
    assert history(name, case, steps) != history(AS_IS.name, case, steps)


def test_all_is_as_before_after_a_mechanism_was_off() -> None:
    before = history(AS_IS.name, BY_BATCH, 160)
    for mechanism in MECHANISMS:
        with mechanism.switched_off():
            pass
    assert history.__wrapped__(AS_IS.name, BY_BATCH, 160) == before


def test_a_name_that_is_gone_is_an_error() -> None:
    gone = Mechanism("gone", "", "", patches=(Patch(ablation_bench, "no_such_name", 0),))
    with pytest.raises(AttributeError, match="no_such_name"), gone.switched_off():
        pass


def test_mechanisms_have_names_of_their_own_and_their_version_tells_them_apart() -> None:
    assert len(BY_NAME) == len(MECHANISMS)
    assert len({mechanism.version for mechanism in (AS_IS, *MECHANISMS)}) == len(MECHANISMS) + 1


def test_a_ratio_is_that_of_the_score_without_to_the_score_with_it() -> None:
    off = MECHANISMS[0]
    results = {
        AS_IS.name: {
            ("a", 0): {"score": 100.0, "seconds": 1.0},
            ("a", 1): {"score": 100.0, "seconds": 1.0},
            ("b", 0): {"score": 50.0, "seconds": 2.0},
            ("safety/0", 0): {"worst": 0.99, "overall": 1.25},
            ("safety/1", 0): {},
        },
        off.name: {
            ("a", 0): {"score": 90.0, "seconds": 1.0},
            ("a", 1): {"score": 90.0, "seconds": 1.0},
            ("b", 0): {"score": 50.0, "seconds": 2.0},
            ("safety/0", 0): {"worst": 0.97, "overall": 1.0},
            ("safety/1", 0): {},
        },
    }
    families = {"a": "one", "b": "other"}
    outcomes = [compare(mechanism, results, families) for mechanism in (AS_IS, off)]
    assert outcomes[1].percent("one") == pytest.approx(-10)
    assert (outcomes[1].runs, outcomes[1].same_runs, outcomes[1].changed_random) == (3, 1, 1)
    table = markdown(outcomes, ["one", "other"])
    assert "| exploration | −10.00 | = | −20.00 | 1.0000 | 1 | 0.970 |" in table
    assert "2 of 3, 1 of 1" in table
    assert "−10.00 a | 0 b |" in table


def test_results_are_kept_and_a_changed_mechanism_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[list[str]] = []
    play = ablation_bench.play

    def watch(case, names):
        played.append(list(names))
        return play(case, names)

    def bench(*arguments: str) -> str:
        command = [
            "ablation_bench", "--folder", str(tmp_path), "--processes", "1", "--seeds", "1",
            "--scenarios", "0", "--part", "mixed-classes", *arguments,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        run(ablation_bench.PARSER, ablation_bench.measure)
        return capsys.readouterr().out

    monkeypatch.setattr(ablation_bench, "play", watch)
    written = tmp_path / "table.md"
    bench("--mechanism", "request classes", "--markdown", str(written))
    assert played == [["as is", "request classes"]]
    assert written.read_text().startswith("| switched off | served |")
    bench("--mechanism", "request classes", "switch margin")
    assert played[1:] == [["switch margin"]]
    changed = Mechanism("switch margin", "", "", {"switch_margin": 0.5})
    monkeypatch.setattr(ablation_bench, "MECHANISMS", (BY_NAME["request classes"], changed))
    with next(tmp_path.glob("results-*.jsonl")).open("a") as file:
        file.write('{"case": "half a line')
    json_file = tmp_path / "figures.json"
    bench("--mechanism", "switch margin", "--json", str(json_file))
    assert played[2:] == [["switch margin"]]
    assert isinstance(json.loads(json_file.read_text()), list)
    bench("--known")
    assert played[3:] == []

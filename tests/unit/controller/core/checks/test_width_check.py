"""An engine that verifies another draft length than its plan asks for is named."""

import dataclasses
import random

import pytest

from controller.core.checks.engine_checks import EngineChecks, WarningKind
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.plan import Plan, PlanRow, Probe, Reason, Regime
from controller.core.step_report import RowGroup, StepFlags, StepReport
from tests.support.virtual_engine import engine_spec, make_engine


def plan_of(epoch: int, *rows: tuple[int, int], probe: Probe | None = None) -> Plan:
    """rows: largest batch and draft length."""
    plan_rows = tuple(
        PlanRow(size, Arm("mtp", gamma), Reason.EXPLOIT, probe) for size, gamma in rows
    )
    return Plan(epoch, plan_rows, Regime(), 3.0, Reason.EXPLOIT, "")


class Steps:
    def __init__(self, *plans: Plan, spec: EngineSpec | None = None) -> None:
        self.checks = EngineChecks(spec or engine_spec())
        for plan in plans:
            self.checks.expect_plan(plan)
        self.step = 0

    def put(self, gamma: int, batch_size: int = 4, epoch: int = 1, **more):
        self.step += 1
        counts = more.pop("counts", (batch_size, *[0] * gamma))
        report = StepReport(
            self.step, batch_size, 512, "mtp", gamma, counts, 0.01, plan_epoch=epoch, **more
        )
        self.checks.observe(report, is_measurement=False)

    @property
    def flagged_arms(self) -> list[str]:
        return [it.found for it in self.checks.warnings() if it.kind is WarningKind.OTHER_WIDTH]


@pytest.mark.parametrize("asked", [0, 3])
def test_an_engine_that_runs_one_length_whatever_is_asked_is_named_with_both(asked):
    steps = Steps(plan_of(1, (64, asked)))
    for _ in range(49):
        steps.put(5)
    assert not steps.flagged_arms
    steps.put(5)
    (flagged_arm,) = steps.flagged_arms
    assert f"asks for mtp gamma {asked}" in flagged_arm
    assert "verifies gamma 5" in flagged_arm
    for _ in range(200):
        steps.put(asked)
    assert not steps.flagged_arms


@pytest.mark.parametrize("flagged", [0, 1])
def test_rows_whose_drafts_a_grammar_forbade_or_a_lookup_did_not_find_are_no_other_length(flagged):
    steps = Steps(plan_of(1, (64, 3)))
    for _ in range(200):
        rows = (RowGroup("mtp", flagged, (1, *[0] * flagged)),)
        steps.put(3, batch_size=1, counts=(1, 0, 0, 0), groups=rows)
    assert not steps.flagged_arms


def test_a_step_of_rows_that_had_ended_or_opted_out_is_not_compared():
    steps = Steps(plan_of(1, (64, 3)))
    for _ in range(200):
        rows = (RowGroup("", 0, (3,)), RowGroup("mtp", 0, (1,), ended=True))
        steps.put(0, groups=rows)
    assert not steps.flagged_arms


def test_a_forced_length_is_compared_as_well():
    steps = Steps(dataclasses.replace(plan_of(1, (64, 3)), reason=Reason.PROFILING))
    for _ in range(60):
        steps.put(5)
    assert steps.flagged_arms


def test_steps_without_a_plan_of_their_own_are_not_compared():
    steps = Steps(plan_of(1, (64, 3)))
    for _ in range(200):
        steps.put(5, epoch=0)
        steps.put(5, flags=StepFlags(unsteered=True))
        steps.put(5, flags=StepFlags(mixed_choice=True))
        # All rows have opted out.
        steps.put(0, groups=(RowGroup("", 0, (4,)),))
    assert not steps.flagged_arms


def test_a_probe_is_what_is_asked_for():
    probe = Probe(7, Arm("mtp", 5), 100)
    steps = Steps(plan_of(1, (64, 3), probe=probe))
    for _ in range(100):
        steps.put(5, probe_id=7)
    assert not steps.flagged_arms
    for _ in range(100):
        steps.put(3, probe_id=7)
    assert steps.flagged_arms


def test_a_batch_that_changes_between_choice_and_step_is_no_disobedience():
    """The choice is made for the batch of the step before."""
    steps = Steps(plan_of(1, (4, 5), (64, 1)))
    for number in range(400):
        steps.put((1, 5)[number % 2], batch_size=(4, 5)[number % 2])
    assert not steps.flagged_arms
    # Other ranks of data-parallel attention may have had the larger batch.
    spec = engine_spec()
    ranks = dataclasses.replace(
        spec, fingerprint=dataclasses.replace(spec.fingerprint, data_parallel_size=2)
    )
    by_ranks = {
        1: Steps(plan_of(1, (4, 5), (64, 1))),
        2: Steps(plan_of(1, (4, 5), (64, 1)), spec=ranks),
    }
    for steps in by_ranks.values():
        for _ in range(100):
            steps.put(1, batch_size=4)
    assert [bool(steps.flagged_arms) for steps in by_ranks.values()] == [True, False]


def test_an_honest_engine_under_changing_batches_and_traffic_is_not_named():
    engine, rng = make_engine(), random.Random(5)
    for _ in range(60):
        engine.run(rng.randrange(5, 40), rng.choice((1, 3, 8, 20, 50)), [rng.random()] * 7)
        assert not engine.core.checks.warnings()

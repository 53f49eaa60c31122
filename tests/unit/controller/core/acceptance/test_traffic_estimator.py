"""A batch is priced as the mix that runs, and what runs nowhere is doubted when traffic moves."""

import random

import numpy as np
import pytest

from controller.core.acceptance.traffic_estimator import (
    MAX_CLASSES,
    TrafficEstimator,
)
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import ClassCounts, ProposalCounts, RowGroup, StepReport
from tests.support.accepted_counts import accepted_counts

SPECS = (
    DrafterSpec("mtp", DrafterKind.MTP, (0, 1, 3)),
    DrafterSpec("dflash", DrafterKind.DFLASH, (7,)),
)
SETTINGS = PlannerSettings()


def counts_of(rng, sequences, gamma, acceptance):
    return tuple(accepted_counts(rng, sequences, gamma, acceptance))


def report(step, parts, rng, gamma=3, drafter="mtp", rest=0):
    """parts: {label: (sequences, acceptance)}; rest: sequences of no class, all rejected."""
    classes = tuple(
        ClassCounts(label, counts_of(rng, n, gamma, a)) for label, (n, a) in parts.items()
    )
    total = [rest] + [0] * gamma
    for part in classes:
        total = [t + c for t, c in zip(total, part.accepted_counts, strict=True)]
    return StepReport(
        step, sum(total), 1000, drafter, gamma, tuple(total), 0.01, classes=classes
    )  # fmt: skip


def learnt(parts, steps=400, seed=0):
    traffic, rng = TrafficEstimator(SPECS, SETTINGS), random.Random(seed)
    for step in range(1, steps):
        traffic.observe(report(step, parts, rng))
    return traffic, rng


def changes(traffic, steps):
    """The changes of traffic that the hazard counts after `steps` steps."""
    prior_steps = 1 / TrafficEstimator(SPECS, SETTINGS).shift_probabilities.any_shift
    return traffic.shift_probabilities.any_shift * (prior_steps + steps) - 1


def test_rows_that_are_not_drafted_for_are_discounted_once():
    traffic, rng = TrafficEstimator(SPECS, SETTINGS), random.Random(0)
    for step in range(1, 400):
        counts = counts_of(rng, 4, 3, 0.9)
        total = (counts[0] + 4, *counts[1:])
        groups = (RowGroup("mtp", 3, counts), RowGroup("", 0, (4,)))
        classes = (ClassCounts("code", counts),)
        traffic.observe(
            StepReport(step, 8, 1000, "mtp", 3, total, 0.01, classes=classes, groups=groups)
        )
    expected_accepted = traffic.curves().expected_accepted([Arm("mtp", 3)], np.array([8.0]))
    assert expected_accepted[0, 0] == pytest.approx(sum(0.9**k for k in (1, 2, 3)) / 2, rel=0.05)


def test_the_next_batch_is_priced_as_its_own_mix():
    traffic, rng = learnt({"code": (4, 0.9), "prose": (4, 0.3)})
    mixed = traffic.curves().last_batch["mtp"].expected_accepted[3]
    traffic.observe(report(1000, {"code": (8, 0.9)}, rng))
    code = traffic.curves().last_batch["mtp"].expected_accepted[3]
    traffic.observe(report(1001, {"prose": (8, 0.3)}, rng))
    prose = traffic.curves().last_batch["mtp"].expected_accepted[3]
    truth = {a: sum(a**k for k in (1, 2, 3)) for a in (0.9, 0.3)}
    assert code == pytest.approx(truth[0.9], rel=0.08)
    assert prose == pytest.approx(truth[0.3], rel=0.2)
    assert mixed == pytest.approx((truth[0.9] + truth[0.3]) / 2, rel=0.1)


def test_sequences_of_no_class_count_as_all_traffic():
    traffic, rng = learnt({"code": (4, 0.9), "prose": (4, 0.1)})
    everything = traffic.estimators["mtp"].curve().expected_accepted[3]
    code = traffic.classes["code"]["mtp"].curve().expected_accepted[3]
    traffic.observe(report(1000, {"code": (6, 0.9)}, rng, rest=2))
    expected_accepted = traffic.curves().last_batch["mtp"].expected_accepted[3]
    assert min(everything, code) < expected_accepted < max(everything, code)


def test_without_classes_the_curve_is_that_of_all_traffic():
    traffic, rng = TrafficEstimator(SPECS, SETTINGS), random.Random(1)
    for step in range(1, 100):
        counts = counts_of(rng, 8, 3, 0.6)
        traffic.observe(StepReport(step, 8, 1000, "mtp", 3, counts, 0.01))
    assert traffic.curves().last_batch["mtp"] == traffic.estimators["mtp"].curve()
    assert not traffic.classes


def test_labels_without_end_are_estimated_together():
    traffic, rng = TrafficEstimator(SPECS, SETTINGS), random.Random(2)
    for step in range(1, 200):
        traffic.observe(report(step, {f"user-{step}": (4, 0.7)}, rng))
    assert len(traffic.classes) == MAX_CLASSES
    assert traffic.curves().last_batch["mtp"].expected_accepted[3] == pytest.approx(
        0.7 + 0.49 + 0.343, rel=0.15
    )


def test_a_class_that_is_unused_makes_room_and_one_in_use_does_not():
    traffic, rng = TrafficEstimator(SPECS, SETTINGS), random.Random(2)
    for number in range(MAX_CLASSES):
        traffic.observe(report(number + 1, {f"once-{number}": (4, 0.7)}, rng))
    for step in range(100, SETTINGS.class_unused_steps, 50):
        traffic.observe(report(step, {"once-0": (4, 0.9), "honest": (4, 0.2)}, rng))
    assert "honest" not in traffic.classes
    for step in range(SETTINGS.class_unused_steps + 2, SETTINGS.class_unused_steps + 200):
        traffic.observe(report(step, {"once-0": (4, 0.9), "honest": (4, 0.2)}, rng))
    # The one that was unused for longest has gone; what is known about the others stays.
    assert set(traffic.classes) == {"once-0", "honest"} | {
        f"once-{number}" for number in range(2, MAX_CLASSES)
    }
    assert traffic.curves().by_class["honest"]["mtp"].expected_accepted[3] < 0.5
    assert traffic.curves().by_class["once-0"]["mtp"].expected_accepted[3] > 2.0


def test_a_shift_is_counted_and_makes_standing_drafters_doubtful():
    traffic, rng = TrafficEstimator(SPECS, SETTINGS), random.Random(3)
    for step in range(1, 100):
        traffic.observe(StepReport(step, 8, 1000, "dflash", 7, counts_of(rng, 8, 7, 0.8), 0.01))
    for step in range(100, 300):
        traffic.observe(StepReport(step, 8, 1000, "mtp", 3, counts_of(rng, 8, 3, 0.9), 0.01))
    before, calm = traffic.estimators["dflash"].curve().variance()[0], traffic.shift_probabilities
    seen = traffic.shifts
    for step in range(300, 330):
        traffic.observe(StepReport(step, 8, 1000, "mtp", 3, counts_of(rng, 8, 3, 0.1), 0.01))
    assert traffic.shifts > seen
    assert traffic.shift_probabilities.any_shift > calm.any_shift
    # Nothing is missed by a drafter that sleeps while traffic gets worse.
    assert traffic.shift_probabilities.better_shift == calm.better_shift
    for step in range(330, 360):
        traffic.observe(StepReport(step, 8, 1000, "mtp", 3, counts_of(rng, 8, 3, 0.9), 0.01))
    assert traffic.shift_probabilities.better_shift > calm.better_shift
    assert traffic.estimators["dflash"].curve().variance()[0] > before


def test_a_change_that_takes_a_while_is_one_however_often_it_is_noticed():
    traffic, rng = learnt({"all": (128, 0.9)}, steps=300)
    before = traffic.shifts
    # A batch drains, and those that accept least are the last ones.
    for i in range(90):
        traffic.observe(report(1000 + i, {"all": (128, 0.9 - 0.85 * i / 90)}, rng))
    assert traffic.shifts - before >= 4
    assert changes(traffic, 389) == pytest.approx(1.0)


def test_changes_apart_from_each_other_are_counted_each():
    traffic, rng = learnt({"all": (32, 0.8)}, steps=300)
    for i in range(800):
        traffic.observe(report(1000 + i, {"all": (32, 0.2 if i // 200 % 2 == 0 else 0.8)}, rng))
    assert changes(traffic, 1099) == pytest.approx(4.0)
    better, steps = (
        traffic.shift_probabilities.better_shift,
        (1 + 4) / traffic.shift_probabilities.any_shift,
    )
    assert better * steps == pytest.approx(2.0)


def test_traffic_that_comes_and_goes_is_counted_however_fast():
    traffic, rng = learnt({"all": (128, 0.9)}, steps=300)
    for i in range(400):
        traffic.observe(report(1000 + i, {"all": (128, 0.2 if i // 40 % 2 == 0 else 0.9)}, rng))
    assert changes(traffic, 699) == pytest.approx(10.0)


def test_two_changes_in_one_direction_are_two_if_they_are_apart():
    traffic, rng = learnt({"all": (128, 0.9)}, steps=300)
    for i in range(400):
        traffic.observe(report(1000 + i, {"all": (128, 0.6 if i < 200 else 0.2)}, rng))
    assert changes(traffic, 699) == pytest.approx(2.0)
    assert traffic.shift_probabilities.better_shift == 0


def test_rows_of_a_class_that_were_cut_at_their_end_are_no_rejections():
    traffic = TrafficEstimator(SPECS, SETTINGS)
    own = (ProposalCounts("mtp", 0, (0, 0, 0, 2), (0, 6, 0)),)
    parts = (ClassCounts("code", (0, 0, 0, 2), (0, 6, 0)),)
    for step in range(1, 200):
        # As they were verified, six rows were rejected behind their first draft.
        traffic.observe(
            StepReport(
                step, 8, 1000, "mtp", 3, (0, 6, 0, 2), 0.01, classes=parts, proposals=own
            )
        )  # fmt: skip
    curves = traffic.curves()
    assert curves.all_traffic["mtp"].conditional[1] > 0.9
    code = curves.by_class["code"]["mtp"]
    assert code.conditional[1] > 0.9
    assert code.exposures == curves.all_traffic["mtp"].exposures

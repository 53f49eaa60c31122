"""Rates, winners and shares from recorded steps."""

import json
from dataclasses import replace

import pytest

from controller.core.engine_spec import Arm
from lab.harness.errors import HarnessError
from lab.paced.envelope.outcome import (
    DFLASH,
    MTP,
    STEERED,
    as_json,
    count_agreeing,
    measure,
)
from tests.unit.lab.paced.envelope.recorded import (
    DFLASH_3,
    DILATION,
    MTP_1,
    PACE,
    PLAIN,
    point,
    steps_of,
)


def test_a_rate_is_of_the_model_s_time():
    run = measure(MTP, MTP_1, steps_of(MTP_1, 108), 2, DILATION)
    assert run.steps == 100
    assert run.rate == pytest.approx(3 / PACE)
    assert run.acceptance_length == pytest.approx(1.5)


def test_late_steps_are_counted_and_their_time_too():
    run = measure(MTP, MTP_1, steps_of(MTP_1, 108, late=10), 2, DILATION)
    assert (run.late_steps, run.late_share) == (10, 0.1)
    assert run.rate == pytest.approx(3 / PACE * 100 / 110)


def test_only_steps_of_a_full_batch_are_measured():
    steps = steps_of(MTP_1, 108) + steps_of(MTP_1, 50, batch_size=1, tokens=1)
    assert measure(MTP, MTP_1, steps, 2, DILATION).steps == 100


def test_the_first_steps_of_a_run_may_be_of_another_arm_and_later_ones_may_not():
    early = steps_of(PLAIN, 3) + steps_of(MTP_1, 100)
    assert measure(MTP, MTP_1, early, 2, DILATION).shares == {MTP_1: 1.0}
    with pytest.raises(HarnessError, match=r"held to mtp 1, the engine ran mtp 1 92, dflash 3 1"):
        measure(MTP, MTP_1, steps_of(MTP_1, 100) + steps_of(DFLASH_3, 1), 2, DILATION)


def test_a_steered_run_s_steps_are_shared_out_by_arm_the_most_frequent_first():
    steps = steps_of(DFLASH_3, 38) + steps_of(MTP_1, 50) + steps_of(PLAIN, 20)
    run = measure(STEERED, None, steps, 2, DILATION)
    assert list(run.shares.items()) == [(MTP_1, 0.5), (DFLASH_3, 0.3), (PLAIN, 0.2)]
    assert run.asleep == 0.2


def test_both_drafters_at_no_draft_are_plain_decoding():
    steps = steps_of(Arm("dflash", 0), 54) + steps_of(PLAIN, 54)
    assert measure(STEERED, None, steps, 2, DILATION).shares == {PLAIN: 1.0}


def test_the_envelope_is_the_best_of_the_static_runs():
    outcome = point(rates=(1400, 1600, 1650, 1633.5))
    assert (outcome.envelope, outcome.winner) == (1650, DFLASH_3)
    assert outcome.steered_share == pytest.approx(0.99)
    assert point(rates=(1700, 1600, 1650, 1700)).winner == PLAIN


def test_published_and_table_winners_stand_beside_ours():
    outcome = point(2, rates=(1400, 1700, 1650, 1600))
    assert outcome.published_winner == MTP_1
    assert outcome.table_winner == DFLASH_3
    assert outcome.winner == MTP_1
    assert point(8).published_winner == Arm("dflash", 15)


def test_agreement_is_told_for_drafters_and_for_draft_lengths():
    # One sequence: dflash 3 as published.  Eight: dflash, but 15 was published.  Two: mtp was.
    assert count_agreeing([point(1), point(2), point(8)]) == (2, 1)
    # The published draft length of the other drafter.
    other = point(2)
    runs = {**other.runs, DFLASH: replace(other.runs[DFLASH], arm=Arm("dflash", 1))}
    assert count_agreeing([replace(other, runs=runs)]) == (0, 0)


def test_the_result_holds_every_run():
    (outcome,) = json.loads(json.dumps(as_json([point()])))
    assert (outcome["published"], outcome["table winner"], outcome["winner"]) == ("dflash 3",) * 3
    assert outcome["steered ÷ envelope"] == 0.99
    assert outcome["runs"][STEERED]["arm"] is None
    assert outcome["runs"][STEERED]["shares"] == {"dflash 3": 0.7, "mtp 1": 0.25, "off": 0.05}
    assert outcome["runs"][DFLASH]["tokens_per_second"] == 1650

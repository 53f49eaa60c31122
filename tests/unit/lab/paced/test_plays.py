from dataclasses import replace

import pytest

from lab.paced.plays import LATE_SHARE_MAX
from tests.unit.lab.demo.outcomes import DILATION, STREAM, play_of, step


def test_a_rate_is_in_the_models_time():
    play = play_of("steered", 9.0, 4)
    assert play.client_play.seconds == 18.0 * DILATION
    assert play.seconds == 18.0
    assert play.tokens_per_second == STREAM.tokens / 18.0


def test_a_phase_has_the_steps_that_began_in_it_and_the_first_tokens():
    play = play_of("steered", 8.0, 4)
    assert [s.batch_size for s in play.phase_steps(0)] == [1] * 8
    assert [s.batch_size for s in play.phase_steps(1)] == [2] * 8
    assert play.phase_rate(0) == (8 + 1) / 8.0
    assert play.phase_rate(1) == (16 + 2) / 8.0


def test_choices_are_shares_of_steps_the_most_frequent_first():
    play = play_of("steered", 8.0, 4)
    other = step(play.phase_bounds[0][0], 0.1, 1, 0)
    mixed = replace(play, log=replace(play.log, steps=(other, *play.log.steps)))
    assert list(mixed.choices()) == ["eagle3 4", "0"]
    assert mixed.choices(0) == pytest.approx({"eagle3 4": 8 / 9, "0": 1 / 9})


def test_time_per_token_and_latency_are_percentiles_over_requests():
    play = play_of("steered", 8.0, 4)
    assert play.token_milliseconds(50) == pytest.approx(1000.0)
    assert play.latency_seconds(99) == 8.0


def test_late_passes_are_a_share_of_all():
    play = play_of("steered", 8.0, 4, late=1)
    assert play.late_share == 1 / 16
    assert play.late_share > LATE_SHARE_MAX

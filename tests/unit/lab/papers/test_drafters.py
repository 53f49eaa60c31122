"""The envelope of two drafters, as published, from the roofline and the acceptance curves alone."""

import json

import numpy as np
import pytest

from controller.core.cost.roofline import Overlap, device_from_data_sheet
from lab.papers.drafters import crossover, goodput, reproduce_drafters
from simulator import published, published_qwen

THEIRS, KERNELS, OVERHEADS = reproduce_drafters()


def grid(factor=1.0):
    """A grid file's content with the roofline's own goodput, times a factor."""
    drafters = {}
    for name in published_qwen.DRAFTERS:
        rows = (factor * goodput(name, device_from_data_sheet("B200"), Overlap.STEP)).tolist()
        drafters[name] = {
            "nospec": {"goodput": rows[0]},
            "fixed": [{"gamma": g, "goodput": row} for g, row in enumerate(rows) if g > 0],
        }
    return {"meta": {"isl": 1}, "conc": list(published_qwen.CONCURRENCIES), "drafters": drafters}


def write(path, body):
    path.write_text(json.dumps(body))
    return path


def test_the_winners_and_their_crossover_are_the_published_ones():
    assert tuple(point.drafter for point in THEIRS.points) == published_qwen.BEST_DRAFTER
    assert THEIRS.crossover == crossover(published_qwen.BEST_DRAFTER) == (256, 512)


def test_the_best_draft_lengths_are_the_published_ones_but_for_one_tie():
    assert THEIRS.gammas_agreeing("mtp") == 12
    assert THEIRS.gammas_agreeing("dflash") == 11
    off = [
        (point.concurrency, point.best_gamma["dflash"] - gamma)
        for point, gamma in zip(THEIRS.points, published_qwen.BEST_GAMMA["dflash"], strict=True)
        if point.best_gamma["dflash"] != gamma
    ]
    assert off == [(512, -1)]


@pytest.mark.parametrize(
    ("concurrency", "plain"),
    [(1, 1394.1), (16, 4292.2), (256, 25788.1), (2048, 103603.5)],
)
def test_plain_goodput_is_within_a_percent_of_the_published(concurrency, plain):
    ours = goodput("mtp", device_from_data_sheet("B200"), Overlap.STEP)[0]
    assert ours[published_qwen.CONCURRENCIES.index(concurrency)] == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize(
    ("concurrency", "best"),
    [(1, 1657.5), (2, 2262.9), (64, 28301.0), (512, 140323.7), (2048, 235817.9)],
)
def test_the_envelope_is_within_three_percent_of_the_published(concurrency, best):
    point = THEIRS.points[published_qwen.CONCURRENCIES.index(concurrency)]
    assert point.goodput == pytest.approx(best, rel=0.03)


def test_kernels_in_a_row_and_overheads_only_slow_it_down():
    for theirs, kernels, overheads in zip(
        THEIRS.points, KERNELS.points, OVERHEADS.points, strict=True
    ):
        assert kernels.goodput <= theirs.goodput * (1 + 1e-12)
        assert overheads.goodput < theirs.goodput
    assert (KERNELS.overlap, KERNELS.overheads) == (Overlap.KERNELS, False)
    assert (OVERHEADS.overlap, OVERHEADS.overheads) == (Overlap.STEP, True)


def test_an_overhead_a_pass_makes_serial_drafts_shallower_at_a_large_batch():
    for theirs, overheads in zip(THEIRS.points[4:], OVERHEADS.points[4:], strict=True):
        assert overheads.best_gamma["mtp"] <= theirs.best_gamma["mtp"]
        assert overheads.best_gamma["dflash"] == theirs.best_gamma["dflash"]


def test_the_surface_of_the_same_name_prices_the_same_steps():
    surface = published.published_surface("b200-qwen3.6-35b-a3b")
    for i, arm in enumerate(surface.arms):
        rate = goodput(arm.drafter, device_from_data_sheet("B200"), Overlap.STEP)[arm.gamma]
        tokens = 1 + published_qwen.expected_accepted(arm.drafter, arm.gamma)
        batch = np.array(published_qwen.CONCURRENCIES)
        np.testing.assert_allclose(batch * tokens / surface.seconds[i, batch], rate, rtol=1e-12)


def test_a_grid_of_the_same_goodput_is_met_exactly(tmp_path):
    envelope = reproduce_drafters(write(tmp_path / "grid.json", grid()))[0]
    assert envelope.errors is not None
    assert envelope.errors.cells == 12 * (9 + 17)
    assert envelope.errors.largest == pytest.approx(0, abs=1e-12)
    assert [point.kept_share for point in envelope.points] == [1.0] * 12

"""The table and the picture of a recorded outcome."""

import numpy as np
import pytest

from lab.harness.terminal import Terminal
from lab.paced.envelope import shown
from simulator import published_qwen
from tests.unit.lab.paced.envelope.recorded import point

GRID = {
    name: np.outer(np.arange(1.0, published_qwen.GAMMA_MAX[name] + 2), np.arange(1.0, 13.0))
    for name in published_qwen.DRAFTERS
}


def test_a_row_has_the_winners_the_rates_and_what_steered_ran():
    assert shown.row(point()) == [
        "1", "dflash 3", "dflash 3", "dflash 3", "1400", "1600", "1650", "1634", "0.990",
        "dflash 3 70%, mtp 1 25%",
    ]  # fmt: skip


def test_the_table_says_what_is_imposed_and_how_often_the_published_drafter_won(capsys):
    shown.show([point(1), point(2)], "table", Terminal())
    printed = " ".join(capsys.readouterr().out.split())
    assert "wins at 1 of 2 concurrencies, at 1 with the published draft length" in printed
    assert "Step times are imposed, by a table; acceptance is drawn" in printed


def test_the_published_goodput_is_that_of_its_best_draft_length():
    curves = shown.published_speeds([point(1), point(8)], GRID)
    assert curves["off"] == ([1.0, 4.0], [0, 0])
    assert curves["mtp"] == ([9.0, 36.0], [8, 8])
    assert curves["dflash"] == ([17.0, 68.0], [16, 16])


@pytest.mark.parametrize("grid", [None, GRID])
def test_the_picture_is_drawn_with_and_without_the_published_grid(tmp_path, grid):
    path = tmp_path / "folder" / "envelope.png"
    shown.draw([point(1), point(2), point(128)], grid, "a table", path)
    assert path.read_bytes().startswith(b"\x89PNG")

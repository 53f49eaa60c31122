"""The reports as people read them."""

import io
import json

from rich.console import Console

from lab.papers.drafters import reproduce_drafters
from lab.papers.reproductions import tables
from lab.papers.tide import reproduce_tide
from simulator import published_qwen
from simulator.published import TIDE_MODELS


def text_of(report):
    out = io.StringIO()
    Console(file=out, width=200).print(tables(report))
    return out.getvalue()


def test_the_report_on_tide_shows_every_model_and_says_what_cannot_be_compared():
    text = text_of(reproduce_tide())
    assert all(name in text for name in TIDE_MODELS)
    # Llama at 128: 3.15 tokens a step are needed.
    assert "3.15" in text
    assert "Speedups in the table: 1.25 to 1.47; the text says 1.27 to 1.47." in text
    assert "Not comparable: Figures 4, 8 and 9" in text


def test_the_report_on_drafters_says_how_close_it_came():
    text = text_of(reproduce_drafters())
    assert "the winner at 12 of 12 concurrencies, mtp gamma at 12, dflash gamma at 11" in text
    assert "between 256 and 512 (published: 256 and 512)" in text
    assert "of the published best" not in text


def test_with_the_grid_goodput_stands_beside_the_published(tmp_path):
    drafters = {}
    for name, deepest in published_qwen.GAMMA_MAX.items():
        row = {"goodput": [123_456.0] * 12}
        drafters[name] = {
            "nospec": row,
            "fixed": [{"gamma": g, **row} for g in range(1, deepest + 1)],
        }
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"conc": published_qwen.CONCURRENCIES, "drafters": drafters}))
    text = text_of(reproduce_drafters(path))
    assert "123,456" in text
    assert "of the published best, these choices keep 100.0% at least" in text

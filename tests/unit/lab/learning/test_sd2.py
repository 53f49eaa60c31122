"""The verdicts on SD2's claims."""

import pytest

from lab.harness.measured import Spread
from lab.learning.headline import Verdict
from lab.learning.sd2 import (
    BLOCKED,
    DISTILLED,
    FROZEN,
    PRETRAINED,
    SEEN,
    STEERED,
    UNSEEN,
    Cells,
    judge_frozen,
    judge_offsets,
    judge_temperature,
)

KINDS = [(0.0, SEEN), (0.0, UNSEEN), (1.0, SEEN), (1.0, UNSEEN)]


def cells(**rows: tuple[float, float, float, float]) -> Cells:
    names = {"alone": FROZEN, "blocks": BLOCKED}
    return {
        names.get(name, name): dict(zip(KINDS, (Spread((value,)) for value in values), strict=True))
        for name, values in rows.items()
    }


@pytest.mark.parametrize(
    ("steered", "verdict"),
    [
        ((3.0, 1.1, 2.0, 1.1), Verdict.REPRODUCES),
        # Behind the distilled one in a cell, ahead of both in the mean.
        ((3.0, 0.9, 2.0, 1.1), Verdict.PARTLY),
        ((1.9, 0.9, 2.0, 1.1), Verdict.NOT),
        # Ahead of the distilled one in the mean, and not of the pretrained one at T = 1.
        ((3.0, 0.9, 0.7, 1.1), Verdict.NOT),
    ],
)
def test_temperature(steered: tuple[float, float, float, float], verdict: Verdict) -> None:
    cell_values = cells(
        **{PRETRAINED: (1.0, 1.2, 1.0, 1.2), DISTILLED: (2.0, 1.0, 0.6, 1.0), STEERED: steered}
    )
    judged, because = judge_temperature(cell_values)
    assert judged is verdict
    assert "below the pretrained one in 3 of them" in because


@pytest.mark.parametrize(
    ("alone", "steered", "verdict"),
    [
        (1.5, 2.0, Verdict.REPRODUCES),
        (1.5, 1.4, Verdict.PARTLY),
        (0.9, 1.4, Verdict.PARTLY),
        (0.9, 0.8, Verdict.NOT),
    ],
)
def test_frozen(alone: float, steered: float, verdict: Verdict) -> None:
    values = {PRETRAINED: 1.0, "alone": alone, STEERED: steered}
    cell_values = cells(**{name: (value,) * 4 for name, value in values.items()})
    assert judge_frozen(cell_values)[0] is verdict


def test_frozen_asks_every_cell() -> None:
    cell_values = cells(
        **{PRETRAINED: (1.0,) * 4, "alone": (1.5,) * 4, STEERED: (3.0, 1.4, 3.0, 1.4)}
    )
    judged, because = judge_frozen(cell_values)
    assert judged is Verdict.PARTLY
    assert "more in 2 of 4 cells" in because


@pytest.mark.parametrize(
    ("blocks", "verdict"),
    [(0.97, Verdict.REPRODUCES), (1.04, Verdict.PARTLY), (0.9, Verdict.NOT), (1.1, Verdict.NOT)],
)
def test_offsets(blocks: float, verdict: Verdict) -> None:
    cell_values = cells(**{STEERED: (1.0,) * 4, "blocks": (blocks,) * 4})
    assert judge_offsets(cell_values)[0] is verdict

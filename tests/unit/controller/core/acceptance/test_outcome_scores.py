"""Totals by outcome are those of a walk over the positions."""

import pytest

from controller.core.acceptance.outcome_scores import OutcomeScores

# (score of an accepted token, score of a rejected one) by position.
POSITIONS = [(0.5, -0.3), (0.25, -0.7)]
SCORES = OutcomeScores([[-0.3, 0.5 - 0.7]], [[0.0, 0.5, 0.75]])


def walk(accepted_counts, censored_counts=()):
    """The total, position by position, over those that have a score."""
    reached = sum(accepted_counts) + sum(censored_counts)
    total = 0.0
    for k, (success, failure) in enumerate(POSITIONS[: len(accepted_counts) - 1]):
        reached -= censored_counts[k] if censored_counts else 0
        reached -= accepted_counts[k]
        total += reached * success + accepted_counts[k] * failure
    return total


@pytest.mark.parametrize(
    "counts",
    [
        ((3,), ()),
        ((1, 4), ()),
        ((2, 1, 3), ()),
        ((2, 1, 3), (1, 2)),
        ((2, 1, 3, 4), ()),
        ((2, 1, 3, 4, 5), (1, 2, 3, 6)),
        ((0, 0, 0), (0, 4)),
    ],
)
def test_totals_are_those_of_a_walk_over_the_positions(counts):
    assert SCORES.totals(*counts) == pytest.approx([walk(*counts)])


def test_tests_without_positions_have_no_score():
    assert OutcomeScores([[], []], [[0.0], [0.0]]).totals((2, 1, 3), (1, 2)) == [0.0, 0.0]

"""The text from which a target learns to copy."""

import itertools

import numpy as np
import pytest

from lab.cpu_engine.models._edits import copies


@pytest.mark.parametrize("longest", [8, 60, 128])
def test_what_is_marked_can_be_copied_from_what_stands_before(longest: int) -> None:
    tokens, marked = copies(np.random.default_rng(1), longest, 3000)
    assert tokens.shape == marked.shape
    assert 0.3 < marked.float().mean() < 0.8
    for row, mark in zip(tokens.tolist(), marked.tolist(), strict=True):
        for at in range(1, len(row)):
            if mark[at] and mark[at - 1]:
                pair = row[at - 1 : at + 1]
                assert tuple(pair) in set(itertools.pairwise(row[:at]))

"""Requests that copy: what a lookup finds follows from the spans, and levels differ by request."""

import numpy as np
import pytest

from simulator.copying import CopyingSource
from simulator.errors import InvalidInputError

PURE = {"copied_spread": 0.0, "easy_spread": 0.0, "chance": 0.0}


def pool(requests=200, output=300, **changes):
    lengths = np.full(requests, output, dtype=np.int64)
    return CopyingSource("copying", **changes).pool(
        np.random.default_rng(0), requests, lengths, lengths
    )


def by_match(request_pool, length):
    return request_pool.accepted["ngram"][request_pool.matches == length]


def test_nothing_but_a_copy_is_found_from_its_third_token_to_its_end():
    request_pool = pool(2, 10, copied=1.0, faithful=1.0, **PURE)
    assert request_pool.matches.tolist() == [0, 0, 2, 3, 4, 5, 5, 5, 5, 5] * 2
    assert request_pool.accepted["ngram"].tolist() == [0, 0, 8, 7, 6, 5, 4, 3, 2, 1] * 2


def test_where_nothing_is_copied_matches_are_short_and_rarely_accepted():
    request_pool = pool(copied=0.0, chance=0.5, chance_accepted=0.2)
    assert (request_pool.matches > 0).mean() == pytest.approx(0.5, abs=0.02)
    assert (request_pool.matches == 2).sum() > 2 * (request_pool.matches == 3).sum() > 0
    assert by_match(request_pool, 2).mean() == pytest.approx(0.25, abs=0.03)
    assert (request_pool.accepted["ngram"][request_pool.matches == 0] == 0).all()


def test_the_share_of_copied_spans_and_their_length_are_as_asked():
    request_pool = pool(400, 1000, copied=0.5, copied_tokens=20.0, faithful=1.0, **PURE)
    # A span of n tokens is found at n - 1 positions: from its third one to the one behind it.
    assert (request_pool.matches >= 2).mean() == pytest.approx(0.5 * 19 / 20, abs=0.03)
    assert by_match(request_pool, 2).mean() == pytest.approx(19, rel=0.1)


def test_requests_differ_in_how_much_they_copy_and_how_easy_they_are():
    request_pool = pool(400, 300, copied_spread=2.0, easy_spread=1.0)
    copied = (request_pool.matches == 5).reshape(400, -1).mean(axis=1)
    easy = (request_pool.accepted["eagle"] > 0).reshape(400, -1).mean(axis=1)
    assert copied.std() > 0.2
    assert easy.std() > 0.1


def test_a_models_drafts_are_accepted_up_to_the_same_hard_token():
    request_pool = pool(3, 200)
    values = request_pool.accepted["eagle"].reshape(3, -1).astype(int)
    assert (values[:, 1:] >= values[:, :-1] - 1).all()
    assert (values[:, 1:][values[:, :-1] > 1] == values[:, :-1][values[:, :-1] > 1] - 1).all()


def test_equal_seeds_make_equal_requests_and_none_is_none():
    one, other = pool(), pool()
    assert (one.accepted["ngram"] == other.accepted["ngram"]).all()
    assert (one.matches == other.matches).all()
    empty = np.zeros(0, dtype=np.int64)
    nothing = CopyingSource("").pool(np.random.default_rng(0), 0, empty, empty)
    assert nothing.requests == len(nothing.accepted["eagle"]) == 0


@pytest.mark.parametrize(
    "changes",
    [{"copied": 1.5}, {"easy_spread": -1.0}, {"copied_tokens": 0.5}, {"lookup": "eagle"}],
)
def test_values_out_of_range_are_refused(changes):
    with pytest.raises(InvalidInputError):
        CopyingSource("copying", **changes)

"""Lookup on tensors finds what a search through lists finds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.sglang.drafters import lookup
from engine_shim.sglang.drafters.lookup import TokenHistory
from tests.support.device_memory import PeakMemory
from tests.support.looking_up import Request, looked_up

WIDTH = 320
VOCABULARY = 1000


def history_of(*requests: Request) -> TokenHistory:
    history = TokenHistory(8, WIDTH, VOCABULARY, "cpu")
    history.read_prompt(requests)
    return history


TOKENS = st.integers(2, 6).flatmap(
    lambda kinds: st.lists(st.integers(0, kinds), min_size=1, max_size=120)
)


@given(st.lists(TOKENS, min_size=1, max_size=5), st.integers(1, 9))
def test_it_drafts_what_followed_the_latest_of_the_longest_matches(texts, gamma):
    requests = [Request(str(i), 7 - i, text) for i, text in enumerate(texts)]
    history = history_of(*requests)
    rows = torch.tensor([request.row for request in requests])
    newest = torch.tensor([len(text) - 1 for text in texts])
    found = history.propose(rows, newest, gamma, newest.tolist())
    for i, text in enumerate(texts):
        match, drafts = looked_up(text, gamma)
        assert int(found.match[i]) == match
        if match:
            assert found.tokens[i].tolist() == drafts


def test_what_a_step_adds_is_found_and_what_it_wrote_too_far_is_not():
    history = history_of(Request("a", 3, [1, 2, 3, 4, 9]))
    row = torch.tensor([3])
    # Two of the four are the request's, and the next step writes over the others.
    history.add(row, torch.tensor([5]), torch.tensor([[1, 2, 7, 7]]))
    found = history.propose(row, torch.tensor([6]), 3, [6])
    assert found.match.tolist() == [2]
    assert found.tokens.tolist() == [[3, 4, 9]]


def test_a_prompt_comes_in_parts_and_a_retracted_request_comes_again():
    whole = [1, 2, 3, 1, 2]
    history = TokenHistory(8, WIDTH, VOCABULARY, "cpu")
    request = Request("a", 2, whole[:3])
    assert history.read_prompt([request]) == [2]
    request.tokens = whole
    assert history.read_prompt([request]) == []
    found = history.propose(torch.tensor([2]), torch.tensor([4]), 2, [4])
    assert found.tokens.tolist() == [[3, 1]]
    request.row = 5
    assert history.read_prompt([request]) == [5]
    found = history.propose(torch.tensor([5]), torch.tensor([4]), 2, [4])
    assert found.tokens.tolist() == [[3, 1]]


def test_nothing_of_a_rows_last_owner_is_left():
    history = history_of(Request("a", 1, [5, 6, 7, 5, 6, 7, 8, 9] * 20))
    history.read_prompt([Request("b", 1, [5, 6])])
    found = history.propose(torch.tensor([1]), torch.tensor([1]), 3, [1])
    assert found.match.tolist() == [0]
    # Nor of what it would write next.
    history.add(torch.tensor([1]), torch.tensor([2]), torch.tensor([[5, 6]]))
    found = history.propose(torch.tensor([1]), torch.tensor([3]), 3, [3])
    assert found.tokens.tolist() == [[5, 6, 5]]


def test_what_the_host_does_not_know_yet_is_not_filled_by_a_rows_last_owner():
    history = history_of(Request("a", 1, [5, 6, 7, 8, 5, 6, 7, 8]))
    # Of the new request the host knows two tokens, and the device two more, three places on.
    history.meet([Request("b", 1, [5, 6])])
    history.add(torch.tensor([1]), torch.tensor([5]), torch.tensor([[5, 6]]))
    found = history.propose(torch.tensor([1]), torch.tensor([6]), 3, [6])
    assert found.match.tolist() == [2]
    assert not {7, 8} & set(found.tokens[0].tolist())


def test_a_request_without_a_prefill_is_met_with_what_the_host_knows():
    history = TokenHistory(8, WIDTH, VOCABULARY, "cpu")
    request = Request("a", 0, [1, 2, 3], [1, 2])
    assert history.meet([request]) == [0]
    assert history.meet([request]) == []
    found = history.propose(torch.tensor([0]), torch.tensor([4]), 1, [4])
    assert found.tokens.tolist() == [[3]]


def test_a_length_that_the_host_knows_too_short_is_no_error():
    history = history_of(Request("a", 0, list(range(300))))
    found = history.propose(torch.tensor([0]), torch.tensor([299]), 3, [10])
    assert found.match.tolist() == [0]


def test_a_request_id_that_is_used_again_is_another_request():
    history = history_of(Request("a", 1, [5, 6, 777, 778, 1]))
    assert history.read_prompt([Request("a", 1, [9, 9, 9, 9, 9, 5, 6])]) == [1]
    found = history.propose(torch.tensor([1]), torch.tensor([6]), 2, [6])
    assert found.match.tolist() == [0]


def test_what_stands_for_an_image_is_never_proposed():
    # Its low 32 bits would make a token.
    pad = (1 << 40) + 5
    history = history_of(Request("a", 0, [1, 2, pad, pad, pad, 1, 2]))
    found = history.propose(torch.tensor([0]), torch.tensor([6]), 4, [6])
    assert found.match.tolist() == [2]
    assert int(found.tokens.min()) >= 0
    assert int(found.tokens.max()) < VOCABULARY


@pytest.mark.parametrize(("batch", "context"), [(64, 8192), (3, 300), (1, 1 << 17), (200, 250)])
def test_a_history_and_its_searches_take_no_more_than_is_set_aside(
    batch: int, context: int
) -> None:
    """On a processor: kernels of a GPU keep less between their parts."""
    width = context + 16
    history = TokenHistory(batch, width, VOCABULARY, "cpu")
    history.read_prompt([Request(str(row), row, [row, row + 1] * 40) for row in range(batch)])
    rows, newest = torch.arange(batch), torch.full((batch,), context - 1)
    with PeakMemory() as peak:
        history.add(rows, newest, torch.ones((batch, 8), dtype=torch.int64))
        history.propose(rows, newest, 7, newest.tolist())
    taken = history.bytes + peak.bytes
    assert taken <= lookup.device_bytes(batch, width)
    # It is no guess far off, either.
    assert peak.bytes > 0.5 * min(lookup._WORK_BYTES, 36 * batch * width)


def test_a_batch_that_is_searched_in_parts_finds_the_same(monkeypatch):
    """The rows come back in their order, whatever their lengths."""
    history = TokenHistory(8, 2048, VOCABULARY, "cpu")
    lengths = [40, 900, 41, 300, 42, 43, 600, 44]
    texts = [[(row * at) % 5 for at in range(length)] for row, length in enumerate(lengths)]
    history.read_prompt([Request(str(row), row, text) for row, text in enumerate(texts)])
    rows, newest = torch.arange(8), torch.tensor(lengths) - 1
    whole = history.propose(rows, newest, 3, newest.tolist())
    monkeypatch.setattr(lookup, "_WORK_BYTES", 3 * 36 * 256)
    parts = history.propose(rows, newest, 3, newest.tolist())
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.equal(whole.match, parts.match)
    assert whole.match.max() == 5

"""Lookup on tensors finds what a search through lists finds."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.sglang.drafters import lookup
from engine_shim.sglang.drafters.lookup import TokenHistory
from tests.support.peak_memory import peak_bytes
from tests.support.prompt_lookup import Request, look_up

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
    proposal = history.propose(rows, newest, gamma, newest.tolist())
    for i, text in enumerate(texts):
        match, drafts = look_up(text, gamma)
        assert int(proposal.match_length[i]) == match
        if match:
            assert proposal.tokens[i].tolist() == drafts


def test_what_a_step_adds_is_found_and_what_it_wrote_too_far_is_not():
    history = history_of(Request("a", 3, [1, 2, 3, 4, 9]))
    row = torch.tensor([3])
    # Two of the four are the request's, and the next step writes over the others.
    history.add(row, torch.tensor([5]), torch.tensor([[1, 2, 7, 7]]))
    proposal = history.propose(row, torch.tensor([6]), 3, [6])
    assert proposal.match_length.tolist() == [2]
    assert proposal.tokens.tolist() == [[3, 4, 9]]


def test_a_prompt_comes_in_parts_and_a_retracted_request_comes_again():
    whole = [1, 2, 3, 1, 2]
    history = TokenHistory(8, WIDTH, VOCABULARY, "cpu")
    request = Request("a", 2, whole[:3])
    assert history.read_prompt([request]) == [2]
    request.tokens = whole
    assert history.read_prompt([request]) == []
    proposal = history.propose(torch.tensor([2]), torch.tensor([4]), 2, [4])
    assert proposal.tokens.tolist() == [[3, 1]]
    request.row = 5
    assert history.read_prompt([request]) == [5]
    proposal = history.propose(torch.tensor([5]), torch.tensor([4]), 2, [4])
    assert proposal.tokens.tolist() == [[3, 1]]


def test_nothing_of_a_rows_last_owner_is_left():
    history = history_of(Request("a", 1, [5, 6, 7, 5, 6, 7, 8, 9] * 20))
    history.read_prompt([Request("b", 1, [5, 6])])
    proposal = history.propose(torch.tensor([1]), torch.tensor([1]), 3, [1])
    assert proposal.match_length.tolist() == [0]
    # Nor of what it would write next.
    history.add(torch.tensor([1]), torch.tensor([2]), torch.tensor([[5, 6]]))
    proposal = history.propose(torch.tensor([1]), torch.tensor([3]), 3, [3])
    assert proposal.tokens.tolist() == [[5, 6, 5]]


def test_what_the_host_does_not_know_yet_is_not_filled_by_a_rows_last_owner():
    history = history_of(Request("a", 1, [5, 6, 7, 8, 5, 6, 7, 8]))
    # Of the new request the host knows two tokens, and the device two more, three places on.
    history.read_running([Request("b", 1, [5, 6])])
    history.add(torch.tensor([1]), torch.tensor([5]), torch.tensor([[5, 6]]))
    proposal = history.propose(torch.tensor([1]), torch.tensor([6]), 3, [6])
    assert proposal.match_length.tolist() == [2]
    assert not {7, 8} & set(proposal.tokens[0].tolist())


def test_a_request_without_a_prefill_is_met_with_what_the_host_knows():
    history = TokenHistory(8, WIDTH, VOCABULARY, "cpu")
    request = Request("a", 0, [1, 2, 3], [1, 2])
    assert history.read_running([request]) == [0]
    assert history.read_running([request]) == []
    proposal = history.propose(torch.tensor([0]), torch.tensor([4]), 1, [4])
    assert proposal.tokens.tolist() == [[3]]


def test_a_length_that_the_host_knows_too_short_is_no_error():
    history = history_of(Request("a", 0, list(range(300))))
    proposal = history.propose(torch.tensor([0]), torch.tensor([299]), 3, [10])
    assert proposal.match_length.tolist() == [0]


def test_a_request_id_that_is_used_again_is_another_request():
    history = history_of(Request("a", 1, [5, 6, 777, 778, 1]))
    assert history.read_prompt([Request("a", 1, [9, 9, 9, 9, 9, 5, 6])]) == [1]
    proposal = history.propose(torch.tensor([1]), torch.tensor([6]), 2, [6])
    assert proposal.match_length.tolist() == [0]


def test_what_stands_for_an_image_is_never_proposed():
    # Its low 32 bits would make a token.
    pad = (1 << 40) + 5
    history = history_of(Request("a", 0, [1, 2, pad, pad, pad, 1, 2]))
    proposal = history.propose(torch.tensor([0]), torch.tensor([6]), 4, [6])
    assert proposal.match_length.tolist() == [2]
    assert int(proposal.tokens.min()) >= 0
    assert int(proposal.tokens.max()) < VOCABULARY


@pytest.mark.parametrize(
    ("batch", "context"), [(64, 8192), (3, 300), (28, 1 << 16), (1, 1 << 21), (200, 250)]
)
def test_a_history_and_its_searches_take_no_more_than_is_set_aside(
    batch: int, context: int
) -> None:
    """On a processor, with what its operators use."""
    width = context + 16
    history = TokenHistory(batch, width, VOCABULARY, "cpu")
    history.read_prompt([Request(str(row), row, [row, row + 1] * 40) for row in range(batch)])
    rows, newest = torch.arange(batch), torch.full((batch,), context - 1)

    def look_up() -> object:
        history.add(rows, newest, torch.ones((batch, 8), dtype=torch.int64))
        return history.propose(rows, newest, 7, newest.tolist())

    peak = peak_bytes(look_up)
    assert history.device_bytes + peak <= lookup.device_bytes(batch, width)
    # It is no guess far off, either.
    assert peak > 0.5 * min(lookup._MAX_SEARCH_BYTES, 40 * batch * width)


def test_a_batch_that_is_searched_in_parts_finds_the_same(monkeypatch):
    """The rows come back in their order, whatever their lengths."""
    history = TokenHistory(8, 2048, VOCABULARY, "cpu")
    lengths = [40, 900, 41, 300, 42, 43, 600, 44]
    texts = [
        [(row * position) % 5 for position in range(length)] for row, length in enumerate(lengths)
    ]
    history.read_prompt([Request(str(row), row, text) for row, text in enumerate(texts)])
    rows, newest = torch.arange(8), torch.tensor(lengths) - 1
    whole = history.propose(rows, newest, 3, newest.tolist())
    monkeypatch.setattr(lookup, "_MAX_SEARCH_BYTES", 3 * 40 * 256)
    parts = history.propose(rows, newest, 3, newest.tolist())
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.equal(whole.match_length, parts.match_length)
    assert whole.match_length.max() == 5


class Course:
    """A scheduler with the overlap schedule: the host knows a step's tokens one step later.

    Requests are read in parts, decoded, retracted (what the host does not know yet is lost then),
    ended and aborted; their rows go to others at once.
    """

    ROWS = 4

    def __init__(self, seed: int, *, prefills: bool) -> None:
        self.choose = random.Random(seed)
        self.prefills = prefills
        self.history = TokenHistory(self.ROWS + 1, WIDTH, VOCABULARY, "cpu")
        self.free = list(range(1, self.ROWS + 1))
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        # By request: the newest tokens, which the host does not know yet.
        self.unread: dict[int, list[int]] = {}
        self.matches = 0

    def tokens(self, most: int) -> list[int]:
        return [self.choose.randrange(3) for _ in range(self.choose.randint(1, most))]

    def run(self, steps: int) -> None:
        for number in range(steps):
            if self.free and self.choose.random() < 0.4:
                self.admit(number)
            if self.running and self.choose.random() < 0.2:
                self.retract(self.choose.choice(self.running))
            if self.running:
                self.step()
            if self.running and self.choose.random() < 0.15:
                self.end(self.choose.choice(self.running))

    def admit(self, number: int) -> None:
        if self.waiting and self.choose.random() < 0.7:
            request = self.waiting.pop()
        else:
            # Ids are used again.
            request = Request(str(number % 3), 0, self.tokens(60))
        request.row = self.free.pop(self.choose.randrange(len(self.free)))
        whole = [*request.tokens, *request.output_ids]
        if self.prefills:
            ends = sorted({self.choose.randint(1, len(whole)), len(whole)})
            for end in ends:
                part = Request(request.rid, request.row, whole[:end])
                part.__dict__ |= {k: v for k, v in request.__dict__.items() if k[:4] == "spec"}
                self.history.read_prompt([part])
                request.__dict__ |= {k: v for k, v in part.__dict__.items() if k[:4] == "spec"}
        if self.prefills or not request.output_ids:
            self.unread[id(request)] = [self.choose.randrange(3)]
        if not self.prefills:
            # The other server of a pair has reported to the host.
            self.read(request)
        self.running.append(request)

    def read(self, request: Request) -> None:
        request.output_ids += self.unread.pop(id(request), [])

    def retract(self, request: Request) -> None:
        self.unread.pop(id(request), None)
        self.leave(request)
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        self.unread.pop(id(request), None)
        self.leave(request)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.free.append(request.row)

    def step(self) -> None:
        gamma = self.choose.randint(1, 6)
        self.history.read_running(self.running)
        known = [[*r.tokens, *r.output_ids, *self.unread.get(id(r), [])] for r in self.running]
        rows = torch.tensor([r.row for r in self.running])
        newest = torch.tensor([len(tokens) - 1 for tokens in known])
        bonus = torch.tensor([tokens[-1:] for tokens in known])
        self.history.add(rows, newest, bonus)
        slack = [int(n) + self.choose.randint(0, 8) for n in newest]
        proposal = self.history.propose(rows, newest, gamma, slack)
        for row, tokens in enumerate(known):
            match, drafts = look_up(tokens, gamma)
            assert int(proposal.match_length[row]) == match
            if match:
                self.matches += 1
                assert proposal.tokens[row].tolist() == drafts
        verified = torch.tensor(
            [[self.choose.randrange(3) for _ in range(gamma + 1)] for _ in self.running]
        )
        self.history.add(rows, newest + 1, verified)
        for row, request in enumerate(list(self.running)):
            self.read(request)
            accepted = self.choose.randint(1, gamma + 1)
            self.unread[id(request)] = verified[row, :accepted].tolist()
            if len(known[row]) > WIDTH - 30:
                self.end(request)


@pytest.mark.parametrize("prefills", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_becomes_of_requests_each_finds_what_its_own_tokens_hold(
    seed: int, prefills: bool
) -> None:
    course = Course(seed, prefills=prefills)
    course.run(250)
    assert course.matches > 100

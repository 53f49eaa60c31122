"""A lookup, the choice of rows and what is learnt from them run in a graph, within a budget."""

import random

import pytest
import torch
from cpu_graphs import graph
from cpu_graphs.graph import Graph
from cpu_graphs.recorder import Recording
from torch.utils._pytree import tree_leaves

from engine_shim.sglang.drafters import lookup
from engine_shim.sglang.drafters.lookup import MIN_MATCH_TOKENS, TokenHistory
from engine_shim.sglang.drafters.row_choice import RowChoice
from speculation.v1.plan_pb2 import MixtureRule
from tests.support.prompt_lookup import Request, look_up

WIDTH = 320
# It always prefers a lookup that has found something.
RULE = MixtureRule(
    drafter="mixture",
    gamma=4,
    main_expected=0.0,
    free_expected=[1.0],
    least_match=MIN_MATCH_TOKENS,
    ratio_weight=0.1,
)
# What a lookup of 64 requests with 8,192 tokens each may launch, and touch, on the device.
KERNELS_MOST = 33
BYTES_A_TOKEN_MOST = 105


def tensors_in(arguments: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def moved_by(recording: Recording) -> int:
    """Bytes that the operations read and write."""
    return sum(
        tensor.nbytes
        for node in recording.nodes
        for tensor in (*tensors_in(node.arguments), *node.outputs)
    )


def test_lookup_choice_and_learning_are_captured_in_a_graph_that_follows_their_inputs():
    choose = random.Random(1)
    history, choice = TokenHistory(8, WIDTH, 1000, "cpu"), RowChoice(8, "cpu")
    rows, newest = torch.tensor([0, 4, 6]), torch.zeros(3, dtype=torch.int64)
    main, known = torch.zeros((3, 4), dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    verified = torch.zeros((3, 5), dtype=torch.int64)
    rule = choice.find_rule((RULE,), "mixture", 4)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        free = history.propose(rows, newest, 4, [WIDTH - 1] * 3)
        tokens, drafted = choice.choose(rows, main, free, rule, is_mixed=True)
        return tokens, choice.observe(drafted, verified, known)

    step()
    recorded_graph = Graph()
    with graph.capture(recorded_graph), torch.no_grad():
        tokens, outcome = step()
    for _ in range(5):
        texts = [[choose.randrange(4) for _ in range(choose.randint(5, 200))] for _ in range(3)]
        history.read_prompt(
            [
                Request(str(choose.random()), row, text)
                for row, text in zip((0, 4, 6), texts, strict=True)
            ]
        )
        newest.copy_(torch.tensor([len(text) - 1 for text in texts]))
        recorded_graph.replay()
        expected = [look_up(text, 4) for text in texts]
        assert outcome[:, 1].tolist() == [match for match, _ in expected]
        for row, (match, drafts) in enumerate(expected):
            assert tokens[row].tolist() == (drafts if match else [0] * 4)


def test_it_stays_within_its_budget_of_kernels_and_bytes():
    batch, context = 64, 8192
    history = TokenHistory(batch, context + 16, 1000, "cpu")
    rows, newest = torch.arange(batch), torch.full((batch,), context - 1)
    with Recording() as recording:
        history.propose(rows, newest, 7, [context - 1] * batch)
    moved = moved_by(recording)
    print(f"{len(recording.nodes)} kernels, {moved / batch / context:.1f} bytes a token")
    assert len(recording.nodes) <= KERNELS_MOST
    assert moved <= BYTES_A_TOKEN_MOST * batch * context


def test_one_long_request_does_not_have_all_others_searched_as_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, long, short = 64, 8192, 200
    # Two rows of the long one's width at once.
    monkeypatch.setattr(lookup, "_MAX_SEARCH_BYTES", 2 * 40 * long)
    history = TokenHistory(batch, long + 16, 1000, "cpu")
    furthest = [short] * batch
    furthest[17] = long - 1
    with Recording() as recording:
        history.propose(torch.arange(batch), torch.tensor(furthest), 7, furthest)
    # Two searches, the sorting, and what puts the rows back.
    assert len(recording.nodes) <= 2 * KERNELS_MOST + 10
    # Each search is counted with the whole buffer, of which it reads its rows.
    searched = BYTES_A_TOKEN_MOST * (2 * long + batch * 256)
    assert moved_by(recording) <= searched + 2 * history.device_bytes

"""Draft trees and their verification against recursive definitions."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from torch import Tensor

FULL, DRAFT_ONLY = 0, 1


@dataclass
class Links:
    """What building a tree fills in."""

    positions: Tensor
    index: Tensor
    child: Tensor
    sibling: Tensor

    @classmethod
    def empty(cls, requests: int, nodes: int) -> "Links":
        return cls(*(torch.full((requests, nodes), -9) for _ in range(4)))


Parents = list[int]  # of nodes 1, 2, ...; each smaller than its node


@st.composite
def forests(draw: st.DrawFn) -> list[Parents]:
    """One tree per request, all with the same number of nodes."""
    nodes = draw(st.integers(2, 8))
    tree = st.tuples(*[st.integers(0, node - 1) for node in range(1, nodes)]).map(list)
    return draw(st.lists(tree, min_size=1, max_size=3))


def ancestors(parents: Parents, node: int) -> list[int]:
    return [] if node == 0 else [*ancestors(parents, parents[node - 1]), parents[node - 1]]


def children(parents: Parents, node: int) -> list[int]:
    return [child for child, parent in enumerate(parents, start=1) if parent == node]


def mask_of(parents: Parents) -> Tensor:
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node in range(len(parents) + 1):
        mask[node, ancestors(parents, node)] = True
    return mask


def assert_describes(links: Links, forest: list[Parents], lengths: list[int]) -> None:
    nodes = len(forest[0]) + 1
    assert links.index.flatten().tolist() == list(range(len(forest) * nodes))
    for i, (parents, length) in enumerate(zip(forest, lengths, strict=True)):
        for node in range(nodes):
            assert links.positions[i, node] == length + len(ancestors(parents, node))
            family, child = [], int(links.child[i, node])
            while child != -1:
                family.append(child)
                child = int(links.sibling[i, child])
            assert family == children(parents, node)


def scores_of(parents: Parents, topk: int) -> tuple[list[int], list[int]]:
    """Score indices and group parents as a drafter records them.

    Every node that has children opens a group of ``topk`` candidates; group 0 is the root's.  A
    tree with more children than ``topk`` somewhere cannot be recorded.
    """
    group_of = {0: 0}
    score_of: dict[int, int] = {}
    group_parents = [-1]
    for node, parent in enumerate(parents, start=1):
        if parent not in group_of:
            group_of[parent] = len(group_parents)
            group_parents.append(score_of[parent])
        older = [other for other in children(parents, parent) if other < node]
        score_of[node] = group_of[parent] * topk + len(older)
    return [score_of[node] for node in range(1, len(parents) + 1)], group_parents


@given(forests(), st.data())
def test_build_tree_describes_the_chosen_candidates(
    forest: list[Parents], data: st.DataObject
) -> None:
    nodes, topk = len(forest[0]) + 1, 8
    lengths = [data.draw(st.integers(1, 50)) for _ in forest]
    recorded = [scores_of(parents, topk) for parents in forest]
    selected = torch.tensor([scores for scores, _ in recorded])
    groups = torch.full((len(forest), nodes), -1)
    for row, (_, group_parents) in zip(groups, recorded, strict=True):
        row[: len(group_parents)] = torch.tensor(group_parents)
    links = Links.empty(len(forest), nodes)
    mask = torch.zeros(len(forest) * nodes * nodes + 5, dtype=torch.bool)
    build_tree_kernel_efficient_cpu(
        groups, selected, torch.tensor(lengths), mask, links.positions, links.index,
        links.child, links.sibling, topk, nodes, nodes, DRAFT_ONLY,
    )  # fmt: skip
    assert_describes(links, forest, lengths)
    expected = torch.cat([mask_of(parents).flatten() for parents in forest])
    assert torch.equal(mask, torch.cat((expected, torch.zeros(5, dtype=torch.bool))))
    # With the prefix, which SGLang has filled in, in front of every row.
    whole = torch.ones(sum(nodes * (length + nodes) for length in lengths) + 5, dtype=torch.bool)
    build_tree_kernel_efficient_cpu(
        groups, selected, torch.tensor(lengths), whole, links.positions, links.index,
        links.child, links.sibling, topk, nodes, nodes, FULL,
    )  # fmt: skip
    rows = [
        torch.cat((torch.ones(nodes, length, dtype=torch.bool), mask_of(parents)), dim=1).flatten()
        for parents, length in zip(forest, lengths, strict=True)
    ]
    assert torch.equal(whole, torch.cat((*rows, torch.ones(5, dtype=torch.bool))))


def test_a_chain_is_a_tree_with_one_candidate_each() -> None:
    links, mask = Links.empty(1, 4), torch.zeros(16, dtype=torch.bool)
    build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]]), torch.tensor([7]), mask,
        links.positions, links.index, links.child, links.sibling, 1, 3, 4, DRAFT_ONLY,
    )  # fmt: skip
    assert links.positions.tolist() == [[7, 8, 9, 10]]
    assert links.child.tolist() == [[1, 2, 3, -1]]
    assert links.sibling.tolist() == [[-1] * 4]
    assert torch.equal(mask.view(4, 4), torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_candidate_whose_parent_was_not_chosen_is_out_of_reach() -> None:
    links, mask = Links.empty(1, 3), torch.zeros(9, dtype=torch.bool)
    # Score index 5 lies in group 2, whose parent has score index 1, which is not selected.
    build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 5]]), torch.tensor([7]), mask,
        links.positions, links.index, links.child, links.sibling, 2, 2, 3, DRAFT_ONLY,
    )  # fmt: skip
    assert links.child.tolist() == [[1, -1, -1]]
    assert links.sibling.tolist() == [[-1, -1, -1]]


def test_packed_masks_are_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="tree mask mode 2 is for attention backends that need"):
        build_tree_kernel_efficient_cpu(one, one, one[0], one, one, one, one, one, 1, 1, 1, 2)


@given(forests(), st.data())
def test_links_are_found_again_from_the_mask(forest: list[Parents], data: st.DataObject) -> None:
    nodes = len(forest[0]) + 1
    lengths = [data.draw(st.integers(1, 50)) for _ in forest]
    links = Links.empty(len(forest), nodes)
    reconstruct_indices_from_tree_mask(
        torch.stack([mask_of(parents) for parents in forest]), torch.tensor(lengths),
        links.positions, links.index, links.child, links.sibling, len(forest), nodes,
    )  # fmt: skip
    assert_describes(links, forest, lengths)


def accepted(
    parents: Parents, tokens: list[int], wanted: list[int], node: int, left: int
) -> list[int]:
    """The accepted path from ``node`` on: the first child that is what the target wants there."""
    for child in children(parents, node) if left else ():
        if tokens[child] == wanted[node]:
            return [node, *accepted(parents, tokens, wanted, child, left - 1)]
    return [node]


@given(forests(), st.data())
def test_verify_walks_the_tree_along_the_targets_choices(
    forest: list[Parents], data: st.DataObject
) -> None:
    requests, nodes = len(forest), len(forest[0]) + 1
    most = data.draw(st.integers(1, nodes - 1))
    few = st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes)
    tokens, wanted = ([data.draw(few) for _ in forest] for _ in range(2))
    links = Links.empty(requests, nodes)
    reconstruct_indices_from_tree_mask(
        torch.stack([mask_of(parents) for parents in forest]), torch.ones(requests),
        links.positions, links.index, links.child, links.sibling, requests, nodes,
    )  # fmt: skip
    predicts = torch.full((requests * nodes,), -5, dtype=torch.int32)
    accept_index = torch.full((requests, most + 1), -1, dtype=torch.int32)
    counts = torch.full((requests,), -5, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts, accept_index, counts, torch.tensor(tokens), links.index, links.child,
        links.sibling, torch.tensor(wanted),
    )  # fmt: skip
    expected = torch.full_like(predicts, -5)
    for i, parents in enumerate(forest):
        path = accepted(parents, tokens[i], wanted[i], 0, most)
        flat = [i * nodes + node for node in path]
        assert counts[i] == len(path) - 1
        assert accept_index[i].tolist() == flat + [-1] * (most + 1 - len(path))
        expected[flat] = torch.tensor([wanted[i][node] for node in path], dtype=torch.int32)
    assert torch.equal(predicts, expected)


def test_verify_of_an_empty_batch_does_nothing() -> None:
    none = torch.zeros(0, 3, dtype=torch.int64)
    verify_tree_greedy_cpu(none[:, 0], none, none[:, 0], none, none, none, none, none)


def test_bonus_token_is_the_last_accepted_one() -> None:
    tokens = torch.arange(12).view(3, 4)
    bonus = torch.zeros(3, dtype=torch.int32)
    fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2]), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


def test_slots_of_accepted_nodes_are_packed_to_the_front() -> None:
    slots = torch.tensor([50, 51, 52, 53, 54, 55])
    result = torch.zeros(6, dtype=torch.int64)
    fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), slots, result)
    assert result.tolist() == [50, 52, 53, 0, 0, 0]


@pytest.mark.parametrize("select", [None, [1, 5, 5]])
def test_ids_move_left_and_the_newest_comes_behind(select: list[int] | None) -> None:
    ids = torch.arange(10, 16)
    starts, lengths = torch.tensor([0, 2, 3]), torch.tensor([2, 1, 3])
    chosen = None if select is None else torch.tensor([1, 2, 4])
    rotate_input_ids_cpu(ids, starts, lengths, torch.tensor([[90], [91], [92]]), chosen)
    assert ids.tolist() == (
        [11, 90, 91, 14, 15, 92] if select is None else [11, 90, 91, 14, 92, 15]
    )


def test_a_request_without_new_ids_is_left_alone() -> None:
    ids = torch.arange(10, 13)
    rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 0]), torch.tensor([90, 91]))
    assert ids.tolist() == [11, 12, 90]

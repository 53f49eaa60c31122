"""Sampling verification against its law, counted over grids of coins, and against a reference."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel import (
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
)
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from torch import Tensor

Parents = list[int]  # of nodes 1, 2, ...; each smaller than its node
Verdict = tuple[list[int], list[int]]  # the accepted nodes, root first, and the token after each


def verify(
    parents: Parents, drafts: list[int], target: Tensor, coins: Tensor, last: Tensor, most: int
) -> list[Verdict]:
    """One verdict for each row of coins, of the same tree.

    drafts: tokens of all nodes, the root's unused.  target: [nodes, vocabulary].  coins:
    [rows, nodes].  last: [rows].
    """
    rows, nodes = coins.shape
    mask = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(parents, start=1):
        mask[node] |= mask[parent]
    links = [torch.full((rows, nodes), -9) for _ in range(4)]
    reconstruct_indices_from_tree_mask(
        mask.repeat(rows, 1, 1), torch.ones(rows), *links, rows, nodes
    )
    predicts = torch.full((rows * nodes,), -5, dtype=torch.int32)
    accepted = torch.full((rows, most + 1), -1, dtype=torch.int32)
    counts = torch.full((rows,), -5, dtype=torch.int32)
    targets = target.repeat(rows, 1, 1)
    tree_speculative_sampling_target_only(
        predicts, accepted, counts, torch.tensor([drafts]).repeat(rows, 1), *links[1:], coins,
        last, targets, torch.zeros_like(targets),
    )  # fmt: skip
    verdicts = []
    for row in range(rows):
        flat = accepted[row, : int(counts[row]) + 1].tolist()
        assert accepted[row].tolist() == flat + [-1] * (most + 1 - len(flat))
        verdicts.append(([node - row * nodes for node in flat], predicts[flat].tolist()))
        others = set(range(row * nodes, (row + 1) * nodes)) - set(flat)
        assert set(predicts[sorted(others)].tolist()) <= {-5}
    return verdicts


def grid(*counts: int) -> Tensor:
    """Every combination of the middles of `counts` equal parts of [0, 1)."""
    axes = [(torch.arange(count) + 0.5) / count for count in counts]
    return torch.cartesian_prod(*axes)


# Eighths, so that a grid of coins has exactly each token's share.
FIRST = torch.tensor([0.5, 0.25, 0.125, 0.125])
SECOND = torch.tensor([0.25, 0.0, 0.25, 0.5])
THIRD = torch.tensor([0.125, 0.25, 0.25, 0.375])


def shares(tokens: list[int]) -> list[float]:
    """Of each token among them."""
    counts = np.bincount(tokens, minlength=4)
    frequencies: list[float] = (counts / len(tokens)).tolist()
    return frequencies


@pytest.mark.parametrize(("draft", "eighths_left"), [(0, 4), (1, 6), (2, 7), (3, 7)])
def test_whatever_was_drafted_the_token_has_the_targets_distribution(
    draft: int, eighths_left: int
) -> None:
    coins = grid(8, eighths_left)
    both = torch.stack([coins[:, 0], torch.full((len(coins),), 0.5)], dim=1)
    verdicts = verify([0], [9, draft], torch.stack([FIRST, SECOND]), both, coins[:, 1], 1)
    assert shares([tokens[0] for _, tokens in verdicts]) == FIRST.tolist()
    accepted = sum(len(nodes) > 1 for nodes, _ in verdicts)
    assert accepted / len(coins) == FIRST[draft]


def test_a_chains_tokens_have_the_targets_joint_distribution() -> None:
    """Each token given the ones before it, wherever the chain was cut."""
    coins = grid(8, 4, 24)
    drafted = torch.cat([coins[:, :2], torch.full((len(coins), 1), 0.5)], dim=1)
    target = torch.stack([FIRST, SECOND, THIRD])
    verdicts = verify([0, 1], [9, 1, 2], target, drafted, coins[:, 2], 2)
    assert shares([tokens[0] for _, tokens in verdicts]) == FIRST.tolist()
    begun = [tokens for nodes, tokens in verdicts if len(nodes) > 1]
    assert shares([tokens[1] for tokens in begun]) == SECOND.tolist()
    whole = [tokens for nodes, tokens in verdicts if len(nodes) > 2]
    assert shares([tokens[2] for tokens in whole]) == THIRD.tolist()


def test_siblings_share_what_the_ones_before_them_left() -> None:
    coins = grid(8, 3)
    both = torch.cat([coins[:, :1], torch.full((len(coins), 2), 0.5)], dim=1)
    target = torch.stack([FIRST, SECOND, THIRD])
    verdicts = verify([0, 0], [9, 2, 0], target, both, coins[:, 1], 1)
    assert shares([tokens[0] for _, tokens in verdicts]) == FIRST.tolist()


def test_a_token_without_mass_is_neither_accepted_nor_drawn() -> None:
    edges = torch.tensor([[0.0, 0.0], [1 - 2**-24, 0.0]])
    last = torch.tensor([0.0, 1 - 2**-24])
    target = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.25] * 4])
    for draft in (0, 3):
        verdicts = verify([0], [9, draft], target, edges, last, 1)
        assert verdicts == [([0], [1]), ([0], [2])]


def choices(
    children: dict[int, list[int]], drafts: list[int], target: np.ndarray, coins: list[float],
    last: float, most: int,
) -> Verdict:  # fmt: skip
    """What is accepted, told as a walk over the unit interval; written without the stand-in.

    The drafted children own the first parts of the interval, as long as their probabilities; the
    coin picks a part, or else none of them.
    """
    path, tokens = [0], []
    while True:
        node, left = path[-1], target[path[-1]].copy()
        if len(path) > most:
            break
        owners = [child for child in children.get(node, []) if left[drafts[child]] > 0]
        ends = np.cumsum([left[drafts[child]] for child in owners])
        chosen = [child for child, end in zip(owners, ends, strict=True) if coins[node] < end]
        if not chosen:
            left[[drafts[child] for child in children.get(node, [])]] = 0
            break
        path.append(chosen[0])
        tokens.append(drafts[chosen[0]])
    rest = np.flatnonzero(left)
    ends = np.cumsum(left[rest]) / left.sum()
    return path, [*tokens, int(rest[min(np.sum(ends <= last), len(rest) - 1)])]


@given(st.data())
def test_trees_are_walked_as_the_reference_walks_them(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(2, 7))
    parents = [data.draw(st.integers(0, node - 1)) for node in range(1, nodes)]
    most = data.draw(st.integers(1, nodes - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    # Siblings differ, as a drafter's candidates do.
    drafts = rng.permutation(12)[:nodes].tolist()
    # Sixteenths, which no sum rounds; the coins lie between them.
    weights = rng.multinomial(16, rng.dirichlet(np.full(12, 0.3)), size=nodes)
    target = torch.tensor(weights / 16, dtype=torch.float32)
    coins = torch.tensor((rng.integers(0, 32, (5, nodes)) + 0.5) / 32, dtype=torch.float32)
    last = torch.tensor(rng.random(5) * 0.999, dtype=torch.float32)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(node)
    expected = [
        choices(children, drafts, target.numpy().astype(float), row, float(one), most)
        for row, one in zip(coins.tolist(), last, strict=True)
    ]
    # Where nothing of the target is left, which happens to no coin below 1, CUDA takes any token.
    assert verify(parents, drafts, target, coins, last, most) == expected


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, [0]), (2, [0, 1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (1 << 30, None)],
)
def test_top_k_keeps_the_likeliest_and_their_equals(k: int, expected: list[int] | None) -> None:
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1, 0.0]])
    kept_probs = top_k_renorm_prob(probs, torch.tensor([k], dtype=torch.int32))
    kept = range(6) if expected is None else [*expected, *([4] if k == 4 else [])]
    reference = np.zeros(6)
    reference[list(kept)] = probs[0, list(kept)] / probs[0, list(kept)].sum()
    assert kept_probs[0].tolist() == pytest.approx(reference.tolist())


@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 1.0]))
def test_top_p_keeps_the_fewest_that_make_up_p(seed: int, p: float) -> None:
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(20, 0.5), size=3)
    kept_probs = top_p_renorm_prob(torch.tensor(probs), torch.full((3,), p, dtype=torch.float64))
    for row, kept in zip(probs, kept_probs.numpy(), strict=True):
        order = np.argsort(-row)
        sums = list(itertools.accumulate(row[order]))
        count = next(n for n, total in enumerate(sums, start=1) if total >= p or n == len(row))
        reference = np.zeros(20)
        reference[order[:count]] = row[order[:count]] / row[order[:count]].sum()
        assert kept == pytest.approx(reference, abs=1e-9)


def test_rows_have_cutoffs_of_their_own() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2]] * 3)
    # The cutoff lies between two sums: on one of them, rounding decides.
    ks = top_k_renorm_prob(probs, torch.tensor([1, 2, 3]))
    ps = top_p_renorm_prob(probs, torch.tensor([0.45, 0.75, 1.0]))
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.625, 0.375, 0.0], [0.5, 0.3, 0.2]])
    assert torch.allclose(ks, expected)
    assert torch.allclose(ps, expected)

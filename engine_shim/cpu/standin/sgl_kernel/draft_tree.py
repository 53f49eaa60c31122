"""The tree of drafted tokens: who is whose parent, and which draft token may see which.

Node 0 is the root, the last token already verified; nodes 1 .. n-1 are draft tokens, a parent
always before its children. ``next_token[i]`` is the first child of node i and ``next_sibling[i]``
its next sibling, -1 for none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import operator

_FULL_MASK, _DRAFT_ONLY_MASK = 0, 1


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int | None]:
    """Parent of every node, None where the drafter's record names no selected one (such a node is
    unreachable).
    """
    node_of: dict[int, int] = {}
    for node, score_index in enumerate(selected, start=1):
        node_of.setdefault(score_index, node)
    parents: list[int | None] = [None]
    for score_index in selected:
        slot = score_index // topk
        parents.append(0 if slot == 0 else node_of.get(parent_list[slot]))
    return parents


def _links(parents: list[int | None]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, siblings in ascending order."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent is not None:
            sibling[node], child[parent] = child[parent], node
    return child, sibling


def _ancestry(parents: list[int | None]) -> list[list[int]]:
    """For every node the draft nodes on its path to the root, itself included, the root left
    out.
    """
    paths: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        path, at = [], node
        while at:
            path.append(at)
            at = parents[at] or 0
        paths.append(path)
    return paths


@operator
def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and links of every request's draft tree, in place.

    Args:
        parent_list: ``[requests, *]``; entry s is the score index of the parent shared by the
            candidates of group s.
        selected_index: ``[requests, num_nodes - 1]`` score indices of the chosen draft tokens,
            ascending; index // topk is a token's group, group 0 hangs from the root.
        seq_lens: ``[requests]`` verified tokens.
        tree_mask: bool, flat. Mode 0: per request ``[num_nodes, seq_len + num_nodes]``, of which
            only the draft columns are written; mode 1: per request ``[num_nodes, num_nodes]``.
        positions, retrive_index, retrive_next_token, retrive_next_sibling: ``[requests *
            num_nodes]`` or ``[requests, num_nodes]``.

    Raises:
        ValueError: for the bit-packed mask mode, which only CUDA backends read.
    """
    mode = int(tree_mask_mode)
    if mode not in (_FULL_MASK, _DRAFT_ONLY_MASK):
        raise ValueError(
            f"tree mask mode {mode} is bit-packed, which only CUDA attention backends read"
        )
    requests = seq_lens.numel()
    lengths = seq_lens.tolist()
    flat_mask = tree_mask.view(-1)
    children, siblings, depths = [], [], []
    offset = 0
    for selected, parent_row, length in zip(selected_index.tolist(), parent_list.tolist(), lengths):
        parents = _parents(selected, parent_row, topk)
        child, sibling = _links(parents)
        paths = _ancestry(parents)
        children.append(child)
        siblings.append(sibling)
        depths.append([length + len(path) for path in paths])
        visible = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
        visible[:, 0] = True
        for node, path in enumerate(paths):
            visible[node, path] = True
        prefix = length if mode == _FULL_MASK else 0
        size = num_nodes * (prefix + num_nodes)
        flat_mask[offset : offset + size].view(num_nodes, prefix + num_nodes)[:, prefix:] = visible
        offset += size
    shape = (requests, num_nodes)
    retrive_index.view(shape).copy_(torch.arange(requests * num_nodes).view(shape))
    retrive_next_token.view(shape).copy_(torch.tensor(children).view(shape))
    retrive_next_sibling.view(shape).copy_(torch.tensor(siblings).view(shape))
    positions.view(shape).copy_(torch.tensor(depths).view(shape))


@operator
def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Fill positions and links from the masks alone, in place (the n-gram drafter proposes masks).

    ``tree_mask`` is bool ``[batch_size, n, n]``, row i true at i's ancestors and at i itself.
    """
    shape = (batch_size, draft_token_num)
    children, siblings, depths = [], [], []
    for rows, length in zip(
        tree_mask.view(batch_size, draft_token_num, draft_token_num).tolist(),
        verified_seq_len.tolist(),
    ):
        ancestors = [[j for j in range(i) if row[j]] for i, row in enumerate(rows)]
        parents: list[int | None] = [path[-1] if path else None for path in ancestors]
        child, sibling = _links(parents)
        children.append(child)
        siblings.append(sibling)
        depths.append([length + len(path) for path in ancestors])
    retrive_index.view(shape).copy_(torch.arange(batch_size * draft_token_num).view(shape))
    retrive_next_token.view(shape).copy_(torch.tensor(children).view(shape))
    retrive_next_sibling.view(shape).copy_(torch.tensor(siblings).view(shape))
    positions.view(shape).copy_(torch.tensor(depths).view(shape))

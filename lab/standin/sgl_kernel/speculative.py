"""Builds trees of drafted tokens, verifies them, and does the bookkeeping between two rounds.

Node 0 of a tree is the root, the last token already verified; nodes 1 .. n-1 are draft tokens, a
parent always before its children.  ``next_token[i]`` is the first child of node i and
``next_sibling[i]`` its next sibling, -1 for none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._registry import operator

_FULL_MASK, _DRAFT_ONLY_MASK = 0, 1


@dataclass(frozen=True, slots=True)
class _Tree:
    """One request's tree: every node's parent, and its ancestors from the root down."""

    parents: list[int | None]
    ancestors: list[list[int]]

    def links(self) -> tuple[list[int], list[int]]:
        """Returns first child and next sibling of every node, siblings in ascending order."""
        child, sibling = [-1] * len(self.parents), [-1] * len(self.parents)
        for node in range(len(self.parents) - 1, 0, -1):
            parent = self.parents[node]
            if parent is not None:
                sibling[node], child[parent] = child[parent], node
        return child, sibling

    def visible(self) -> list[list[bool]]:
        """Returns for every node which nodes it sees: its ancestors and itself."""
        nodes = range(len(self.parents))
        visible_nodes = [
            {*node_ancestors, node} for node, node_ancestors in enumerate(self.ancestors)
        ]
        return [[candidate in visible_set for candidate in nodes] for visible_set in visible_nodes]


def _from_scores(selected: list[int], parent_list: list[int], topk: int) -> _Tree:
    """Builds the tree of the chosen candidates, see ``build_tree_kernel_efficient_cpu``.

    A node whose parent was not chosen hangs from nothing and is never reached; it sees the root.
    """
    node_of = {score_index: node for node, score_index in enumerate(selected, start=1)}
    parents: list[int | None] = [None]
    ancestors: list[list[int]] = [[]]
    for score_index in selected:
        group = score_index // topk
        parent = 0 if group == 0 else node_of.get(parent_list[group])
        parents.append(parent)
        ancestors.append([0] if parent is None else [*ancestors[parent], parent])
    return _Tree(parents, ancestors)


def _from_mask(rows: list[list[bool]]) -> _Tree:
    """Builds the tree of a mask whose row i is true at i's ancestors, its parent being the last."""
    ancestors = [[j for j in range(i) if row[j]] for i, row in enumerate(rows)]
    return _Tree(
        [node_ancestors[-1] if node_ancestors else None for node_ancestors in ancestors], ancestors
    )


def _write_links(
    trees: list[_Tree], lengths: list[int], positions: Tensor, index: Tensor, links: list[Tensor]
) -> None:
    """Fills positions, flat node numbers and the two kinds of link, ``[requests * nodes]`` each."""
    children, siblings, depths = [], [], []
    for tree, length in zip(trees, lengths, strict=True):
        child, sibling = tree.links()
        children += child
        siblings += sibling
        depths += [length + len(node_ancestors) for node_ancestors in tree.ancestors]
    columns = (list(range(len(depths))), depths, children, siblings)
    for target, column in zip((index, positions, *links), columns, strict=True):
        target.view(-1).copy_(torch.tensor(column, dtype=torch.int64))


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
    """Fills mask, positions and links of every request's draft tree, in place.

    Args:
        parent_list: ``[requests, groups]``; entry g is the score index of the parent that the
            candidates of group g share.
        selected_index: ``[requests, num_nodes - 1]`` score indices of the chosen draft tokens,
            ascending; index // topk is a token's group, and group 0 hangs from the root.
        seq_lens: ``[requests]`` verified tokens.
        tree_mask: bool ``[requests, num_nodes, num_nodes]``, flat: which node sees which.  In mode
            0 (FULL_MASK) a request's rows have ``seq_len + num_nodes`` columns, of which only the
            last ``num_nodes`` are written.
        positions, retrive_index, retrive_next_token, retrive_next_sibling: ``[requests,
            num_nodes]``, flat or not; position in the sequence, node number over the whole batch,
            and the links.

    Raises:
        ValueError: for a mask mode other than these two.
    """
    if int(tree_mask_mode) not in (_FULL_MASK, _DRAFT_ONLY_MASK):
        raise ValueError(
            f"tree mask mode {int(tree_mask_mode)} is for attention backends that need a GPU"
        )
    rows = zip(selected_index.tolist(), parent_list.tolist(), strict=True)
    trees = [_from_scores(selected, parents, topk) for selected, parents in rows]
    visible = torch.tensor([tree.visible() for tree in trees], dtype=torch.bool)
    flat, end = tree_mask.view(-1), 0
    prefixes = seq_lens.tolist() if int(tree_mask_mode) == _FULL_MASK else [0] * len(trees)
    for tree_cells, prefix in zip(visible, prefixes, strict=True):
        start, end = end, end + num_nodes * (prefix + num_nodes)
        flat[start:end].view(num_nodes, -1)[:, prefix:] = tree_cells
    links = [retrive_next_token, retrive_next_sibling]
    _write_links(trees, seq_lens.tolist(), positions, retrive_index, links)


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
    """Fills positions and links from the masks alone, in place (the n-gram drafter proposes masks).

    ``tree_mask`` is bool ``[batch_size, n, n]``, flat or not, row i true at i's ancestors; the
    other arguments are as in ``build_tree_kernel_efficient_cpu``.
    """
    masks = tree_mask.view(batch_size, draft_token_num, draft_token_num).tolist()
    trees = [_from_mask(rows) for rows in masks]
    links = [retrive_next_token, retrive_next_sibling]
    _write_links(trees, verified_seq_len.tolist(), positions, retrive_index, links)


@operator
def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk every request's draft tree along the target's greedy choices, in place.

    Args:
        predicts: ``[requests * nodes]``; the target's token is written after every accepted node.
        accept_index: ``[requests, max_accepted + 1]``, preset to -1; receives the flat indices of
            root and accepted nodes.
        accept_token_num: ``[requests]``; receives the number of accepted draft tokens, the bonus
            token not counted.
        candidates: ``[requests, nodes]`` draft tokens, node 0 the last verified token.
        retrive_index, retrive_next_token, retrive_next_sibling: the tree (see the module).
        target_predict: ``[requests * nodes]`` or ``[requests, nodes]``, the target's greedy token
            after each node.
    """
    target_tokens = target_predict.reshape(-1).tolist()
    max_accepted = accept_index.shape[1] - 1
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    accepted_nodes, counts, written = [], [], []
    for tokens, flat, child, sibling in zip(*(t.tolist() for t in trees), strict=True):
        path, node = [flat[0]], 0
        while len(path) <= max_accepted:
            next_token = target_tokens[path[-1]]
            node = child[node]
            while node != -1 and tokens[node] != next_token:
                node = sibling[node]
            if node == -1:
                break
            path.append(flat[node])
        counts.append(len(path) - 1)
        written.extend(path)
        accepted_nodes.append(path + [-1] * (max_accepted + 1 - len(path)))
    written_rows = torch.tensor(written, dtype=torch.int64)
    predicts[written_rows] = target_predict.reshape(-1)[written_rows].to(predicts.dtype)
    accept_index.copy_(torch.tensor(accepted_nodes).view(accept_index.shape))
    accept_token_num.copy_(torch.tensor(counts))


@operator
def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Set ``bonus_tokens[i]`` to the last accepted token of request i, in place.

    ``accept_tokens`` is ``[requests, accept_stride]``, flat or not, of which the first
    ``accept_lens[i]`` in row i are accepted, the bonus token being the last.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


@operator
def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Pack the cache slots of accepted nodes (``accept_index`` not -1) to the front, in place."""
    flat = accept_index.reshape(-1)
    accepted = flat[flat > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(
        accept_out_cache_loc.dtype
    )


@operator
def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift every request's token ids left by one and put its newest token behind, in place.

    Args:
        input_ids: ``[tokens]``; request i owns ``extend_seq_lens[i]`` ids from
            ``extend_start_loc[i]`` on.
        topk_index: one new token per request.
        select_index: where the new token goes instead of the last place, ``[requests]`` flat
            indices.
    """
    newest = topk_index.reshape(-1).tolist()
    places = None if select_index is None else select_index.tolist()
    spans = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for i, (start, length) in enumerate(spans):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        input_ids[places[i] if places else start + length - 1] = newest[i]

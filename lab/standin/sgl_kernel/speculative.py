"""Verifying a draft, and the bookkeeping between two rounds of speculation."""

import torch
from torch import Tensor

from ._registry import operator
from .draft_tree import reconstruct_indices_from_tree_mask as reconstruct_indices_from_tree_mask


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
        accept_index: ``[requests, most + 1]``, preset to -1; receives the flat indices of root and
            accepted nodes.
        accept_token_num: ``[requests]``; receives the number of accepted draft tokens, the bonus
            token not counted.
        candidates: ``[requests, nodes]`` draft tokens, node 0 the last verified token.
        retrive_index, retrive_next_token, retrive_next_sibling: the tree (see ``draft_tree``).
        target_predict: ``[requests * nodes]`` or ``[requests, nodes]``, the target's greedy token
            after each node.
    """
    chosen = target_predict.reshape(-1).tolist()
    most = accept_index.shape[1] - 1
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    accepted_nodes, counts, written = [], [], []
    for tokens, flat, child, sibling in zip(*(t.tolist() for t in trees), strict=True):
        path, node = [flat[0]], 0
        while len(path) <= most:
            wanted = chosen[path[-1]]
            node = child[node]
            while node != -1 and tokens[node] != wanted:
                node = sibling[node]
            if node == -1:
                break
            path.append(flat[node])
        counts.append(len(path) - 1)
        written.extend(path)
        accepted_nodes.append(path + [-1] * (most + 1 - len(path)))
    where = torch.tensor(written, dtype=torch.int64)
    predicts[where] = target_predict.reshape(-1)[where].to(predicts.dtype)
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
    kept = flat[flat > -1].long()
    accept_out_cache_loc[: kept.numel()] = out_cache_loc[kept].to(accept_out_cache_loc.dtype)


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

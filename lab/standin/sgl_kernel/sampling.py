"""Verifying a draft where the target's tokens are sampled: what SGLang runs on CUDA alone.

Three functions with the names, the arguments and the results of the kernels that SGLang calls at a
temperature above 0.  They run between the passes and in no graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walks every request's draft tree, accepting each token with its probability, in place.

    Siblings are tried in order, each with its share of what the ones before have left.  Where all
    of them are rejected, the next token is drawn from the target's other tokens; behind the last
    draft it is drawn from all.  With both thresholds at 1, tokens have the target's distribution.

    Args:
        predicts: ``[requests * nodes]``; after every accepted node the token that follows it.
        accept_index: ``[requests, max_accepted + 1]``, preset to -1; receives the flat indices of
            root and accepted nodes.
        accept_token_num: ``[requests]``; receives the number of accepted draft tokens.
        candidates: ``[requests, nodes]`` draft tokens, node 0 the last verified token.
        retrive_index, retrive_next_token, retrive_next_sibling: the tree (see ``speculative``).
        uniform_samples: ``[requests, nodes]`` numbers in [0, 1): of each node, for its children.
        uniform_samples_for_final_sampling: ``[requests]``, for the token that was not drafted.
        target_probs: ``[requests, nodes, vocabulary]``, the target's distribution after each node.
        draft_probs: like target_probs, preset to 0; receives the probabilities of rejected tokens.
        threshold_single: a token at least that probable is accepted always.
        threshold_acc: divides the probability of being accepted.
        deterministic: True always; the sums of a CPU have one order.
    """
    max_accepted = accept_index.shape[1] - 1
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples)
    for row, (tokens, flat, child, sibling, coins) in enumerate(
        zip(*(tree.tolist() for tree in trees), strict=True)
    ):
        target, rejected = target_probs[row], draft_probs[row]
        path = [0]
        while len(path) <= max_accepted:
            last, tried = path[-1], 0.0
            node = child[last]
            while node != -1:
                share = float(target[last, tokens[node]])
                tried += share
                if coins[last] < tried / threshold_acc or share >= threshold_single:
                    break
                rejected[last, tokens[node]] = target[last, tokens[node]]
                node = sibling[node]
            if node == -1:
                break
            predicts[flat[last]] = tokens[node]
            path.append(node)
        last = path[-1]
        residual = (target[last] - rejected[last]).clamp(min=0)
        coin = float(uniform_samples_for_final_sampling[row])
        predicts[flat[last]] = _draw(residual, coin)
        accept_token_num[row] = len(path) - 1
        for place, node in enumerate(path):
            accept_index[row, place] = flat[node]


def _draw(weights: Tensor, coin: float) -> int:
    """Returns the token under the coin, where the weights ``[vocabulary]`` lie one after another.

    coin: in [0, 1).  Without any weight it is the last token, as on CUDA.
    """
    ends = weights.double().cumsum(0)
    index = int(torch.searchsorted(ends, coin * ends[-1], right=True))
    if index < len(weights):
        return index
    nonzero = weights.nonzero()
    return int(nonzero[-1]) if len(nonzero) else len(weights) - 1


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keeps the ``top_ks [rows]`` likeliest of ``probs [rows, vocabulary]``, scaled to sum to 1.

    Tokens as likely as the last of them are kept as well.
    """
    descending = probs.sort(dim=-1, descending=True).values
    last = (top_ks.long() - 1).clamp(0, probs.shape[1] - 1)
    return _keep_above(probs, descending.gather(1, last[:, None]))


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keeps the likeliest of ``probs [rows, vocabulary]`` that make up ``top_ps [rows]``, scaled.

    Left out are the least likely tokens whose sum is below 1 - top_ps; of equals none.
    """
    ascending = probs.sort(dim=-1).values
    first = torch.searchsorted(ascending.cumsum(-1), (1 - top_ps)[:, None])
    return _keep_above(probs, ascending.gather(1, first.clamp(max=probs.shape[1] - 1)))


def _keep_above(probs: Tensor, threshold: Tensor) -> Tensor:
    kept_probs = probs.where(probs >= threshold, 0)
    return kept_probs / kept_probs.sum(dim=-1, keepdim=True)

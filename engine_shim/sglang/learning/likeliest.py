"""Takes the target's likeliest tokens of every row of its logits, in a bounded amount of memory."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# What intermediate results may take of the device's memory, at least one row of the vocabulary.
WORKING_BYTES: Final = 64 << 20
_FLOAT32_BYTES: Final = 4


def likeliest(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens, int32 [rows, top], and their log-probabilities, float32 (nats).

    logits: [rows, vocabulary], of any floating type.  `top` is cut to the vocabulary.  Waits for no
    device: the number of passes follows from the shape.
    """
    rows, vocabulary = logits.shape
    top = min(top, vocabulary)
    tokens = torch.empty((rows, top), dtype=torch.int32, device=logits.device)
    logs = torch.empty((rows, top), dtype=torch.float32, device=logits.device)
    # `logsumexp` and `log_softmax` of all rows would take as much as the logits do, in float32; so
    # would their conversion.
    copies = 1 if logits.dtype is torch.float32 else 2
    step = max(1, WORKING_BYTES // (copies * _FLOAT32_BYTES * vocabulary))
    for first in range(0, rows, step):
        at = slice(first, first + step)
        part = logits[at].float()
        highest, found = part.topk(top, dim=-1)
        most = highest[:, :1]
        total = torch.sub(part, most).exp_().sum(dim=-1, keepdim=True)
        tokens[at] = found
        logs[at] = highest - most - total.log()
    return tokens, logs

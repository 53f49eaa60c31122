"""The base of drafts that go token by token: one layer, run again on its own output.

The row at position ``p`` takes the target's features at ``p`` and the embedding of the token at
``p + 1``, is rotated as position ``p``, and predicts the token at ``p + 2``.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from engine_shim.sglang.training.blocks import BorrowingStudent

_MASKED_SCORE = -1e9
_POSITION_DISCOUNT = 0.8


class ChainStudent(BorrowingStudent):
    """A trainable draft whose drafts form a chain; subclasses say what the layer is."""

    @property
    def position_discount(self) -> float:
        """Returns the weight of a draft position relative to the one before it.

        EAGLE-3 (arXiv:2503.01840) is trained with 0.8 ** k by its authors and by SpecForge.
        """
        return _POSITION_DISCOUNT

    @property
    def most_drafts(self) -> int | None:
        """Returns None because a chain may have any length."""
        return None

    def unroll(
        self,
        features: Tensor,
        tokens: Tensor,
        steps: int,
        *,
        first_anchor: int = 0,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> list[Tensor]:
        """Logits of ``steps`` draft steps from every anchor, as drafting would compute them.

        This is training-time test (EAGLE-3, section 3.2): at step ``j`` the anchor at row ``t``
        consumes token ``t + 1 + j`` and sees the true features up to row ``t``, then its own
        earlier steps, and nothing else.

        Args:
            features: target features of rows 0..L-1, [batch, L, width].
            tokens: at least L + steps tokens starting at row 0, [batch, >= L + steps].
            steps: draft length.
            first_anchor: rows before it are context only.
            positions: of the rows, [L] or [batch, L]; 0..L-1 when absent.
            valid: which rows exist, bool [batch, L]; all of them when absent.

        Returns:
            One tensor a step, [batch, L - first_anchor, draft vocabulary]; step ``j`` of row ``t``
            predicts token ``t + 2 + j``.
        """
        length = features.shape[1]
        rows = torch.arange(length, device=features.device)
        positions = rows if positions is None else positions
        seen = rows <= rows[first_anchor:, None]  # [anchors, L]
        seen = seen[None, None] if valid is None else seen & valid[:, None, None, :]

        hidden = self._enter(features)
        residual, query, context_keys, context_values = self._project(
            hidden, tokens[:, 1 : 1 + length], positions
        )
        residual, query = residual[:, first_anchor:], query[:, first_anchor:]
        anchor_positions = positions[..., first_anchor:]

        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            if step:
                consumed = tokens[:, first_anchor + 1 + step : length + 1 + step]
                residual, query, key, value = self._project(
                    hidden, consumed, anchor_positions + step
                )
                own_keys.append(key)
                own_values.append(value)
            attended = _attend(query, context_keys, context_values, seen, own_keys, own_values)
            hidden, logits = self._finish(residual, attended)
            outputs.append(logits)
        return outputs

    @torch.no_grad()
    def greedy_chain(self, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
        """The draft a server would propose after ``tokens``: ids [batch, steps].

        ``tokens`` [batch, L + 1] are all tokens so far, the newest not yet run by the target;
        ``features`` [batch, L, ...] are the target's for all but the newest.  Compared with what a
        live draft proposed, this is the test of every convention above.
        """
        for _ in range(steps):
            made = tokens.shape[1] - features.shape[1]
            logits = self.unroll(features, tokens, made, first_anchor=features.shape[1] - 1)[-1]
            tokens = torch.cat([tokens, self.drafted(logits)], dim=1)
        return tokens[:, -steps:]

    @abstractmethod
    def _enter(self, features: Tensor) -> Tensor:
        """Maps features [batch, L, width] to hidden states [batch, L, hidden]."""

    @abstractmethod
    def _project(
        self, hidden: Tensor, consumed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Makes the residual stream [batch, L, hidden] and its q, k, v [batch, L, heads, head_dim].

        hidden: states of the step before; consumed: token ids [batch, L].
        """

    @abstractmethod
    def _finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the hidden state that the next step starts from, and logits."""


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """Each anchor over the shared context and its own chain, to [batch, anchors, query width].

    The own chain is a handful of keys that differ per anchor, so it is scored elementwise beside
    the shared matrix.
    """
    scale = query.shape[-1] ** -0.5
    shared = torch.einsum("bqhd,bkhd->bhqk", query, keys).masked_fill(~seen, _MASKED_SCORE)
    own = [(query * key).sum(dim=-1).transpose(1, 2).unsqueeze(-1) for key in own_keys]
    weights = (torch.cat([shared, *own], dim=-1) * scale).softmax(dim=-1)
    context = keys.shape[1]
    output = torch.einsum("bhqk,bkhd->bqhd", weights[..., :context], values)
    for index, value in enumerate(own_values):
        output = output + weights[..., context + index].transpose(1, 2).unsqueeze(-1) * value
    return output.flatten(2)

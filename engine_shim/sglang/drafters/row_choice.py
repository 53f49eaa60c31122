"""Chooses a drafter for every row of a step, on the device, and counts each proposal's acceptance.

Two drafters propose tokens for the same positions, and a verification has the same shape for both.
So in a step of a mixture each row gets the proposal that the plan's rule prefers (proto
`MixtureRule`).  For each request the rule uses two running means, one for the main drafter and one
for the lookup: the accepted tokens of its proposals, divided by the number that the plan expects.
Both are updated on the device from what each step has verified.

The choice never changes the output, because the target verifies all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from engine_shim.sglang.api.transfer import to_device
from engine_shim.sglang.drafters.lookup import LEAST_MATCH, LONGEST_MATCH, Proposal
from speculation.v1.plan_pb2 import MixtureRule

# Columns of the ratios.
_MAIN, _FREE = 0, 1
_EXPECTED_LEAST: Final = 1e-3


class DeviceRule(NamedTuple):
    """A rule on the device; free_expected has one entry for each match length from 0 on."""

    main_expected: float
    free_expected: torch.Tensor
    ratio_weight: float


class Drafted(NamedTuple):
    """Holds what was proposed for the B rows of a step.

    rows: [B], rows of the request pool.  main: [B, gamma], proposals of the main drafter, None if
    it has not drafted.  free: proposals of the lookup.  chose: [B], whether the rule prefers the
    lookup, None without a rule.  is_mixed: whether the step follows the rule.  is_verified: whether
    the step verifies one of the proposals; at gamma 0 they are only compared.
    """

    rows: torch.Tensor
    gamma: int
    main: torch.Tensor | None
    free: Proposal
    chose: torch.Tensor | None
    rule: DeviceRule | None
    is_mixed: bool
    is_verified: bool = True


class RowChoice:
    """Keeps the running means of all requests: float32 [requests, 2] on the device."""

    def __init__(self, requests: int, device: torch.device | str) -> None:
        self._ratios = torch.ones((requests, 2), device=device)
        self._device = device
        self._entries: Sequence[MixtureRule] = ()
        self._rules: dict[tuple[str, int], DeviceRule] = {}

    def forget(self, rows: Sequence[int]) -> None:
        """Resets the means of these rows of the request pool, whose requests are new."""
        if rows:
            self._ratios.index_fill_(0, to_device(rows, self._device), 1.0)

    def rule(self, entries: Sequence[MixtureRule], mixture: str, gamma: int) -> DeviceRule | None:
        """Returns the plan's rule for a mixture; None without a rule."""
        if entries is not self._entries:
            self._entries, self._rules = entries, {}
        found = self._rules.get((mixture, gamma))
        if found is None:
            for entry in entries:
                if (entry.drafter, entry.gamma) == (mixture, gamma):
                    found = self._rules[mixture, gamma] = self._on_device(entry)
        return found

    def _on_device(self, entry: MixtureRule) -> DeviceRule:
        free, least = entry.free_expected, entry.least_match
        by_length = [
            free[min(length - least, len(free) - 1)] if length >= max(least, LEAST_MATCH) else 0.0
            for length in range(LONGEST_MATCH + 1)
        ]
        expected = to_device(by_length, self._device, torch.float32)
        return DeviceRule(entry.main_expected, expected, entry.ratio_weight)

    def choose(
        self, rows: torch.Tensor, main: torch.Tensor, free: Proposal, rule: DeviceRule | None, *,
        is_mixed: bool,
    ) -> tuple[torch.Tensor, Drafted]:  # fmt: skip
        """Returns the tokens [B, gamma] to verify, and what was proposed."""
        gamma, chose = main.shape[1], None
        if rule is not None:
            ratios = self._ratios.index_select(0, rows)
            hoped = ratios[:, _FREE] * rule.free_expected[free.match]
            chose = hoped > ratios[:, _MAIN] * rule.main_expected
        drafted = Drafted(rows, gamma, main, free, chose, rule, is_mixed and chose is not None)
        if chose is None or not is_mixed:
            return main, drafted
        return torch.where(chose[:, None], free.tokens, main), drafted

    def learn(self, drafted: Drafted, verified: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Compares the proposals with what a step has verified, and updates the running means.

        verified: [B, gamma + 1] tokens, of which the first `known` [B] (accepted drafts and one
        more) belong to the request.  Returns int16 [B, 5]: whether the rule prefers the lookup (-1:
        no rule), the length of its match, the leading tokens of the main drafter's proposal (-1: no
        proposal) and of the lookup's that agree with the answer, and the accepted drafts.
        """
        main, free = drafted.main, drafted.free
        known = known.to(torch.int64)
        accepted = known - 1
        free_shown = _agreed(free.tokens, verified, known)
        if main is None:
            main_shown = torch.full_like(accepted, -1)
        else:
            main_shown = _agreed(main, verified, known)
        # The real count holds for the verified proposal: sampling may reject a draft token and then
        # draw the same token.
        if drafted.is_mixed and drafted.chose is not None:
            main_shown = torch.where(drafted.chose, main_shown, accepted)
            free_shown = torch.where(drafted.chose, accepted, free_shown)
        elif drafted.is_verified:
            main_shown, free_shown = (
                (main_shown, accepted) if main is None else (accepted, free_shown)
            )
        if drafted.chose is None or drafted.rule is None:
            chose = torch.full_like(accepted, -1)
        else:
            chose = drafted.chose.to(torch.int64)
            self._update(drafted, drafted.rule, main_shown, free_shown, known)
        columns = (chose, free.match, main_shown, free_shown, accepted)
        return torch.stack(columns, dim=1).to(torch.int16)

    def _update(
        self, drafted: Drafted, rule: DeviceRule, main_shown: torch.Tensor,
        free_shown: torch.Tensor, known: torch.Tensor,
    ) -> None:  # fmt: skip
        rows, gamma, match = drafted.rows, drafted.gamma, drafted.free.match
        ratios = self._ratios.index_select(0, rows)
        expected = torch.stack(
            (
                torch.full_like(ratios[:, 0], max(rule.main_expected, _EXPECTED_LEAST)),
                rule.free_expected[match].clamp(min=_EXPECTED_LEAST),
            ),
            dim=1,
        )
        shown = torch.stack((main_shown, free_shown), dim=1)
        # A longer proposal that agrees with all known tokens is censored: its true value is at
        # least that number.
        is_censored = (shown == known[:, None]) & (known[:, None] < gamma)
        shown = shown.to(ratios.dtype)
        shown = torch.where(is_censored, torch.maximum(shown, ratios * expected), shown)
        moved = ratios + rule.ratio_weight * (shown / expected - ratios)
        moved[:, _FREE] = torch.where(match >= LEAST_MATCH, moved[:, _FREE], ratios[:, _FREE])
        self._ratios[rows] = moved


def _agreed(tokens: torch.Tensor, verified: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Returns [B], the number of leading tokens of a proposal that agree with the known ones."""
    agree = (tokens == verified[:, : tokens.shape[1]]).cumprod(dim=1).sum(dim=1)
    return torch.minimum(agree, known)

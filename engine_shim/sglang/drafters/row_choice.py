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
from engine_shim.sglang.drafters.lookup import MAX_MATCH_TOKENS, MIN_MATCH_TOKENS, Proposal
from speculation.v1.plan_pb2 import MixtureRule

# Columns of the ratios.
_MAIN_COLUMN, _LOOKUP_COLUMN = 0, 1
_MIN_EXPECTED_TOKENS: Final = 1e-3


class DeviceRule(NamedTuple):
    """A rule on the device; free_expected has one entry for each match length from 0 on."""

    main_expected: float
    lookup_expected: torch.Tensor
    ratio_weight: float


class RowProposals(NamedTuple):
    """Holds what was proposed for the B rows of a step.

    rows: [B], rows of the request pool.  main: [B, gamma], proposals of the main drafter, None if
    it has not drafted.  lookup: proposals of the lookup.  prefers_lookup: [B], whether the rule
    prefers the lookup, None without a rule.  is_mixed: whether the step follows the rule.
    is_verified: whether the step verifies one of the proposals; at gamma 0 they are only compared.
    """

    rows: torch.Tensor
    gamma: int
    main: torch.Tensor | None
    lookup: Proposal
    prefers_lookup: torch.Tensor | None
    rule: DeviceRule | None
    is_mixed: bool
    is_verified: bool = True


class RowChoice:
    """Keeps the running means of all requests: float32 [requests, 2] on the device."""

    def __init__(self, requests: int, device: torch.device | str) -> None:
        self._ratios = torch.ones((requests, 2), device=device)
        self._device = device
        self._plan_rules: Sequence[MixtureRule] = ()
        self._rules: dict[tuple[str, int], DeviceRule] = {}

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Resets the means of these rows of the request pool, whose requests are new."""
        if rows:
            self._ratios.index_fill_(0, to_device(rows, self._device), 1.0)

    def find_rule(
        self, plan_rules: Sequence[MixtureRule], mixture: str, gamma: int
    ) -> DeviceRule | None:
        """Returns the plan's rule for a mixture; None without a rule."""
        if plan_rules is not self._plan_rules:
            self._plan_rules, self._rules = plan_rules, {}
        device_rule = self._rules.get((mixture, gamma))
        if device_rule is None:
            for plan_rule in plan_rules:
                if (plan_rule.drafter, plan_rule.gamma) == (mixture, gamma):
                    device_rule = self._rules[mixture, gamma] = self._to_device_rule(plan_rule)
        return device_rule

    def _to_device_rule(self, entry: MixtureRule) -> DeviceRule:
        lookup_expected, min_match = entry.free_expected, entry.least_match
        by_length = [
            lookup_expected[min(length - min_match, len(lookup_expected) - 1)]
            if length >= max(min_match, MIN_MATCH_TOKENS)
            else 0.0
            for length in range(MAX_MATCH_TOKENS + 1)
        ]
        expected = to_device(by_length, self._device, torch.float32)
        return DeviceRule(entry.main_expected, expected, entry.ratio_weight)

    def choose(
        self, rows: torch.Tensor, main: torch.Tensor, lookup: Proposal, rule: DeviceRule | None, *,
        is_mixed: bool,
    ) -> tuple[torch.Tensor, RowProposals]:  # fmt: skip
        """Returns the tokens [B, gamma] to verify, and what was proposed."""
        gamma, prefers_lookup = main.shape[1], None
        if rule is not None:
            ratios = self._ratios.index_select(0, rows)
            lookup_expected = ratios[:, _LOOKUP_COLUMN] * rule.lookup_expected[lookup.match_length]
            prefers_lookup = lookup_expected > ratios[:, _MAIN_COLUMN] * rule.main_expected
        proposals = RowProposals(
            rows, gamma, main, lookup, prefers_lookup, rule, is_mixed and prefers_lookup is not None
        )
        if prefers_lookup is None or not is_mixed:
            return main, proposals
        return torch.where(prefers_lookup[:, None], lookup.tokens, main), proposals

    def observe(
        self, proposals: RowProposals, verified: torch.Tensor, known_counts: torch.Tensor
    ) -> torch.Tensor:
        """Compares the proposals with what a step has verified, and updates the running means.

        verified: [B, gamma + 1] tokens, of which the first `known_counts` [B] (accepted drafts and
        one more) belong to the request.  Returns int16 [B, 5]: whether the rule prefers the lookup
        (-1: no rule), the length of its match, the leading tokens of the main drafter's proposal
        (-1: no proposal) and of the lookup's that agree with the answer, and the accepted drafts.
        """
        main, lookup = proposals.main, proposals.lookup
        known_counts = known_counts.to(torch.int64)
        accepted = known_counts - 1
        lookup_accepted = _agreeing_tokens(lookup.tokens, verified, known_counts)
        if main is None:
            main_accepted = torch.full_like(accepted, -1)
        else:
            main_accepted = _agreeing_tokens(main, verified, known_counts)
        # The real count holds for the verified proposal: sampling may reject a draft token and then
        # draw the same token.
        if proposals.is_mixed and proposals.prefers_lookup is not None:
            main_accepted = torch.where(proposals.prefers_lookup, main_accepted, accepted)
            lookup_accepted = torch.where(proposals.prefers_lookup, accepted, lookup_accepted)
        elif proposals.is_verified:
            main_accepted, lookup_accepted = (
                (main_accepted, accepted) if main is None else (accepted, lookup_accepted)
            )
        if proposals.prefers_lookup is None or proposals.rule is None:
            prefers_lookup = torch.full_like(accepted, -1)
        else:
            prefers_lookup = proposals.prefers_lookup.to(torch.int64)
            self._update(proposals, proposals.rule, main_accepted, lookup_accepted, known_counts)
        columns = (prefers_lookup, lookup.match_length, main_accepted, lookup_accepted, accepted)
        return torch.stack(columns, dim=1).to(torch.int16)

    def _update(
        self, proposals: RowProposals, rule: DeviceRule, main_accepted: torch.Tensor,
        lookup_accepted: torch.Tensor, known_counts: torch.Tensor,
    ) -> None:  # fmt: skip
        rows, gamma, match = proposals.rows, proposals.gamma, proposals.lookup.match_length
        ratios = self._ratios.index_select(0, rows)
        expected = torch.stack(
            (
                torch.full_like(ratios[:, 0], max(rule.main_expected, _MIN_EXPECTED_TOKENS)),
                rule.lookup_expected[match].clamp(min=_MIN_EXPECTED_TOKENS),
            ),
            dim=1,
        )
        accepted = torch.stack((main_accepted, lookup_accepted), dim=1)
        # A longer proposal that agrees with all known tokens is censored: its true value is at
        # least that number.
        is_censored = (accepted == known_counts[:, None]) & (known_counts[:, None] < gamma)
        accepted = accepted.to(ratios.dtype)
        accepted = torch.where(is_censored, torch.maximum(accepted, ratios * expected), accepted)
        updated_ratios = ratios + rule.ratio_weight * (accepted / expected - ratios)
        updated_ratios[:, _LOOKUP_COLUMN] = torch.where(
            match >= MIN_MATCH_TOKENS, updated_ratios[:, _LOOKUP_COLUMN], ratios[:, _LOOKUP_COLUMN]
        )
        self._ratios[rows] = updated_ratios


def _agreeing_tokens(
    tokens: torch.Tensor, verified: torch.Tensor, known_counts: torch.Tensor
) -> torch.Tensor:
    """Returns [B], the number of leading tokens of a proposal that agree with the known ones."""
    agree = (tokens == verified[:, : tokens.shape[1]]).cumprod(dim=1).sum(dim=1)
    return torch.minimum(agree, known_counts)

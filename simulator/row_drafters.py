"""Chooses each row's drafter in steps of a mixture; counts what all its drafters would have had.

The engine's side of proto `MixtureRule` and `ProposalCounts`, for a whole batch at once.  A row
uses the lookup where it has found a match of m tokens and

    free_ratio * free_expected[m] > main_ratio * main_expected

The two ratios belong to the row's request and begin at 1.  If a step shows that v tokens of a
proposal would be accepted, its ratio changes by ratio_weight * (v / expected - ratio).  A step that
accepted a drafts shows a + 1 tokens.  A longer proposal that agrees with all of them counts as
v = max(a + 1, ratio * expected), so that unknown positions never lower a ratio.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import DrafterSpec
from controller.core.plan import MixtureRule
from controller.core.step_report import ProposalCounts, RowGroup
from simulator.policy import RowEvidence

IntArray = NDArray[np.int64]
_MAIN_SIDE, _LOOKUP_SIDE = 0, 1
# Lower bound of the expectation as a divisor.
_MIN_EXPECTED = 1e-3


@dataclass(frozen=True, slots=True)
class _RuleArrays:
    """Holds a rule as arrays.

    lookup_expected: [match length] from 0; the last one holds for all longer ones.
    """

    main_expected: float
    lookup_expected: NDArray[np.float64]
    weight: float

    @classmethod
    def from_plan(cls, rule: MixtureRule) -> "_RuleArrays":
        """Makes the arrays of a plan's rule; the lookup expects 0 below its least match."""
        lookup_expected = np.array([0.0] * rule.least_match + list(rule.free_expected))
        return cls(rule.main_expected, lookup_expected, rule.ratio_weight)


class _Mixture:
    """The ratios of one mixture: [main and free, requests], by the number of a request.

    main, lookup: indices of its drafters; index: its own index.
    """

    def __init__(self, spec: DrafterSpec, index: int, names: Sequence[str]) -> None:
        assert spec.mixture is not None
        self.name, self.index = spec.name, index
        self.main, self.lookup = names.index(spec.mixture.main), names.index(spec.mixture.free)
        self._ratios = np.ones((2, 256))

    def find_lookup_rows(
        self, rule: _RuleArrays | None, requests: IntArray, match: IntArray
    ) -> NDArray[np.bool_]:
        """Returns [rows], whether each would use the lookup's proposal."""
        if rule is None:
            return np.zeros(len(match), dtype=bool)
        largest_request = int(requests.max(initial=0))
        if largest_request >= self._ratios.shape[1]:
            new_ratios = np.ones((2, largest_request + 1))
            self._ratios = np.concatenate((self._ratios, new_ratios), axis=1)
        ratios = self._ratios[:, requests]
        expected = rule.lookup_expected[np.minimum(match, len(rule.lookup_expected) - 1)]
        uses_lookup: NDArray[np.bool_] = (
            ratios[_LOOKUP_SIDE] * expected > ratios[_MAIN_SIDE] * rule.main_expected
        )
        return uses_lookup

    def update_main_ratios(
        self, rule: _RuleArrays, requests: IntArray, outcomes: "_ProposalOutcomes"
    ) -> None:
        """Updates the main drafter's ratios with the outcome of its proposals."""
        self._update_ratios(
            _MAIN_SIDE, requests, outcomes, np.full(len(requests), rule.main_expected), rule.weight
        )

    def update_lookup_ratios(
        self, rule: _RuleArrays, requests: IntArray, match: IntArray, outcomes: "_ProposalOutcomes"
    ) -> None:
        """Updates the lookup's ratios of the rows in which it found a match."""
        expected = rule.lookup_expected[np.minimum(match, len(rule.lookup_expected) - 1)]
        rows = expected > 0
        self._update_ratios(
            _LOOKUP_SIDE, requests[rows], outcomes.select_rows(rows), expected[rows], rule.weight
        )

    def _update_ratios(
        self,
        side: int,
        requests: IntArray,
        outcomes: "_ProposalOutcomes",
        expected: NDArray[np.float64],
        weight: float,
    ) -> None:
        ratio = self._ratios[side, requests]
        value = np.where(
            outcomes.is_exact,
            outcomes.would_accept,
            np.maximum(outcomes.accepted + 1, ratio * expected),
        )
        new_ratio = ratio + weight * (value / np.maximum(expected, _MIN_EXPECTED) - ratio)
        self._ratios[side, requests] = new_ratio


@dataclass(frozen=True, slots=True)
class _ProposalOutcomes:
    """Describes what a step shows about a drafter's proposals, row by row.

    would_accept: tokens that would be accepted.  accepted: accepted tokens of the verified drafts.
    is_exact: whether the step shows `would_accept`; otherwise it shows only that `would_accept`
    exceeds `accepted`.
    """

    would_accept: IntArray
    accepted: IntArray
    is_exact: NDArray[np.bool_]

    @classmethod
    def from_step(
        cls, would_accept: IntArray, accepted: IntArray, gamma: int
    ) -> "_ProposalOutcomes":
        """Makes the outcome of a step with draft length `gamma`."""
        return cls(would_accept, accepted, (would_accept <= accepted) | (accepted + 1 >= gamma))

    def select_rows(self, rows: NDArray[np.bool_]) -> "_ProposalOutcomes":
        """Selects some of the rows."""
        return _ProposalOutcomes(self.would_accept[rows], self.accepted[rows], self.is_exact[rows])

    def proposal_counts(self, name: str, gamma: int, match: IntArray) -> Iterator[ProposalCounts]:
        """Counts the rows of each match length."""
        exact = _pair_counts(match[self.is_exact], self.would_accept[self.is_exact], gamma + 1)
        lower_bounds = self.accepted[~self.is_exact] + 1
        censored = _pair_counts(match[~self.is_exact], lower_bounds, gamma)
        zeros = [0] * gamma
        for length in range(max(len(exact), len(censored))):
            exact_counts = exact[length] if length < len(exact) else [0, *zeros]
            censored_counts = censored[length] if length < len(censored) else zeros
            if any(exact_counts) or any(censored_counts):
                censored_counts = censored_counts if any(censored_counts) else []
                yield ProposalCounts(name, length, tuple(exact_counts), tuple(censored_counts))


def _pair_counts(rows: IntArray, columns: IntArray, width: int) -> list[list[int]]:
    """Returns how often each pair occurs: [row, column]."""
    counts = np.bincount(rows * width + columns)
    padded = np.zeros((-(-len(counts) // width)) * width, dtype=np.int64)
    padded[: len(counts)] = counts
    table: list[list[int]] = padded.reshape(-1, width).tolist()
    return table


class RowDrafterChooser:
    """Runs steps of an engine that has mixtures, row by row.  One object per run.

    accepted: for each drafter except mixtures, [positions] drafts that would be accepted.  matches:
    [positions] tokens of the lookup's match, 0 where it finds none.
    """

    def __init__(
        self,
        drafters: Sequence[DrafterSpec],
        accepted: Sequence[NDArray[np.uint8]],
        matches: NDArray[np.uint8],
    ) -> None:
        names = [d.name for d in drafters]
        self._names = names
        self._accepted, self._matches = accepted, matches
        self._mixtures = [
            _Mixture(d, i, names) for i, d in enumerate(drafters) if d.mixture is not None
        ]
        self._rules: Sequence[MixtureRule] = ()
        self._rule_by_arm: dict[tuple[str, int], _RuleArrays] = {}

    def choose_rows(
        self,
        running: int,
        gamma: int,
        cursor: IntArray,
        requests: IntArray,
        rules: Sequence[MixtureRule],
        stale_keep_factors: NDArray[np.float64] | None = None,
    ) -> tuple[IntArray, RowEvidence]:
        """Drafts gamma > 0 tokens: ([rows] drafts that are accepted, what the step shows).

        running: the drafter or mixture.  requests: [rows] numbers of the requests, none twice.
        stale_keep_factors: [rows] 0 where the drafts of a model are rejected in this step.
        """
        if rules is not self._rules:
            self._rules = rules
            self._rule_by_arm = {
                (r.arm.drafter, r.arm.gamma): _RuleArrays.from_plan(r) for r in rules
            }
        match = self._matches[cursor].astype(np.int64)
        active_mixtures = [m for m in self._mixtures if running in {m.index, m.main, m.lookup}]
        accepted_by_drafter = {
            d: self._accepted_drafts(
                d,
                gamma,
                cursor,
                None if d in {m.lookup for m in active_mixtures} else stale_keep_factors,
            )
            for d in {d for m in active_mixtures for d in (m.main, m.lookup)} or {running}
        }
        uses_lookup = {
            m.index: m.find_lookup_rows(self._rule_by_arm.get((m.name, gamma)), requests, match)
            for m in active_mixtures
        }
        for m in active_mixtures:
            accepted_by_drafter[m.index] = np.where(
                uses_lookup[m.index], accepted_by_drafter[m.lookup], accepted_by_drafter[m.main]
            )
        accepted = accepted_by_drafter[running]
        proposals: dict[tuple[str, int], ProposalCounts] = {}
        no_match = np.zeros_like(match)
        for m in active_mixtures:
            rule = self._rule_by_arm.get((m.name, gamma))
            lookup_outcomes = _ProposalOutcomes.from_step(
                accepted_by_drafter[m.lookup], accepted, gamma
            )
            parts = [lookup_outcomes.proposal_counts(self._names[m.lookup], gamma, match)]
            if rule is not None:
                m.update_lookup_ratios(rule, requests, match, lookup_outcomes)
            if running != m.lookup:
                main_outcomes = _ProposalOutcomes.from_step(
                    accepted_by_drafter[m.main], accepted, gamma
                )
                parts.append(main_outcomes.proposal_counts(self._names[m.main], gamma, no_match))
                if rule is not None:
                    m.update_main_ratios(rule, requests, main_outcomes)
            if running == m.main:
                mixture_outcomes = _ProposalOutcomes.from_step(
                    accepted_by_drafter[m.index], accepted, gamma
                )
                parts.append(mixture_outcomes.proposal_counts(m.name, gamma, no_match))
            proposals.update({(p.drafter, p.match_length): p for counts in parts for p in counts})
        groups = self._groups(running, gamma, accepted, uses_lookup.get(running))
        return accepted, RowEvidence(groups, tuple(proposals.values()))

    def _accepted_drafts(
        self,
        drafter: int,
        gamma: int,
        cursor: IntArray,
        stale_keep_factors: NDArray[np.float64] | None,
    ) -> IntArray:
        accepted = np.minimum(self._accepted[drafter][cursor], gamma).astype(np.int64)
        return (
            accepted
            if stale_keep_factors is None
            else (accepted * stale_keep_factors).astype(np.int64)
        )

    def _groups(
        self, running: int, gamma: int, accepted: IntArray, uses_lookup: NDArray[np.bool_] | None
    ) -> tuple[RowGroup, ...]:
        """Returns the rows of a mixture's step by drafter; empty if all rows are alike."""
        mixture = next((m for m in self._mixtures if m.index == running), None)
        if mixture is None or uses_lookup is None:
            return ()
        return tuple(
            RowGroup(
                self._names[drafter],
                gamma,
                tuple(np.bincount(accepted[rows], minlength=gamma + 1).tolist()),
            )
            for drafter, rows in ((mixture.main, ~uses_lookup), (mixture.lookup, uses_lookup))
            if rows.any()
        )

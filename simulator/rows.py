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

Whole = NDArray[np.int64]
_MAIN, _FREE = 0, 1
# Lower bound of the expectation as a divisor.
_LEAST_EXPECTED = 1e-3


@dataclass(frozen=True, slots=True)
class _Rule:
    """Holds a rule as arrays.  free: [match length] from 0, the last one for all longer ones."""

    main: float
    free: NDArray[np.float64]
    weight: float

    @classmethod
    def of(cls, rule: MixtureRule) -> "_Rule":
        """Makes the arrays of a plan's rule; the lookup expects 0 below its least match."""
        free = np.array([0.0] * rule.least_match + list(rule.free_expected))
        return cls(rule.main_expected, free, rule.ratio_weight)


class _Mixture:
    """The ratios of one mixture: [main and free, requests], by the number of a request.

    main, free: indices of its drafters; index: its own index.
    """

    def __init__(self, spec: DrafterSpec, index: int, names: Sequence[str]) -> None:
        assert spec.mixture is not None
        self.name, self.index = spec.name, index
        self.main, self.free = names.index(spec.mixture.main), names.index(spec.mixture.free)
        self._ratios = np.ones((2, 256))

    def uses_free(self, rule: _Rule | None, requests: Whole, match: Whole) -> NDArray[np.bool_]:
        """Returns [rows], whether each would use the lookup's proposal."""
        if rule is None:
            return np.zeros(len(match), dtype=bool)
        most = int(requests.max(initial=0))
        if most >= self._ratios.shape[1]:
            more = np.ones((2, most + 1))
            self._ratios = np.concatenate((self._ratios, more), axis=1)
        ratios = self._ratios[:, requests]
        expected = rule.free[np.minimum(match, len(rule.free) - 1)]
        found: NDArray[np.bool_] = ratios[_FREE] * expected > ratios[_MAIN] * rule.main
        return found

    def learn_main(self, rule: _Rule, requests: Whole, seen: "_Seen") -> None:
        """Updates the main drafter's ratios with the outcome of its proposals."""
        self._learn(_MAIN, requests, seen, np.full(len(requests), rule.main), rule.weight)

    def learn_free(self, rule: _Rule, requests: Whole, match: Whole, seen: "_Seen") -> None:
        """Updates the lookup's ratios of the rows in which it found a match."""
        expected = rule.free[np.minimum(match, len(rule.free) - 1)]
        rows = expected > 0
        self._learn(_FREE, requests[rows], seen.of(rows), expected[rows], rule.weight)

    def _learn(
        self,
        side: int,
        requests: Whole,
        seen: "_Seen",
        expected: NDArray[np.float64],
        weight: float,
    ) -> None:
        ratio = self._ratios[side, requests]
        value = np.where(seen.known, seen.would, np.maximum(seen.accepted + 1, ratio * expected))
        moved = ratio + weight * (value / np.maximum(expected, _LEAST_EXPECTED) - ratio)
        self._ratios[side, requests] = moved


@dataclass(frozen=True, slots=True)
class _Seen:
    """Describes what a step shows about a drafter's proposals, row by row.

    would: tokens that would be accepted.  accepted: accepted tokens of the verified drafts.  known:
    whether the step shows `would`; otherwise it shows only that `would` exceeds `accepted`.
    """

    would: Whole
    accepted: Whole
    known: NDArray[np.bool_]

    @classmethod
    def in_step(cls, would: Whole, accepted: Whole, gamma: int) -> "_Seen":
        """Makes the outcome of a step with draft length `gamma`."""
        return cls(would, accepted, (would <= accepted) | (accepted + 1 >= gamma))

    def of(self, rows: NDArray[np.bool_]) -> "_Seen":
        """Selects some of the rows."""
        return _Seen(self.would[rows], self.accepted[rows], self.known[rows])

    def counts(self, name: str, gamma: int, match: Whole) -> Iterator[ProposalCounts]:
        """Counts the rows of each match length."""
        exact = _table(match[self.known], self.would[self.known], gamma + 1)
        least = self.accepted[~self.known] + 1
        censored = _table(match[~self.known], least, gamma)
        nothing = [0] * gamma
        for length in range(max(len(exact), len(censored))):
            sure = exact[length] if length < len(exact) else [0, *nothing]
            at_least = censored[length] if length < len(censored) else nothing
            if any(sure) or any(at_least):
                at_least = at_least if any(at_least) else []
                yield ProposalCounts(name, length, tuple(sure), tuple(at_least))


def _table(rows: Whole, columns: Whole, width: int) -> list[list[int]]:
    """Returns how often each pair occurs: [row, column]."""
    counts = np.bincount(rows * width + columns)
    whole = np.zeros((-(-len(counts) // width)) * width, dtype=np.int64)
    whole[: len(counts)] = counts
    found: list[list[int]] = whole.reshape(-1, width).tolist()
    return found


class RowChoice:
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
        self._by_arm: dict[tuple[str, int], _Rule] = {}

    def step(
        self,
        running: int,
        gamma: int,
        cursor: Whole,
        requests: Whole,
        rules: Sequence[MixtureRule],
        thinning: NDArray[np.float64] | None = None,
    ) -> tuple[Whole, RowEvidence]:
        """Drafts gamma > 0 tokens: ([rows] drafts that are accepted, what the step shows).

        running: the drafter or mixture.  requests: [rows] numbers of the requests, none twice.
        thinning: [rows] 0 where the drafts of a model are rejected in this step.
        """
        if rules is not self._rules:
            self._rules = rules
            self._by_arm = {(r.arm.drafter, r.arm.gamma): _Rule.of(r) for r in rules}
        match = self._matches[cursor].astype(np.int64)
        mine = [m for m in self._mixtures if running in {m.index, m.main, m.free}]
        would = {
            d: self._would(d, gamma, cursor, None if d in {m.free for m in mine} else thinning)
            for d in {d for m in mine for d in (m.main, m.free)} or {running}
        }
        uses = {
            m.index: m.uses_free(self._by_arm.get((m.name, gamma)), requests, match) for m in mine
        }
        for m in mine:
            would[m.index] = np.where(uses[m.index], would[m.free], would[m.main])
        accepted = would[running]
        shown: dict[tuple[str, int], ProposalCounts] = {}
        nowhere = np.zeros_like(match)
        for m in mine:
            rule = self._by_arm.get((m.name, gamma))
            free = _Seen.in_step(would[m.free], accepted, gamma)
            parts = [free.counts(self._names[m.free], gamma, match)]
            if rule is not None:
                m.learn_free(rule, requests, match, free)
            if running != m.free:
                main = _Seen.in_step(would[m.main], accepted, gamma)
                parts.append(main.counts(self._names[m.main], gamma, nowhere))
                if rule is not None:
                    m.learn_main(rule, requests, main)
            if running == m.main:
                whole = _Seen.in_step(would[m.index], accepted, gamma)
                parts.append(whole.counts(m.name, gamma, nowhere))
            shown.update({(p.drafter, p.match_length): p for part in parts for p in part})
        groups = self._groups(running, gamma, accepted, uses.get(running))
        return accepted, RowEvidence(groups, tuple(shown.values()))

    def _would(
        self, drafter: int, gamma: int, cursor: Whole, thinning: NDArray[np.float64] | None
    ) -> Whole:
        found = np.minimum(self._accepted[drafter][cursor], gamma).astype(np.int64)
        return found if thinning is None else (found * thinning).astype(np.int64)

    def _groups(
        self, running: int, gamma: int, accepted: Whole, uses: NDArray[np.bool_] | None
    ) -> tuple[RowGroup, ...]:
        """Returns the rows of a mixture's step by drafter; empty if all rows are alike."""
        mixture = next((m for m in self._mixtures if m.index == running), None)
        if mixture is None or uses is None:
            return ()
        return tuple(
            RowGroup(
                self._names[drafter],
                gamma,
                tuple(np.bincount(accepted[rows], minlength=gamma + 1).tolist()),
            )
            for drafter, rows in ((mixture.main, ~uses), (mixture.free, uses))
            if rows.any()
        )

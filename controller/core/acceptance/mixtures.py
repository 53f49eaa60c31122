"""Estimates a lookup's acceptance by match length, which is the basis of a mixture's rule.

A mixture uses one of two drafters in each row: its main drafter, or a free one, which looks up the
newest tokens in the request's own text.  A longer match indicates a longer copy, so the lookup's
acceptance is estimated separately for each match length, from all rows with a match, whether or not
the step used the proposal.  The rule has two parts:

    free_expected[m] = E[accepted | gamma] of a lookup that matched m tokens
    main_expected    = E[accepted | gamma] of the main drafter

The engine keeps a request's deviation from these averages in two running means (see proto
`MixtureRule`), because it observes each row, and these estimates do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.core.acceptance.estimator import AcceptanceCurve, AcceptanceEstimator
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.plan import MixtureRule
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

# Match lengths that are estimated separately; longer ones count as the last.
LEAST_MATCH, LONGEST_MATCH = 2, 5
# Weight of a step in the engine's running means of a request.
_RATIO_WEIGHT = 0.1
# Rules that differ by less than this share count as equal and need no new plan.
_SAME = 0.04
# Weight of a step in the averages that explain a mixture's usage.
_USE_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class MixtureUse:
    """Describes the recent usage of a mixture.

    free_share: share of rows that used the free drafter.  gained: accepted tokens of such a row
    beyond those of the main drafter's proposal.  It is an upper bound, since a step does not always
    show how many tokens of a proposal would have been accepted.
    """

    free_share: float
    gained: float


@recorded("mixture_estimator", "_by_length _used _free_rows _gained _seen")
class MixtureEstimator:
    """Owns the estimates of one mixture.  `fold` changes it; `rules` and `use` read it.

    longest: the longest draft length of its free drafter.
    """

    def __init__(self, mixture: DrafterSpec, longest: int, settings: PlannerSettings) -> None:
        assert mixture.mixture is not None
        self._spec, self._of, self._longest = mixture, mixture.mixture, longest
        self._by_length = [
            AcceptanceEstimator(max(longest, 1), settings)
            for _ in range(LEAST_MATCH, LONGEST_MATCH + 1)
        ]
        # Running means over steps: rows of all groups, rows that used the free drafter, and the
        # tokens gained by these.
        self._used = self._free_rows = self._gained = 0.0
        self._seen = False

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        for estimator in self._by_length:
            estimator.use_settings(settings)

    def fold(self, report: StepReport) -> None:
        """Adds a step's proposals and their usage."""
        seen: set[int] = set()
        for part in report.proposals:
            if part.drafter == self._of.free and part.match_length >= LEAST_MATCH:
                index = min(part.match_length, LONGEST_MATCH) - LEAST_MATCH
                self._by_length[index].fold_aside(part.accepted_counts, part.censored_counts)
                seen.add(index)
        for index, estimator in enumerate(self._by_length):
            if index not in seen:
                estimator.pass_by()
        # Without groups all rows were alike, and the report does not name their drafter.
        if report.drafter == self._spec.name and report.groups:
            self._count(report)

    def _count(self, report: StepReport) -> None:
        free_rows = free_tokens = main_used = 0
        for group in report.groups:
            tokens = sum(k * n for k, n in enumerate(group.accepted_counts))
            if group.drafter == self._of.free:
                free_rows += sum(group.accepted_counts)
                free_tokens += tokens
            else:
                main_used += tokens
        main_all = sum(
            sum(k * n for k, n in enumerate(part.accepted_counts))
            + sum(k * n for k, n in enumerate(part.censored_counts))
            for part in report.proposals
            if part.drafter == self._of.main
        )
        gained = free_tokens - (main_all - main_used) if main_all else 0
        weight = _USE_WEIGHT if self._seen else 1.0
        self._seen = True
        self._used += weight * (report.batch_size - self._used)
        self._free_rows += weight * (free_rows - self._free_rows)
        self._gained += weight * (gained - self._gained)

    def use(self) -> MixtureUse | None:
        """Returns the recent usage; None if the mixture has not run."""
        if not self._seen:
            return None
        rows = max(self._free_rows, 1e-9)
        share = self._free_rows / max(self._used, 1e-9)
        return MixtureUse(share, self._gained / rows if self._free_rows > 0 else 0.0)

    def rules(self, curves: Mapping[str, AcceptanceCurve]) -> tuple[MixtureRule, ...]:
        """Returns the rule of each draft length.  curves: of all traffic, by drafter."""
        main, free = curves[self._of.main], curves[self._of.free]
        lengths = [estimator.curve(free) for estimator in self._by_length]
        return tuple(
            MixtureRule(
                Arm(self._spec.name, gamma),
                main.expected[gamma],
                tuple(curve.expected[min(gamma, self._longest)] for curve in lengths),
                LEAST_MATCH,
                _RATIO_WEIGHT,
            )
            for gamma in self._spec.gammas
            if gamma
        )


@recorded("mixtures", "_each")
class Mixtures:
    """Owns the estimates of all mixtures of an engine, by name.  `fold` changes it."""

    def __init__(self, drafters: Sequence[DrafterSpec], settings: PlannerSettings) -> None:
        longest = {d.name: d.gammas[-1] for d in drafters}
        self._each = {
            d.name: MixtureEstimator(d, longest[d.mixture.free], settings)
            for d in drafters
            if d.mixture is not None
        }

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        for mixture in self._each.values():
            mixture.use_settings(settings)

    def fold(self, report: StepReport) -> None:
        """Adds a step's proposals and their usage."""
        for mixture in self._each.values():
            mixture.fold(report)

    def uses(self) -> dict[str, MixtureUse]:
        """Returns the recent usage of each mixture that has run."""
        uses = {name: mixture.use() for name, mixture in self._each.items()}
        return {name: use for name, use in uses.items() if use is not None}

    def rules(
        self, curves: Mapping[str, AcceptanceCurve], before: tuple[MixtureRule, ...]
    ) -> tuple[MixtureRule, ...]:
        """Returns the rules of all mixtures; returns `before` if the rules are nearly the same.

        curves: of all traffic, by drafter.
        """
        rules = tuple(rule for mixture in self._each.values() for rule in mixture.rules(curves))
        return before if _are_same(before, rules) else rules


def _are_same(a: Sequence[MixtureRule], b: Sequence[MixtureRule]) -> bool:
    """Returns whether two sets of rules are so similar that no new plan is needed."""
    return len(a) == len(b) and all(
        one.arm == other.arm and abs(x - y) <= _SAME * max(x, y)
        for one, other in zip(a, b, strict=True)
        for x, y in zip(
            (one.main_expected, *one.free_expected),
            (other.main_expected, *other.free_expected),
            strict=True,
        )
    )

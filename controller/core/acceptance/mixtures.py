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
MIN_MATCH_LENGTH, MAX_MATCH_LENGTH = 2, 5


@dataclass(frozen=True, slots=True)
class MixtureUsage:
    """Describes the recent usage of a mixture.

    free_share: share of rows that used the free drafter.  gained: accepted tokens of such a row
    beyond those of the main drafter's proposal.  It is an upper bound, since a step does not always
    show how many tokens of a proposal would have been accepted.
    """

    free_share: float
    gained: float


@recorded(
    "mixture_estimator",
    by_length="_by_match_length",
    used="_mean_rows",
    free_rows="_mean_free_rows",
    gained="_mean_gained_tokens",
    seen="_has_run",
)
class MixtureEstimator:
    """Owns the estimates of one mixture.  `observe` changes it; `rules` and `usage` read it.

    free_gamma_max: the longest draft length of its free drafter.
    """

    def __init__(
        self, mixture: DrafterSpec, free_gamma_max: int, settings: PlannerSettings
    ) -> None:
        assert mixture.mixture is not None
        self._spec, self._parts, self._free_gamma_max = mixture, mixture.mixture, free_gamma_max
        self._settings = settings
        self._by_match_length = [
            AcceptanceEstimator(max(free_gamma_max, 1), settings)
            for _ in range(MIN_MATCH_LENGTH, MAX_MATCH_LENGTH + 1)
        ]
        # Running means over steps: rows of all groups, rows that used the free drafter, and the
        # tokens gained by these.
        self._mean_rows = self._mean_free_rows = self._mean_gained_tokens = 0.0
        self._has_run = False

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        for estimator in self._by_match_length:
            estimator.use_settings(settings)

    def observe(self, report: StepReport) -> None:
        """Adds a step's proposals and their usage."""
        observed_indices: set[int] = set()
        for part in report.proposals:
            if part.drafter == self._parts.free and part.match_length >= MIN_MATCH_LENGTH:
                index = min(part.match_length, MAX_MATCH_LENGTH) - MIN_MATCH_LENGTH
                self._by_match_length[index].observe_unused_proposals(
                    part.accepted_counts, part.censored_counts
                )
                observed_indices.add(index)
        for index, estimator in enumerate(self._by_match_length):
            if index not in observed_indices:
                estimator.observe_idle_step()
        # Without groups all rows were alike, and the report does not name their drafter.
        if report.drafter == self._spec.name and report.groups:
            self._count_usage(report)

    def _count_usage(self, report: StepReport) -> None:
        free_rows = free_tokens = main_used_tokens = 0
        for group in report.groups:
            tokens = sum(k * n for k, n in enumerate(group.accepted_counts))
            if group.drafter == self._parts.free:
                free_rows += sum(group.accepted_counts)
                free_tokens += tokens
            else:
                main_used_tokens += tokens
        main_proposed_tokens = sum(
            sum(k * n for k, n in enumerate(part.accepted_counts))
            + sum(k * n for k, n in enumerate(part.censored_counts))
            for part in report.proposals
            if part.drafter == self._parts.main
        )
        gained_tokens = (
            free_tokens - (main_proposed_tokens - main_used_tokens) if main_proposed_tokens else 0
        )
        weight = self._settings.usage_weight if self._has_run else 1.0
        self._has_run = True
        self._mean_rows += weight * (report.batch_size - self._mean_rows)
        self._mean_free_rows += weight * (free_rows - self._mean_free_rows)
        self._mean_gained_tokens += weight * (gained_tokens - self._mean_gained_tokens)

    def usage(self) -> MixtureUsage | None:
        """Returns the recent usage; None if the mixture has not run."""
        if not self._has_run:
            return None
        rows = max(self._mean_free_rows, 1e-9)
        free_share = self._mean_free_rows / max(self._mean_rows, 1e-9)
        return MixtureUsage(
            free_share, self._mean_gained_tokens / rows if self._mean_free_rows > 0 else 0.0
        )

    def rules(self, curves: Mapping[str, AcceptanceCurve]) -> tuple[MixtureRule, ...]:
        """Returns the rule of each draft length.  curves: of all traffic, by drafter."""
        main_curve, free_curve = curves[self._parts.main], curves[self._parts.free]
        curves_by_length = [estimator.curve(free_curve) for estimator in self._by_match_length]
        return tuple(
            MixtureRule(
                Arm(self._spec.name, gamma),
                main_curve.expected_accepted[gamma],
                tuple(
                    curve.expected_accepted[min(gamma, self._free_gamma_max)]
                    for curve in curves_by_length
                ),
                MIN_MATCH_LENGTH,
                self._settings.rule_ratio_weight,
            )
            for gamma in self._spec.gammas
            if gamma
        )


@recorded("mixtures", each="_estimators")
class MixtureEstimators:
    """Owns the estimates of all mixtures of an engine, by name.  `observe` changes it."""

    def __init__(self, drafters: Sequence[DrafterSpec], settings: PlannerSettings) -> None:
        self._settings = settings
        gamma_max_by_drafter = {d.name: d.gammas[-1] for d in drafters}
        self._estimators = {
            d.name: MixtureEstimator(d, gamma_max_by_drafter[d.mixture.free], settings)
            for d in drafters
            if d.mixture is not None
        }

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the evidence."""
        self._settings = settings
        for estimator in self._estimators.values():
            estimator.use_settings(settings)

    def observe(self, report: StepReport) -> None:
        """Adds a step's proposals and their usage."""
        for estimator in self._estimators.values():
            estimator.observe(report)

    def usages(self) -> dict[str, MixtureUsage]:
        """Returns the recent usage of each mixture that has run."""
        usages = {name: estimator.usage() for name, estimator in self._estimators.items()}
        return {name: usage for name, usage in usages.items() if usage is not None}

    def rules(
        self, curves: Mapping[str, AcceptanceCurve], previous_rules: tuple[MixtureRule, ...]
    ) -> tuple[MixtureRule, ...]:
        """Returns the rules of all mixtures, or `previous_rules` if they are nearly the same.

        curves: of all traffic, by drafter.
        """
        if not self._estimators:
            return ()
        rules = tuple(
            rule for estimator in self._estimators.values() for rule in estimator.rules(curves)
        )
        tolerance = self._settings.rule_tolerance
        return previous_rules if _are_same(previous_rules, rules, tolerance) else rules


def _are_same(a: Sequence[MixtureRule], b: Sequence[MixtureRule], tolerance: float) -> bool:
    """Returns whether two sets of rules differ by no more than a relative tolerance."""
    return len(a) == len(b) and all(
        rule_a.arm == rule_b.arm and abs(x - y) <= tolerance * max(x, y)
        for rule_a, rule_b in zip(a, b, strict=True)
        for x, y in zip(
            (rule_a.main_expected, *rule_a.free_expected),
            (rule_b.main_expected, *rule_b.free_expected),
            strict=True,
        )
    )

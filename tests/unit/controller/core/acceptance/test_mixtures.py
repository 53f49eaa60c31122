"""How a mixture was used lately, from reports as shims of any kind send them."""

from controller.core.acceptance.mixtures import MixtureEstimator, MixtureUsage
from controller.core.engine_spec import DrafterSpec, Mixture
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import ProposalCounts, RowGroup, StepReport

MIXTURE = DrafterSpec("mtp+ngram", DrafterKind.MIXTURE, (3,), mixture=Mixture("mtp", "ngram"))


def estimator() -> MixtureEstimator:
    return MixtureEstimator(MIXTURE, 3, PlannerSettings())


def report(*groups: RowGroup, width: int = 3) -> StepReport:
    proposals = (
        ProposalCounts("mtp", 0, (2, 0, 0, 2)),
        ProposalCounts("ngram", 4, (1, *[0] * (width - 1), 1)),
    )
    return StepReport(
        1, 4, 400, "mtp+ngram", 3, (1, 1, 0, 2), 0.01, groups=groups, proposals=proposals
    )


GROUPS = RowGroup("mtp", 3, (1, 0, 0, 1)), RowGroup("ngram", 3, (0, 1, 0, 1))


def test_it_gained_what_its_main_drafter_would_not_have_given():
    used = estimator()
    used.observe(report(*GROUPS))
    # In its rows the lookup gave 1 and 3, and the main drafter would have given 0 and 3.
    assert used.usage() == MixtureUsage(0.5, 0.5)


def test_a_step_without_groups_says_nothing_of_how_it_was_used():
    """An engine whose rows were all alike may leave them out."""
    used = estimator()
    used.observe(report())
    assert used.usage() is None
    used.observe(report(*GROUPS))
    used.observe(report())
    assert used.usage() == MixtureUsage(0.5, 0.5)


def test_a_proposal_that_is_longer_than_any_draft_is_no_error():
    used = estimator()
    used.observe(report(*GROUPS, width=20))
    assert used.usage() is not None

"""A drafter that never works is noticed; hard traffic, short answers and lookups are not."""

import dataclasses
import random

import pytest

from controller.core.checks.engine_checks import EngineChecks, EngineWarning, WarningKind
from controller.core.engine_spec import DrafterSpec, EngineSpec
from controller.core.model_shapes import DrafterKind
from controller.core.step_report import ProposalCounts, RowGroup, StepFlags, StepReport
from controller.wire.explanations import explain
from tests.support.accepted_counts import accepted_counts
from tests.support.virtual_engine import engine_spec, make_engine

WRONG = [0.05, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]
RIGHT = [0.7] * 7
# As far as a right drafter was seen to fall on text that is hard to predict.
HARD = [0.3] * 7


def rejected(checks: EngineChecks) -> list[EngineWarning]:
    return [it for it in checks.warnings() if it.kind is WarningKind.NO_ACCEPTANCE]


class Steps:
    """Feeds steps of gamma 3 to the checks of one engine."""

    def __init__(self, spec: EngineSpec | None = None) -> None:
        self.checks = EngineChecks(spec or engine_spec())
        self.step = 0
        self.random = random.Random(3)

    def feed(self, steps: int, acceptance: list[float], batch_size: int = 4, gamma: int = 3):
        for _ in range(steps):
            counts = accepted_counts(self.random, batch_size, gamma, acceptance)
            self.put(counts)

    def put(self, counts: list[int], measured: bool = False, **more):
        self.step += 1
        report = StepReport(
            self.step, sum(counts), 512 * sum(counts), more.pop("drafter", "mtp"),
            len(counts) - 1, tuple(counts), 0.01, **more,
        )  # fmt: skip
        self.checks.observe(report, is_measurement=measured)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("profile_error", [1.0, None])
def test_a_drafter_that_never_works_is_noticed_although_the_controller_turns_it_off(
    batch_size, profile_error
):
    engine = make_engine(profile_error)
    # With one sequence and a profile it drafts rarely from the first hundred steps on.
    engine.run(4000 if batch_size == 1 else 1000, batch_size, WRONG)
    (warning,) = rejected(engine.core.checks)
    assert warning.drafter == "mtp"
    assert "1.0" in warning.found
    assert "EAGLE-3 under EAGLE" in warning.advice
    assert "eagle_aux_hidden_state_layer_ids" in warning.advice
    assert explain(engine.core).warnings == engine.core.checks.warnings()


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_drafter_on_hard_traffic_is_not(batch_size):
    for seed in range(2):
        engine = make_engine(seed=seed)
        for _ in range(6):
            engine.run(100, batch_size, HARD)
            assert not engine.core.checks.warnings()


def test_a_drafter_of_115_tokens_that_is_verified_rarely_is_hardly_ever_suspected():
    accused = 0
    for seed in range(60):
        steps = Steps()
        steps.random = random.Random(seed)
        was_flagged = False
        for _ in range(200):
            steps.feed(1, [0.13] * 3, batch_size=1)
            steps.feed(10, [], batch_size=1, gamma=0)
            was_flagged = was_flagged or bool(rejected(steps.checks))
        accused += was_flagged
    assert accused <= 2


def test_a_drafter_that_has_worked_is_never_suspected_again():
    steps = Steps()
    steps.feed(60, RIGHT)
    for _ in range(20):
        steps.feed(100, [0.0] * 3)
        assert not rejected(steps.checks)


def test_the_warning_needs_hundreds_of_steps_and_ends_when_the_drafter_works():
    steps = Steps()
    steps.feed(190, WRONG)
    assert not rejected(steps.checks)
    steps.feed(200, WRONG)
    assert rejected(steps.checks)
    steps.feed(60, RIGHT)
    assert not rejected(steps.checks)
    steps.feed(4000, WRONG)
    assert not rejected(steps.checks)


def test_steps_without_drafts_are_no_evidence():
    steps = Steps()
    steps.feed(20, [0.0] * 3, batch_size=1)
    steps.feed(2000, [], gamma=0)
    assert not rejected(steps.checks)


def test_answers_of_three_tokens_are_no_rejections():
    steps = Steps()
    for number in range(600):
        # Of the rows that are not cut, one in ten is rejected at once: the rest end first.
        steps.put(
            [4, 0, 0, 0] if number % 10 == 0 else [0, 0, 0, 4],
            groups=(
                RowGroup("mtp", 3, (4, 0, 0, 0)) if number % 10 == 0
                else RowGroup("mtp", 3, (0, 0, 0, 4)),
            ),
        )  # fmt: skip
    assert not rejected(steps.checks)
    cut = Steps()
    for _ in range(600):
        # Cut after one draft (accepted): the group is narrower than the step's one drafted row.
        rows = (RowGroup("mtp", 1, (0, 7)), RowGroup("mtp", 3, (1, 0, 0, 0)))
        cut.put([1, 7, 0, 0], groups=rows)
    # Seven of eight accept their first token, and what is behind it is not known.
    assert not rejected(cut.checks)


def test_rows_that_must_not_be_drafted_for_are_no_rejections():
    steps = Steps()
    for number in range(600):
        accepted = number % 2
        drafted = (1 - accepted, 0, 0, accepted)
        rows = (RowGroup("", 0, (15,)), RowGroup("mtp", 3, drafted))
        steps.put([15 + drafted[0], 0, 0, drafted[3]], groups=rows)
    assert not rejected(steps.checks)


def test_a_lookup_without_matches_is_right():
    lookup = DrafterSpec("lookup", DrafterKind.NGRAM, (0, 3))
    spec = dataclasses.replace(engine_spec(), drafters=(*engine_spec().drafters, lookup))
    steps = Steps(spec)
    for _ in range(600):
        steps.put([4, 0, 0, 0], drafter="lookup")
    assert not rejected(steps.checks)


def test_what_an_idle_drafter_would_have_given_counts():
    lookup = DrafterSpec("lookup", DrafterKind.NGRAM, (0, 3))
    spec = dataclasses.replace(engine_spec(), drafters=(*engine_spec().drafters, lookup))
    shown = {
        "nothing": ProposalCounts("mtp", 0, (4, 0, 0, 0)),
        "all": ProposalCounts("mtp", 0, (0, 0, 0, 4)),
    }
    conclusions = {}
    for name, proposals in shown.items():
        steps = Steps(spec)
        for _ in range(300):
            steps.put([4, 0, 0, 0], drafter="lookup", proposals=(proposals,))
        conclusions[name] = len(rejected(steps.checks))
    assert conclusions == {"nothing": 1, "all": 0}


def test_a_measurements_load_says_nothing_about_the_drafter():
    steps = Steps()
    for _ in range(600):
        steps.put([4, 0, 0, 0], measured=True)
    assert not rejected(steps.checks)


def test_other_weights_are_given_another_chance():
    steps = Steps()
    steps.feed(300, WRONG)
    assert rejected(steps.checks)
    steps.put([4, 0, 0, 0], flags=StepFlags(drafter_reset=True))
    assert not rejected(steps.checks)
    steps.feed(300, WRONG)
    assert rejected(steps.checks)


def test_the_next_session_of_the_same_engine_knows_what_has_worked():
    worked, wrong = Steps(), Steps()
    worked.feed(60, RIGHT)
    wrong.feed(300, WRONG)
    assert rejected(wrong.checks)
    for before, warns in ((worked, False), (wrong, True)):
        after = Steps()
        after.checks.continue_from(before.checks)
        after.feed(300, WRONG)
        assert bool(rejected(after.checks)) is warns
    # Another version of the engine has to show it again.
    spec = engine_spec()
    newer = dataclasses.replace(
        spec, fingerprint=dataclasses.replace(spec.fingerprint, engine_version="2")
    )
    after = Steps(newer)
    after.checks.continue_from(worked.checks)
    after.feed(300, WRONG)
    assert rejected(after.checks)

"""Descriptions of engines that contradict themselves are refused where they are made."""

import pytest

from controller.core.engine_spec import (
    Arm,
    Capabilities,
    DrafterSpec,
    EngineSpec,
    Fingerprint,
    Mixture,
)
from controller.core.errors import InvalidEngineError, UnknownArmError
from controller.core.model_shapes import DrafterKind


@pytest.mark.parametrize("gammas", [(), (1, 0), (0, 0), (-1, 2), (0, 65)])
def test_draft_lengths_out_of_order_or_range_are_refused(gammas):
    with pytest.raises(InvalidEngineError):
        DrafterSpec("mtp", DrafterKind.MTP, gammas)


@pytest.mark.parametrize("engine_id", ["", "a" * 129, "a b", "a/b", "ä", "x\n"])
def test_an_engine_id_is_a_plain_name(engine_id):
    drafter = DrafterSpec("mtp", DrafterKind.MTP, (0, 1))
    with pytest.raises(InvalidEngineError, match="engine_id"):
        EngineSpec(engine_id, Fingerprint("t"), (drafter,), 8)


@pytest.mark.parametrize("name", ["", "a" * 65, "a\nb", "\x1b[31mred", "\u202eabc"])
def test_a_drafters_name_is_short_and_printable(name):
    with pytest.raises(InvalidEngineError, match="printable"):
        DrafterSpec(name, DrafterKind.MTP, (0, 1))


def test_drafters_are_needed_and_unique():
    drafter = DrafterSpec("mtp", DrafterKind.MTP, (0, 1))
    with pytest.raises(InvalidEngineError, match="at least one is needed"):
        EngineSpec("e", Fingerprint("t"), (), 8)
    with pytest.raises(InvalidEngineError, match="not unique"):
        EngineSpec("e", Fingerprint("t"), (drafter, drafter), 8)


@pytest.mark.parametrize("sizes", [(0, 1), (2, 1), (1, 1)])
def test_captured_batch_sizes_ascend_from_one(sizes):
    drafter = DrafterSpec("mtp", DrafterKind.MTP, (0, 1))
    with pytest.raises(InvalidEngineError, match="graph_batch_sizes"):
        EngineSpec("e", Fingerprint("t", graph_batch_sizes=sizes), (drafter,), 8)


def test_the_number_of_drafters_is_bounded():
    drafters = tuple(DrafterSpec(f"d{i}", DrafterKind.MTP, (0, 1)) for i in range(17))
    with pytest.raises(InvalidEngineError, match="17 drafters"):
        EngineSpec("e", Fingerprint("t"), drafters, 8)


def test_the_number_of_draft_lengths_over_all_drafters_is_bounded():
    drafters = tuple(DrafterSpec(f"d{i}", DrafterKind.MTP, tuple(range(65))) for i in range(4))
    with pytest.raises(InvalidEngineError, match="260 draft lengths are listed"):
        EngineSpec("e", Fingerprint("m"), drafters, 8)


def test_an_arm_must_have_been_introduced():
    drafter = DrafterSpec("mtp", DrafterKind.MTP, (0, 1, 3))
    spec = EngineSpec("e", Fingerprint("t"), (drafter,), 8)
    spec.require_arm(Arm("mtp", 3))
    with pytest.raises(UnknownArmError, match="gamma 2 is out of range"):
        spec.require_arm(Arm("mtp", 2))
    with pytest.raises(UnknownArmError, match="unknown drafter 'dflash'"):
        spec.require_arm(Arm("dflash", 1))


MTP = DrafterSpec("mtp", DrafterKind.MTP, (0, 1, 3))
NGRAM = DrafterSpec("ngram", DrafterKind.NGRAM, (1, 3))


def mixture(main="mtp", free="ngram", gammas=(1, 3)):
    return DrafterSpec("both", DrafterKind.MIXTURE, gammas, mixture=Mixture(main, free))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (mixture(main="ngram"), "are not two of the drafters"),
        (mixture(main="other"), "are not two of the drafters"),
        (mixture(main="both"), "are not two of the drafters"),
        (mixture(main="ngram", free="mtp"), "its free drafter 'mtp' is mtp, not ngram"),
        (mixture(gammas=(1, 2)), "'mtp' has not prepared its draft lengths \\[2\\]"),
    ],
)
def test_a_mixture_is_of_two_drafters_that_the_engine_has(part, message):
    with pytest.raises(InvalidEngineError, match=message):
        EngineSpec("e", Fingerprint("t"), (MTP, NGRAM, part), 8)


def test_only_a_mixture_names_two_drafters():
    with pytest.raises(InvalidEngineError, match="must name its two drafters"):
        DrafterSpec("both", DrafterKind.MIXTURE, (1,))
    with pytest.raises(InvalidEngineError, match="must name its two drafters"):
        DrafterSpec("mtp", DrafterKind.MTP, (1,), mixture=Mixture("a", "b"))


def test_a_draft_is_verified_in_its_step_or_in_the_next_one():
    with pytest.raises(InvalidEngineError, match="draft_lag 2"):
        EngineSpec("e", Fingerprint("t"), (MTP,), 8, Capabilities(draft_lag=2))


def test_the_learner_is_the_first_drafter_unless_another_is_named():
    block = DrafterSpec("block", DrafterKind.DFLASH, (3,))
    first, second = (
        EngineSpec("e", Fingerprint("t"), (MTP, block), 8, Capabilities(learner=name))
        for name in ("", "block")
    )
    assert (first.learner, second.learner) == (MTP, block)


@pytest.mark.parametrize("name", ["other", "ngram", "x" * 5000])
def test_a_learner_without_weights_is_refused(name: str):
    lookup = DrafterSpec("ngram", DrafterKind.NGRAM, (3,))
    with pytest.raises(InvalidEngineError, match="not one of the drafters with weights") as refused:
        EngineSpec("e", Fingerprint("t"), (MTP, lookup), 8, Capabilities(learner=name))
    assert refused.value.field_path == "capabilities.learner"
    assert len(str(refused.value)) < 300

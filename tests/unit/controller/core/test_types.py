"""Values that cannot be true are refused where they are made."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.errors import InvalidEngineError, InvalidReportError, UnknownArmError
from controller.core.model_shapes import DrafterKind
from controller.core.types import (
    Arm,
    ClassCounts,
    DrafterSpec,
    EngineSpec,
    Fingerprint,
    Plan,
    PlanRow,
    Reason,
    Regime,
    StepReport,
)

GOOD: dict[str, Any] = {
    "step": 1,
    "batch_size": 4,
    "kv_tokens": 100,
    "drafter": "mtp",
    "gamma": 2,
    "accepted_counts": (1, 1, 2),
    "step_seconds": 0.01,
}


def classes(*parts):
    return tuple(ClassCounts(label, counts) for label, counts in parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted_counts": (1, 1, 1)}, "do not sum to batch_size 4"),
        ({"accepted_counts": (1, 3)}, "gamma 2 needs 3"),
        ({"accepted_counts": (-1, 3, 2)}, "do not sum"),
        ({"gamma": 65, "accepted_counts": (4,) + (0,) * 65}, "gamma 65 is outside"),
        ({"gamma": -1, "accepted_counts": ()}, "gamma -1 is outside"),
        ({"batch_size": 0, "accepted_counts": (0, 0, 0)}, "batch_size 0 is outside"),
        ({"step_seconds": math.nan}, "not a positive time"),
        ({"step_seconds": -0.01}, "not a positive time"),
        ({"step_seconds": 0.0}, "not a positive time"),
        ({"step_seconds": math.inf}, "not a positive time"),
        ({"kv_tokens": -1}, "is negative"),
        ({"classes": classes(("a", (1, 0, 0)), ("a", (0, 1, 0)))}, "2 classes, unique ones"),
        ({"classes": classes(*((f"c{i}", (1, 0, 0)) for i in range(65)))}, "65 classes"),
        ({"classes": classes(("", (1, 0, 0)))}, "printable characters"),
        ({"classes": classes(("x" * 65, (1, 0, 0)))}, "printable characters"),
        ({"classes": classes(("a\nb", (1, 0, 0)))}, "printable characters"),
        ({"classes": classes(("a", (1, 0)))}, "are not 3 counts"),
        ({"classes": classes(("a", (0, 0, 0)))}, "at least one sequence"),
        ({"classes": classes(("a", (-1, 1, 0)))}, "are not 3 counts"),
        ({"classes": classes(("a", (1, 0, 2)), ("b", (1, 0, 0)))}, "more sequences than"),
        ({"confidences": (0.5,)}, "are not 2 probabilities"),
        ({"confidences": (0.5, 1.1)}, "are not 2 probabilities"),
        ({"confidences": (0.5, math.nan)}, "are not 2 probabilities"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_says_why(change, message):
    with pytest.raises(InvalidReportError, match=message):
        StepReport(**(GOOD | change))


def test_a_good_report_is_taken():
    assert StepReport(**GOOD).arm == Arm("mtp", 2)


def test_classes_may_leave_sequences_out():
    parts = classes(("code", (0, 0, 2)), ("chat", (1, 0, 0)))
    assert StepReport(**GOOD, classes=parts, confidences=(0.9, 0.0)).classes == parts


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
    spec.require(Arm("mtp", 3))
    with pytest.raises(UnknownArmError, match="gamma 2 is out of range"):
        spec.require(Arm("mtp", 2))
    with pytest.raises(UnknownArmError, match="unknown drafter 'dflash'"):
        spec.require(Arm("dflash", 1))


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=12, unique=True),
    st.integers(1, 1000),
)
def test_a_batch_is_served_by_the_smallest_row_that_holds_it(sizes, batch):
    rows = tuple(PlanRow(b, Arm("mtp", 0), Reason.EXPLOIT) for b in sorted(sizes))
    row = Plan(1, rows, Regime(), 5.0, Reason.EXPLOIT, "").row_for(batch)
    fitting = [b for b in sizes if b >= batch]
    assert row.max_batch_size == (min(fitting) if fitting else max(sizes))

"""What requests ask for is read once, bounded, and reported as counts only."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from controller.core.step_report import MAX_REPORT_CLASSES
from engine_shim.common.row_groups import MAX_CLASSES, add_classes, add_remaining_groups
from engine_shim.sglang.request_options import RequestClasses, RequestOptions
from speculation.v1.engine_pb2 import ClassCounts, RowGroup, StepReport
from tests.support.step_reports import class_counts, group


def request(params: object = None, **sampling: Any) -> SimpleNamespace:
    defaults = {
        "json_schema": None, "structural_tag": None, "regex": None, "ebnf": None,
        "temperature": 1.0, "top_k": -1, "custom_params": params,
    }  # fmt: skip
    return SimpleNamespace(sampling_params=SimpleNamespace(**(defaults | sampling)))


def test_nothing_is_looked_for_before_a_request_has_asked():
    wishes = RequestOptions(RequestClasses(("grammar", "label")), 9)
    plain = [request(), request({"other": 1})]
    wishes.before_prefill(plain)
    assert not wishes.has_any
    assert wishes.undrafted_and_labels(plain) == ([], [])


@pytest.mark.parametrize("value", [True, None, 0, "false", "off", []])
def test_only_false_keeps_a_request_from_being_drafted_for(value):
    wishes = RequestOptions(RequestClasses(()), 9)
    wishes.before_prefill([request({"speculation": value})])
    assert not wishes.has_any
    wishes.before_prefill([other := request({"speculation": False})])
    assert wishes.undrafted_and_labels([request(), other]) == ([1], [])


@pytest.mark.parametrize("params", [None, [], "speculation", 3, {"speculation_class": 5}])
def test_parameters_of_another_shape_are_no_wish(params):
    wishes = RequestOptions(RequestClasses(("label",)), 9)
    wishes.before_prefill([request(params)])
    assert not wishes.has_any


def test_a_row_without_drafts_says_nothing_of_its_class():
    wishes = RequestOptions(RequestClasses(("temperature",)), 9)
    asked = [request({"speculation": False}), request()]
    wishes.before_prefill(asked)
    assert wishes.undrafted_and_labels(asked) == ([0], ["", "warm"])


def test_requests_whose_prompts_another_server_has_read_are_met_in_their_first_step():
    wishes = RequestOptions(RequestClasses(()), 9, is_decode_server=True)
    assert wishes.undrafted_and_labels([request(), request({"speculation": False})]) == ([1], [])


def test_drafts_of_a_row_are_taken_out_and_its_own_token_stays():
    wishes = RequestOptions(RequestClasses(()), 9)
    verify = SimpleNamespace(
        draft_token=torch.arange(6), retrieve_next_token=torch.zeros((2, 3), dtype=torch.int64)
    )
    wishes.withhold_drafts(verify, [1])
    assert verify.draft_token.tolist() == [0, 1, 2, 3, 9, 9]


def groups_with(undrafted: list[int], accepted: list[int], *mixed: RowGroup) -> list[RowGroup]:
    report = StepReport(groups=mixed)
    add_remaining_groups(report, undrafted, (), "eagle3", accepted, 2)
    return list(report.groups)


def test_rows_that_are_not_drafted_for_are_a_group_beside_the_others():
    assert groups_with([1], [2, 0, 1]) == [group("eagle3", [0, 1, 1]), group("", [1])]
    mixed = (group("eagle3", [0, 1, 0]), group("ngram", [0, 0, 1]))
    assert groups_with([0], [0, 1, 2], *mixed) == [*mixed, group("", [1])]
    assert groups_with([0, 1], [0, 0]) == [group("", [2])]


def classes_of(labels: list[str], accepted: list[int]) -> list[ClassCounts]:
    report = StepReport()
    add_classes(report, labels, accepted, {}, 2)
    return list(report.classes)


def test_classes_count_the_rows_that_have_one():
    assert classes_of(["a", "", "b", "a"], [2, 1, 0, 0]) == [
        class_counts("a", [1, 0, 1]),
        class_counts("b", [1, 0, 0]),
    ]


def test_a_report_has_no_more_classes_than_it_may():
    labels = [f"class {number % 80}" for number in range(160)]
    class_entries = classes_of(labels, [0] * 160)
    assert len(class_entries) == MAX_CLASSES == MAX_REPORT_CLASSES
    assert {entry.accepted_counts[0] for entry in class_entries} == {2}

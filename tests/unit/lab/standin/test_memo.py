"""A memo must never answer for inputs it was not made from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel._memo import Memo
from torch import Tensor

Snapshot = tuple[list[int], list[int] | None, tuple[int, ...]]


class Counted:
    """What the inputs looked like when the memo had to ask, and how often it asked."""

    def __init__(self) -> None:
        self.memo: Memo[Snapshot] = Memo()
        self.calls = 0

    def get(self, table: Tensor, small: Tensor | None, options: tuple[int, ...] = ()) -> Snapshot:
        def make() -> Snapshot:
            self.calls += 1
            return table.tolist(), None if small is None else small.tolist(), options

        answer: Snapshot = self.memo.get(table, (small,), options, make)
        return answer


def test_equal_inputs_are_answered_without_asking_again() -> None:
    counted, table = Counted(), torch.arange(3)
    first = counted.get(table, torch.tensor([1]), (2,))
    assert counted.get(table, torch.tensor([1]), (2,)) is first
    assert counted.calls == 1


CHANGES = {
    "table in place": lambda table, small: table.add_(1),
    "table through a view": lambda table, small: table[1:].fill_(7),
    "table by index": lambda table, small: table.__setitem__(torch.tensor([0]), 9),
    "table detached": lambda table, small: table.detach().fill_(8),
    "input in place": lambda table, small: small.add_(1),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_is_seen(change: str, mode: type[torch.no_grad]) -> None:
    counted, table, small = Counted(), torch.arange(3), torch.tensor([1, 2])
    counted.get(table, small)
    with mode():
        CHANGES[change](table, small)
        assert counted.get(table, small) == (table.tolist(), small.tolist(), ())
    assert counted.calls == 2


def test_another_table_with_the_same_numbers_is_another_table() -> None:
    counted, small = Counted(), torch.tensor([1])
    counted.get(torch.arange(3), small)
    counted.get(torch.arange(3), small)
    assert counted.calls == 2


def test_inputs_of_other_shape_dtype_or_absence_are_not_the_same() -> None:
    counted, table = Counted(), torch.arange(3)
    for small in (
        torch.tensor([1]),
        torch.tensor([1, 1]),
        torch.tensor([1], dtype=torch.int32),
        None,
    ):
        counted.get(table, small)
    assert counted.calls == 4


def test_a_table_without_version_counter_is_never_remembered() -> None:
    counted = Counted()
    with torch.inference_mode():
        table, small = torch.arange(3), torch.tensor([1])
        counted.get(table, small)
        table.add_(1)
        assert counted.get(table, small)[0] == [1, 2, 3]
        counted.get(table, small)
    assert counted.calls == 3


@given(st.lists(st.sampled_from([*CHANGES, "nothing", "option"]), max_size=12))
def test_any_run_of_changes_gives_the_values_of_the_moment(changes: list[str]) -> None:
    counted, table, small, option = Counted(), torch.arange(3), torch.tensor([1, 2]), 0
    for change in changes:
        if change == "option":
            option += 1
        elif change != "nothing":
            CHANGES[change](table, small)
        assert counted.get(table, small, (option,)) == (table.tolist(), small.tolist(), (option,))

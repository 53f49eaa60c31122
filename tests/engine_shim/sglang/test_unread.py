"""Steps that DFlash has not read yet."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.sglang.unread import LazyReader, Rows, UnreadSteps


def step(first_slot: int, requests: int = 2, width: int = 3) -> Rows:
    rows = requests * width
    hidden = torch.arange(rows, dtype=torch.float32)[:, None] + 100 * first_slot
    slots = torch.arange(first_slot, first_slot + rows)
    return Rows(hidden, slots, slots + 1000)


def test_what_was_not_accepted_goes_nowhere() -> None:
    unread = UnreadSteps(8)
    unread.add(["a", "b"], step(10), torch.tensor([1, 3]))
    unread.add(["a", "b"], step(20, width=1), torch.tensor([1, 1]))
    rows = unread.take()
    assert rows.slots.tolist() == [10, 0, 0, 13, 14, 15, 20, 21]
    assert rows.positions.tolist() == [*range(1010, 1016), 1020, 1021]
    assert rows.hidden[:, 0].tolist() == [*range(1000, 1006), 2000, 2001]
    assert len(unread) == 0


def test_they_are_due_once_a_request_has_come_or_gone() -> None:
    unread = UnreadSteps(8)
    assert not unread.are_due(["a"])
    unread.add(["a", "b"], step(10), torch.tensor([1, 1]))
    assert not unread.are_due(["a", "b"])
    assert unread.are_due(["a"])
    assert unread.are_due(["a", "b", "c"])
    unread.take()
    assert not unread.are_due(["a"])


def test_they_are_due_when_they_fill_the_buffer() -> None:
    by_steps, by_bytes = UnreadSteps(2), UnreadSteps(100, max_bytes=40)
    for unread in (by_steps, by_bytes):
        unread.add(["a", "b"], step(10), torch.tensor([1, 1]))
        assert not unread.are_due(["a", "b"])
        unread.add(["a", "b"], step(20), torch.tensor([1, 1]))
        assert unread.are_due(["a", "b"])
        unread.take()
        assert not unread.are_due(["a", "b"])


class Block:
    """Records what it is asked to read."""

    def __init__(self) -> None:
        self.live: list[int] = []
        self.bulk: list[list[int]] = []

    def rows_of(self, batch: Any, hidden: torch.Tensor, _: Any) -> Rows:
        slots = torch.arange(batch.step * 10, batch.step * 10 + len(hidden))
        return Rows(hidden, slots, slots)

    def read_step(self, batch: Any, *_: Any) -> None:
        self.live.append(batch.step)

    def read(self, _: torch.Tensor, slots: torch.Tensor, __: torch.Tensor) -> None:
        self.bulk.append(slots.tolist())


class Drafter:
    """A lazy reader of such a block; `run` as the session goes through a decode step."""

    def __init__(self, keeps_steps: int = 3) -> None:
        self.reader, self.block = LazyReader(keeps_steps), Block()

    def run(self, step: int, names: str = "ab", *, drafts: bool = False) -> None:
        batch = SimpleNamespace(step=step, reqs=[SimpleNamespace(rid=name) for name in names])
        self.reader.before_step(self.block, batch, drafts=drafts)
        result = SimpleNamespace(accept_lens=torch.ones(len(names), dtype=torch.int64))
        hidden = torch.ones(len(names), 1)
        self.reader.after_step(self.block, batch, result, hidden, None, drafts=drafts)


def test_while_it_drafts_every_step_is_read_at_once() -> None:
    drafter = Drafter()
    for number in (1, 2):
        drafter.run(number, drafts=True)
    assert drafter.block.live == [1, 2]
    assert drafter.block.bulk == []


def test_before_it_drafts_it_reads_what_it_left() -> None:
    drafter = Drafter()
    drafter.run(1)
    drafter.run(2)
    assert drafter.block.bulk == []
    drafter.run(3, drafts=True)
    assert drafter.block.bulk == [[10, 11, 20, 21]]
    assert drafter.block.live == [3]


def test_a_full_buffer_is_read() -> None:
    drafter = Drafter()
    for number in range(1, 6):
        drafter.run(number)
    assert drafter.block.bulk == [[10, 11, 20, 21, 30, 31]]


@pytest.mark.parametrize("later", ["a", "abc", "ac"])
def test_all_is_read_before_a_slot_can_change_hands(later: str) -> None:
    drafter = Drafter()
    drafter.run(1)
    drafter.run(2, later)
    assert drafter.block.bulk == [[10, 11]]
    drafter.reader.before_prefill(drafter.block)
    assert drafter.block.bulk[1:] == [[20 + i for i in range(len(later))]]
    drafter.reader.before_prefill(drafter.block)
    assert len(drafter.block.bulk) == 2


def test_without_room_nothing_is_kept() -> None:
    drafter = Drafter(keeps_steps=0)
    drafter.run(1)
    assert drafter.block.live == [1]

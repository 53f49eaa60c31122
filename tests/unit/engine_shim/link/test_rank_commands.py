"""What rank 0 orders, all ranks carry out in the same step, once, and in order."""

import pickle
from functools import partial

import pytest

from engine_shim.link.rank_commands import RankCommandKind, RankCommands


def note(done: list[tuple[str, int]], name: str, value: int) -> None:
    done.append((name, value))


class Ranks:
    """Three ranks, and what each has done."""

    def __init__(self) -> None:
        self.orders = [RankCommands(has_other_ranks=True) for _ in range(3)]
        self.done: list[list[tuple[str, int]]] = [[] for _ in range(3)]
        for orders, done in zip(self.orders, self.done, strict=True):
            for kind in (RankCommandKind.READ, RankCommandKind.SERVE):
                orders.register(kind, partial(note, done, kind.name))

    def broadcast(self) -> None:
        sent = pickle.dumps(self.orders[0].outgoing_commands())
        for orders in self.orders:
            for order in pickle.loads(sent):
                orders.adopt(order)

    def is_open(self) -> bool:
        return self.orders[0].has_pending

    def step(self) -> None:
        for orders in self.orders:
            orders.execute_adopted()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_an_order_is_carried_out_by_all_in_the_step_after_the_broadcast(ranks: Ranks) -> None:
    ranks.orders[0].propose(RankCommandKind.READ, 3)
    ranks.step()
    assert ranks.done == [[], [], []]
    assert ranks.is_open()
    ranks.broadcast()
    assert ranks.is_open()
    ranks.step()
    assert ranks.done == [[("READ", 3)]] * 3
    assert not ranks.is_open()
    ranks.broadcast()
    ranks.step()
    assert ranks.done == [[("READ", 3)]] * 3


def test_orders_keep_their_order_and_arrive_once(ranks: Ranks) -> None:
    """A broadcast that was held back arrives after the next one was made."""
    first = ranks.orders[0]
    first.propose(RankCommandKind.READ, 1)
    lost = first.outgoing_commands()
    first.propose(RankCommandKind.SERVE, 1)
    assert first.outgoing_commands()[:1] == lost
    ranks.broadcast()
    for orders in ranks.orders:
        for order in lost:
            orders.adopt(order)
    ranks.step()
    assert ranks.done == [[("READ", 1), ("SERVE", 1)]] * 3


def test_a_lone_rank_carries_out_at_once() -> None:
    done: list[int] = []
    orders = RankCommands()
    orders.register(RankCommandKind.SERVE, done.append)
    orders.propose(RankCommandKind.SERVE, 7)
    assert done == [7]
    assert not orders.has_pending
    assert orders.outgoing_commands() == []

"""What the hooks around a step do where ranks have batches of their own."""

from types import SimpleNamespace

import pytest

from engine_shim.link.plan_follower import StepChoice
from engine_shim.sglang.api import attention_dp
from tests.unit.engine_shim.sglang.test_hooks import batch, chosen, session


class Adopted:
    """Chooses as many draft tokens as sequences it is asked for, and has one update to send."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def choose(self, sequences: int) -> StepChoice:
        self.asked.append(sequences)
        return chosen(sequences)

    def outgoing(self) -> list[str]:
        return ["update"]


@pytest.mark.parametrize("mode", ["decode", "idle"])
def test_with_data_parallel_attention_a_rank_chooses_for_the_largest_batch(mode: str) -> None:
    made = session(asleep=False)
    ran: list[StepChoice] = []
    made.ranks, made.attention_dp, made.sleep = Adopted(), True, None
    made.several = True
    made.policy = SimpleNamespace(run=ran.append)
    step = batch(mode)
    attention_dp.keep_sizes(None, step, SimpleNamespace(global_num_tokens=[1, 5, 2]), True)
    made.around_forward(lambda *_: SimpleNamespace(), None, step)
    assert made.ranks.asked == [5]
    assert [choice.gamma for choice in ran] == [5]


def test_an_idle_rank_chooses_nothing_while_others_prefill() -> None:
    made = session(asleep=False)
    made.ranks, made.several, made.attention_dp = Adopted(), True, True
    step = batch("idle")
    step.is_extend_in_batch = True
    made.around_forward(lambda *_: SimpleNamespace(), None, step)
    assert made.ranks.asked == []


def test_with_data_parallel_attention_updates_join_what_was_received() -> None:
    made = session(asleep=False)
    made.ranks, made.several, made.attention_dp = Adopted(), True, True
    # Their own group's broadcast would not reach the other ranks.
    assert made.own_requests(["abort"], None) == ["abort"]
    assert made.after_received(["request"], None) == ["request", "update"]
    assert made.after_received(["request"], None) == ["request"]
    # A rank that does not receive requests itself has nothing to add.
    made.own_requests([], None)
    assert made.after_received(None, None) is None
    made.attention_dp = False
    assert made.own_requests(["abort"], None) == ["abort", "update"]

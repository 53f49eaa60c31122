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

    def outgoing_updates(self) -> list[str]:
        return ["update"]


@pytest.mark.parametrize("mode", ["decode", "idle"])
def test_with_data_parallel_attention_a_rank_chooses_for_the_largest_batch(mode: str) -> None:
    hooks = session(asleep=False)
    ran: list[StepChoice] = []
    hooks.plan_sync, hooks.has_attention_dp, hooks.sleeping_drafter = Adopted(), True, None
    hooks.has_other_ranks = True
    hooks.policy = SimpleNamespace(set_choice=ran.append)
    step = batch(mode)
    attention_dp.store_rank_sizes(None, step, SimpleNamespace(global_num_tokens=[1, 5, 2]), True)
    hooks.around_forward(lambda *_: SimpleNamespace(), None, step)
    assert hooks.plan_sync.asked == [5]
    assert [choice.gamma for choice in ran] == [5]


def test_an_idle_rank_chooses_nothing_while_others_prefill() -> None:
    hooks = session(asleep=False)
    hooks.plan_sync, hooks.has_other_ranks, hooks.has_attention_dp = Adopted(), True, True
    step = batch("idle")
    step.is_extend_in_batch = True
    hooks.around_forward(lambda *_: SimpleNamespace(), None, step)
    assert hooks.plan_sync.asked == []


def test_with_data_parallel_attention_updates_join_what_was_received() -> None:
    hooks = session(asleep=False)
    hooks.plan_sync, hooks.has_other_ranks, hooks.has_attention_dp = Adopted(), True, True
    # Their own group's broadcast would not reach the other ranks.
    assert hooks.add_rank_updates(["abort"], None) == ["abort"]
    assert hooks.add_control_requests(["request"], None) == ["request", "update"]
    assert hooks.add_control_requests(["request"], None) == ["request"]
    # A rank that does not receive requests itself has nothing to add.
    hooks.add_rank_updates([], None)
    assert hooks.add_control_requests(None, None) is None
    hooks.has_attention_dp = False
    assert hooks.add_rank_updates(["abort"], None) == ["abort", "update"]

"""What waits is counted for each step, and a long queue seldom."""

from types import SimpleNamespace
from typing import Any

from engine_shim.common.waiting_prompts import WaitingPrompts
from engine_shim.sglang import step_reports as of_sglang
from engine_shim.vllm import step_reports as of_vllm


def test_a_queue_is_counted_as_it_changes_and_now_and_then():
    queue, counted = [3, 4], 0

    def tokens(request: int) -> int:
        nonlocal counted
        counted += 1
        return request

    waiting = WaitingPrompts(lambda: queue, tokens)
    assert [waiting.count() for _ in range(10)] == [7] * 10
    assert counted == 2
    queue.append(5)
    assert waiting.count() == 12
    queue[0] = 100  # of as many
    assert [waiting.count() for _ in range(64)][-1] == 109
    queue.clear()
    assert waiting.count() == 0


def test_a_long_queue_is_counted_seldom_also_while_it_changes():
    queue, counted = [1] * 640, 0

    def tokens(request: int) -> int:
        nonlocal counted
        counted += 1
        return request

    waiting = WaitingPrompts(lambda: queue, tokens)
    assert waiting.count() == 640
    for step in range(1, 101):
        queue.append(1)
        assert 640 + step - waiting.count() < 12
    assert counted < 100 * 80


def test_a_request_that_has_begun_to_answer_waits_for_no_first_pass():
    def make_request(output: int) -> Any:
        return SimpleNamespace(
            origin_input_ids=[1] * 9,
            output_ids=[1] * output,
            num_prompt_tokens=9,
            num_output_tokens=output,
        )

    for engine in (of_sglang, of_vllm):
        assert [engine.unread_prompt_tokens(make_request(output)) for output in (0, 2)] == [9, 0]

import queue
import time
from collections.abc import Mapping, Sequence

import pytest

from lab.gpu_check import comparison
from lab.gpu_check.comparison import ROUNDING, WRONG
from lab.gpu_check.shapes import Device
from lab.gpu_check.small_engines import arms
from lab.harness.load_generator import Answer, StreamRequest
from lab.harness.random_arms import RandomArms
from lab.harness.sidecar import Pin
from speculation.v1 import engine_pb2, service_pb2

ARMS = arms(Device.GPU)


def answer(*tokens: int, index: int = 4) -> Answer:
    return Answer(StreamRequest(index, "code", (1, 2), len(tokens)), tokens, 0, 0, 0.1)


def compared(
    expected: Answer, actual: Answer, best: Mapping[int, float]
) -> tuple[list[comparison.Difference], list[Sequence[int]]]:
    asked: list[Sequence[int]] = []

    def top_two(context: Sequence[int]) -> Mapping[int, float]:
        asked.append(context)
        return best

    return comparison.find_differences("exact", [expected], [actual], top_two, "dflash 3"), asked


def test_equal_tokens_are_no_difference_and_nothing_is_asked():
    assert compared(answer(5, 6), answer(5, 6), {}) == ([], [])


@pytest.mark.parametrize(
    ("best", "verdict"),
    [
        ({6: -0.7, 9: -0.7005}, ROUNDING),
        ({6: -0.7, 9: -0.702}, WRONG),
        ({6: -0.7, 8: -0.7005}, WRONG),  # a tie, but of another token
    ],
)
def test_a_difference_is_rounding_between_the_two_best_tokens_of_a_near_tie_only(
    best: dict[int, float], verdict: str
):
    (difference,), asked = compared(answer(5, 6, 7), answer(5, 9, 7), best)
    assert difference.verdict == verdict
    assert asked == [[1, 2, 5]]
    facts = (difference.prompt, difference.position, difference.expected, difference.actual)
    assert facts == (4, 1, 6, 9)
    assert "prompt 4, position 1: expected token 6, found 9" in difference.sentence()
    assert "dflash 3" in difference.sentence()


def test_an_answer_that_ends_early_is_wrong():
    (difference,), asked = compared(answer(5, 6), answer(5), {})
    assert (difference.verdict, difference.expected, difference.actual) == (WRONG, 6, -1)
    assert asked == []


def test_arms_are_drawn_with_a_seed_and_move_as_steps_are_reported():
    def moves(seed: int) -> list[tuple[str, int]]:
        requests: queue.SimpleQueue[service_pb2.MeasureRequest | None] = queue.SimpleQueue()
        pin = Pin(requests, "exact")
        drawn = []
        with RandomArms(pin, ARMS, seed):
            for _ in range(10):
                request = requests.get(timeout=10)
                assert request is not None
                drawn.append((request.drafter, request.gamma))
                pin.reports.append(engine_pb2.StepReport())
        return drawn

    assert moves(1) == moves(1)
    assert moves(1) != moves(2)


def test_arms_stay_while_no_step_is_reported():
    requests: queue.SimpleQueue[service_pb2.MeasureRequest | None] = queue.SimpleQueue()
    with RandomArms(Pin(requests, "exact"), ARMS, 1):
        requests.get(timeout=10)
        time.sleep(0.05)
    assert requests.empty()

from lab.gpu_check.parts.exact import count_differing
from lab.harness.load_generator import Answer, StreamRequest


def answer(*tokens: int) -> Answer:
    return Answer(StreamRequest(0, "code", (1,), len(tokens)), tokens, 0, 0, 0.1)


def test_an_answer_that_differs_anywhere_counts_once():
    expected = [answer(1, 2, 3), answer(4, 5, 6)]
    plays = [[answer(1, 9, 9), answer(4, 5, 6)], [answer(1, 2, 3), answer(4, 5, 6)]]
    assert count_differing(expected, plays) == {"answers": 4, "differing": 1}

import pytest

from lab.demo.exact import GAMMAS, Mismatch, build_stream, compare_answers, environment
from lab.harness.engines import Workplace
from lab.harness.load_generator import Answer
from lab.paced.engines import ADAPTIVE, OFF, STEERED, static_policy

POLICIES = (OFF, static_policy(2), ADAPTIVE, STEERED)


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path / "output", tmp_path / "scratch")


def test_only_the_steered_engine_knows_the_sidecar(place):
    for policy in POLICIES[:-1]:
        assert environment(policy, place) == {}
    steered = environment(STEERED, place)
    assert steered["SPECULATION_SIDECAR"] == place.address
    assert steered["SPECULATION_GAMMAS"] == ",".join(map(str, GAMMAS))


def test_the_first_token_of_each_answer_that_differs_is_named():
    requests = build_stream(3)[1].requests[:3]
    expected = [Answer(r, (7, 8, 9), 2, 1, 0.1) for r in requests]
    answers = [
        expected[0],
        Answer(requests[1], (7, 1, 2), 2, 1, 0.1),
        Answer(requests[2], (7, 8, 5), 2, 1, 0.1),
    ]
    play = compare_answers("steered", expected, answers, ("0",))
    assert play.mismatches == (
        Mismatch(requests[1].index, 1, 8, 1),
        Mismatch(requests[2].index, 2, 9, 5),
    )
    assert play.tokens == 9
    assert compare_answers("steered", expected, expected, ()).mismatches == ()

import pytest

from lab.cpu_engine.models.prompts import DOMAINS
from lab.demo.exact import GAMMAS, build_stream, environment, speculation_flags
from lab.harness.engines import Workplace
from lab.paced.engines import ADAPTIVE, OFF, STEERED, static

POLICIES = (OFF, static(2), ADAPTIVE, STEERED)


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path / "output", tmp_path / "scratch")


def test_off_knows_nothing_of_speculation():
    assert speculation_flags(OFF) == []


def test_static_has_one_draft_length_and_no_controller():
    flags = speculation_flags(static(5))
    assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "6"
    assert "--speculative-adaptive" not in flags


def test_sglang_s_own_controller_runs_with_its_defaults():
    flags = speculation_flags(ADAPTIVE)
    assert "--speculative-adaptive" in flags
    assert not [f for f in flags if f in {"--speculative-num-steps", "--speculative-eagle-topk"}]


def test_all_drafts_are_the_same():
    drafts = {
        flags[flags.index("--speculative-draft-model-path") + 1]
        for flags in map(speculation_flags, POLICIES[1:])
    }
    assert len(drafts) == 1


def test_only_the_steered_engine_knows_the_sidecar(place):
    for policy in POLICIES[:-1]:
        assert environment(policy, place) == {}
    steered = environment(STEERED, place)
    assert steered["SPECULATION_SIDECAR"] == place.address
    assert steered["SPECULATION_GAMMAS"] == ",".join(map(str, GAMMAS))


def test_the_prompts_are_of_every_domain_none_twice_and_the_same_for_a_seed():
    stream = build_stream(3)
    assert stream == build_stream(3)
    requests = [request for phase in stream for request in phase.requests]
    assert {request.domain for request in requests} == set(DOMAINS)
    assert len({request.prompt for request in requests}) == len(requests)
    assert [request.index for request in requests] == list(range(len(requests)))

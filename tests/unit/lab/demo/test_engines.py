import pytest

from lab.demo.engines import (
    ADAPTIVE,
    GAMMAS,
    OFF,
    STEERED,
    engine_command,
    engine_environment,
    speculation_flags,
    static,
)
from lab.harness.engines import Workplace

POLICIES = (OFF, static(2), ADAPTIVE, STEERED)


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path / "output", tmp_path / "scratch")


def test_off_knows_nothing_of_speculation():
    assert not [part for part in engine_command(OFF, 1) if "speculative" in part]


def test_static_has_one_draft_length_and_no_controller():
    flags = speculation_flags(static(5))
    assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "6"
    assert "--speculative-adaptive" not in flags


def test_sglang_s_own_controller_runs_with_its_defaults():
    flags = speculation_flags(ADAPTIVE)
    assert "--speculative-adaptive" in flags
    assert not [f for f in flags if f in {"--speculative-num-steps", "--speculative-eagle-topk"}]


def test_the_engines_differ_in_nothing_but_speculation():
    plain = engine_command(OFF, 1)
    for policy in POLICIES:
        assert engine_command(policy, 1) == [*plain, *speculation_flags(policy)]
    assert plain[plain.index("--dtype") + 1] == "float32"


def test_all_drafts_are_the_same():
    drafts = {
        flags[flags.index("--speculative-draft-model-path") + 1]
        for flags in map(speculation_flags, POLICIES[1:])
    }
    assert len(drafts) == 1


def test_only_the_steered_engine_knows_the_sidecar(place):
    for policy in POLICIES[:-1]:
        assert engine_environment(policy, place) == {}
    steered = engine_environment(STEERED, place)
    assert steered["SPECULATION_SIDECAR"] == place.address
    assert steered["SPECULATION_GAMMAS"] == ",".join(map(str, GAMMAS))

from pathlib import Path

from lab.paced.engines import ADAPTIVE, OFF, STEERED, speculation_flags, static_policy

DRAFT = Path("models/draft")
POLICIES = (OFF, static_policy(2), ADAPTIVE, STEERED)


def test_off_knows_nothing_of_speculation():
    assert speculation_flags(OFF, DRAFT) == []


def test_static_has_one_draft_length_and_no_controller():
    flags = speculation_flags(static_policy(5), DRAFT)
    assert flags[flags.index("--speculative-num-steps") + 1] == "5"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "6"
    assert "--speculative-adaptive" not in flags


def test_sglang_s_own_controller_runs_with_its_defaults():
    flags = speculation_flags(ADAPTIVE, DRAFT)
    assert "--speculative-adaptive" in flags
    assert not [f for f in flags if f in {"--speculative-num-steps", "--speculative-eagle-topk"}]


def test_all_drafts_are_the_same():
    drafts = {
        flags[flags.index("--speculative-draft-model-path") + 1]
        for flags in (speculation_flags(policy, DRAFT) for policy in POLICIES[1:])
    }
    assert len(drafts) == 1

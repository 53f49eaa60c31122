import pytest

from lab.gpu_check import small_engines
from lab.gpu_check.shapes import SCALES, Device
from lab.gpu_check.small_engines import (
    EXACT,
    EXACT_BFLOAT16,
    FIXED_BFLOAT16,
    NO_OVERLAP,
    PLAIN,
    PLAIN_BFLOAT16,
    SMALL_ENGINES,
)


def test_only_speculation_and_the_schedule_distinguish_the_command_lines():
    plain, ours, other = (
        small_engines.command(policy, 1, [], Device.GPU) for policy in (PLAIN, EXACT, NO_OVERLAP)
    )
    assert ours[: len(plain)] == plain
    assert "--speculative-algorithm" in ours[len(plain) :]
    assert other == [*ours, "--disable-overlap-schedule"]


def test_tf32_is_off_wherever_every_token_has_to_be_equal():
    for policy in SMALL_ENGINES:
        variables = small_engines.environment(policy, "unix:x", Device.GPU)
        is_off = variables.items() >= small_engines.NO_TF32.items()
        assert is_off is not small_engines.is_bfloat16(policy)


@pytest.mark.parametrize("policy", [PLAIN_BFLOAT16, FIXED_BFLOAT16])
def test_engines_without_the_plugin_have_no_sidecar(policy: str):
    assert "SPECULATION_SIDECAR" not in small_engines.environment(policy, "unix:x", Device.GPU)
    assert "SPECULATION_SIDECAR" in small_engines.environment(EXACT_BFLOAT16, "unix:x", Device.GPU)


def test_a_processor_is_given_no_options_of_cuda():
    assert "--attention-backend" not in small_engines.command(EXACT, 1, [], Device.CPU)
    emulated = small_engines.command(EXACT, 1, [], Device.EMULATED)
    gpu = small_engines.command(EXACT, 1, [], Device.GPU)
    sizes = gpu.index("--cuda-graph-bs-decode")
    assert emulated[3:sizes] == gpu[3:sizes]
    assert emulated[2] == "lab.cpu_engine.serve_emulated_cuda"


def test_both_schedules_are_compared_where_sglang_has_them():
    full, least = SCALES[0], SCALES[-1]
    assert small_engines.compared_policies(Device.GPU, full) == (EXACT, NO_OVERLAP)
    assert small_engines.compared_policies(Device.CPU, full) == (EXACT,)
    assert small_engines.compared_policies(Device.GPU, least) == (EXACT,)


def test_each_draft_length_has_its_graphs():
    """A verification and a reading pass for each length; further passes from two drafts on."""
    assert small_engines.count_chain_captures((0, 1, 2, 3), 4) == 4 * (2 + 2 + 3 + 3)


def test_every_drafter_and_every_mixture_is_among_the_arms():
    for device in Device:
        arms = small_engines.arms(device)
        assert len(arms) == len(set(arms))
        names = {"eagle3", "dflash", "ngram", "eagle3+ngram", "dflash+ngram"}
        assert {name for name, _ in arms} == names
        assert [arm for arm in arms if not arm[1]] == [("eagle3", 0)]

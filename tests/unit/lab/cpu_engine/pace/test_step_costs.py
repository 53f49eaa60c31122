"""A pace's prices: the published numbers, and what is derived from them."""

import pytest

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Arm, Fingerprint
from lab.cpu_engine.pace.step_costs import (
    LOOKUP,
    SWITCH_SECONDS,
    WARM_FACTOR,
    load_step_costs,
    padded_size,
)
from simulator import published
from simulator.errors import InvalidInputError

H100 = "h100-llama3.1-8b"
# arXiv 2601.11580: a pass, a token in it, a context token; the draft's; the step's overhead.
VERIFY = (5.88590713e-3, 2.10103129e-5, 3.92645679e-8)
EAGLE = (2.13526175e-3, 8.41429603e-7, 2.37768493e-9)
OVERHEAD = 1.20683946e-3
GAMMAS = (0, 1, 3, 7)


def h100_seconds(gamma, padded, kv_tokens):
    fixed, token, context = VERIFY
    seconds = fixed + token * padded * (gamma + 1) + context * kv_tokens + OVERHEAD
    if gamma:
        fixed, token, context = EAGLE
        seconds += fixed + token * gamma * padded + context * kv_tokens
    return seconds


@pytest.mark.parametrize(
    ("batch_size", "padded"),
    [(1, 1), (8, 8), (9, 10), (33, 40), (64, 64), (65, 72), (128, 128), (250, 256), (300, 300)],
)
def test_a_batch_is_padded_to_the_next_size_that_has_a_graph(batch_size, padded):
    assert padded_size(batch_size) == padded


@pytest.mark.parametrize("gamma", [*GAMMAS, 20])
@pytest.mark.parametrize(("batch_size", "padded"), [(1, 1), (9, 10), (64, 64), (65, 72)])
def test_the_h100s_formula_with_its_own_context(gamma, batch_size, padded):
    costs = load_step_costs(H100, (*GAMMAS, 20))
    kv_tokens = 777 * batch_size
    assert costs.decode_seconds(Arm("eagle3", gamma), batch_size, kv_tokens) == pytest.approx(
        h100_seconds(gamma, padded, kv_tokens), rel=1e-12
    )


@pytest.mark.parametrize(
    ("table", "batch_size", "gamma", "milliseconds"),
    [
        # gamma D_0 + T(B (gamma + 1)), all T(n) from Table 5; the context has no price.
        ("tide-llama3.3-70b", 4, 1, 0.843 + 16.36),
        ("tide-llama3.3-70b", 16, 3, 3 * 0.843 + 19.00),
        ("tide-gpt-oss-120b", 1, 0, 3.416),
        ("tide-qwen3-235b", 8, 7, 7 * 0.137 + 26.68),
    ],
)
def test_tides_table(table, batch_size, gamma, milliseconds):
    costs = load_step_costs(table, GAMMAS)
    for kv_tokens in (100, 100_000):
        seconds = costs.decode_seconds(Arm("eagle3", gamma), batch_size, kv_tokens)
        assert seconds == pytest.approx(milliseconds / 1e3, rel=1e-12)


@pytest.mark.parametrize("table", published.surface_names())
def test_both_drafters_of_every_table_have_all_lengths_and_longer_ones_cost_more(table):
    costs = load_step_costs(table, (0, 1, 7, 20))
    for name in {arm.drafter for arm in costs.surface.arms}:
        seconds = [
            costs.decode_seconds(Arm(name, gamma), 4, 2000) for gamma in (0, 1, 7, 20)
        ]  # fmt: skip
        assert seconds == sorted(seconds)
    assert costs.source


def test_without_draft_lengths_all_of_the_table_have_a_price():
    arms = load_step_costs("b200-qwen3.6-35b-a3b").surface.arms
    assert {arm.gamma for arm in arms if arm.drafter == "dflash"} == set(range(17))


def test_a_prefill_is_a_pass_without_context_and_its_tokens():
    costs = load_step_costs(H100, GAMMAS)
    fixed, token, _ = VERIFY
    assert costs.prefill_seconds(1000) == pytest.approx(fixed + OVERHEAD + token * 1001, rel=1e-12)


def test_catching_up_is_a_draft_and_its_tokens():
    costs = load_step_costs(H100, GAMMAS)
    context = 512
    kv_tokens = context
    draft = costs.decode_seconds(Arm("eagle3", 1), 1, kv_tokens) - costs.decode_seconds(
        Arm("eagle3", 0), 1, kv_tokens
    )
    reference = costs.surface.kv_reference
    draft += EAGLE[2] * (reference - context)
    assert costs.catch_up_seconds(40) == pytest.approx(draft + EAGLE[1] * 40, rel=1e-9)
    assert costs.catch_up_seconds(0) == 0.0


def test_a_drafter_kept_awake_makes_plain_decoding_dearer_and_no_draft():
    costs = load_step_costs(H100, GAMMAS)
    for gamma, factor in ((0, WARM_FACTOR), (3, 1.0)):
        asleep = costs.decode_seconds(Arm("eagle3", gamma), 8, 4000)
        warm = costs.decode_seconds(Arm("eagle3", gamma), 8, 4000, warm=True)
        assert warm == pytest.approx(asleep * factor, rel=1e-12)
    assert (costs.warm_factor, costs.switch_seconds) == (WARM_FACTOR, SWITCH_SECONDS)


def test_a_csv_is_read_as_it_stands(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "batch_size,num_draft_tokens,step_seconds\n1,1,0.010\n1,4,0.013\n8,1,0.011\n8,4,0.018\n"
    )
    costs = load_step_costs(str(path), (0, 3))
    assert costs.decode_seconds(Arm("eagle3", 3), 8, 9999) == pytest.approx(0.018)
    assert costs.decode_seconds(Arm("eagle3", 0), 1, 9999) == pytest.approx(0.010)
    assert costs.surface.catch_up_pass_seconds == pytest.approx(0.001)
    with pytest.raises(InvalidInputError, match=r"draft lengths \[0, 3\], and the engine \[1\]"):
        load_step_costs(str(path), (0, 1, 3))


def profile(drafters):
    """drafters: name -> the draft lengths of its cells, at B = 1 and 4."""
    cells = [
        ProfileCell(name, gamma, size, 0.01 + 0.001 * gamma + 0.0001 * size, 0.0, 20)
        for name, gammas in drafters.items()
        for gamma in gammas
        for size in (1, 4)
    ]
    names = tuple(DrafterIdentity(name) for name in drafters)
    return Profile(Fingerprint("model"), names, 512.0, 1e-8, tuple(cells))


def test_a_profile_whose_second_drafter_has_no_plain_decoding_of_its_own(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile({"eagle3": GAMMAS, "dflash": (1, 3)}).to_json())
    costs = load_step_costs(str(path), GAMMAS, 8)
    kv_tokens = 4 * 512
    for arm in (Arm("dflash", 3), Arm("eagle3", 3), Arm("dflash", 0), Arm("eagle3", 0)):
        expected = 0.01 + 0.001 * arm.gamma + 0.0001 * 4
        assert costs.decode_seconds(arm, 4, kv_tokens) == pytest.approx(expected)
    with pytest.raises(KeyError, match="has no price"):
        costs.decode_seconds(Arm("dflash", 7), 4, kv_tokens)


def test_a_block_drafter_lacks_none_of_the_lengths_that_its_block_fills(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile({"eagle3": GAMMAS, "dflash": (3,)}).to_json())
    with pytest.raises(InvalidInputError, match=r"table of dflash .* the engine \[1\] as well"):
        load_step_costs(str(path), GAMMAS)


def test_a_lookup_drafts_at_the_price_of_the_tables_n_gram_drafter() -> None:
    costs = load_step_costs(H100, GAMMAS, lookup=True)
    fixed, token, context = VERIFY
    verify = fixed + token * 8 * 4 + context * 4000
    # arXiv 2601.11580: the n-gram drafter takes this share of a verification.
    expected = 1.005875 * verify + OVERHEAD
    assert costs.decode_seconds(Arm(LOOKUP, 3), 8, 4000) == pytest.approx(expected, rel=1e-9)
    assert costs.decode_seconds(Arm("eagle3", 3), 8, 4000) == pytest.approx(
        h100_seconds(3, 8, 4000), rel=1e-12
    )


def test_a_lookup_beside_a_drafter_pays_its_launches_and_the_bytes_it_touches() -> None:
    costs = load_step_costs(H100, GAMMAS, lookup=True)
    searched = 64 * 8192
    moved = 104 * searched / 3.35e12
    assert costs.lookup_seconds(searched) == pytest.approx(33 * 5e-6 + moved)
    assert costs.lookup_seconds(0) == pytest.approx(33 * 5e-6)


def test_a_drafter_that_reads_along_pays_a_pass() -> None:
    costs = load_step_costs(H100, GAMMAS, lookup=True)
    assert costs.reading_seconds(12) == costs.catch_up_seconds(12) > costs.catch_up_seconds(1) > 0


def test_a_lookup_is_priced_only_where_one_runs() -> None:
    assert {arm.drafter for arm in load_step_costs(H100, GAMMAS).surface.arms} == {"eagle3"}
    with pytest.raises(InvalidInputError, match="has no n-gram drafter"):
        load_step_costs("tide-llama3.3-70b", GAMMAS, lookup=True)

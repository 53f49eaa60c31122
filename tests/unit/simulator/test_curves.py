import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import MAX_GAMMA
from simulator.acceptance_trace import AcceptanceTrace
from simulator.curves import IndependentCurves, conditional_curve, geometric_curve, parse_acceptance
from simulator.errors import InvalidInputError
from simulator.workload import AcceptanceSource

PROBABILITIES = st.lists(st.floats(0, 1), min_size=1, max_size=MAX_GAMMA)


def survival_of(curve):
    return np.cumprod(curve)


def drawn(source, requests=2000, seed=0):
    return source.pool(np.random.default_rng(seed), requests)


@pytest.mark.parametrize("curve", [[0.8, 0.7, 0.6], [0.5] * 8, [1.0, 0.0, 1.0], [0.0], [1.0] * 3])
def test_drawn_acceptance_follows_the_curve(curve):
    accepted = drawn(IndependentCurves("c", {"mtp": curve})).accepted["mtp"]
    survival = [np.mean(accepted >= k) for k in range(1, len(curve) + 1)]
    # Half a million positions: a standard error of 0.0007.
    assert survival == pytest.approx(survival_of(curve), abs=0.004)
    assert accepted.max() <= len(curve)


def test_positions_draw_apart_from_each_other_and_so_do_drafters():
    accepted = drawn(IndependentCurves("c", {"a": [0.5] * 4, "b": [0.5] * 4})).accepted
    a, b = (accepted[d].astype(float) for d in "ab")
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.01
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.01


@given(PROBABILITIES, st.integers(0, 5))
def test_a_pool_has_a_value_for_every_output_position(curve, seed):
    pool = drawn(IndependentCurves("c", {"mtp": curve}), 9, seed)
    assert pool.accepted["mtp"].dtype == np.uint8
    assert len(pool.accepted["mtp"]) == pool.output_tokens.sum()
    assert pool.offsets.tolist() == [0, *np.cumsum(pool.output_tokens)[:-1]]
    assert pool.labels.tolist() == [0] * 9
    assert pool.accepted["mtp"].max() <= len(curve)


def test_own_lengths_have_the_means_asked_for_and_equal_seeds_are_equal():
    source = IndependentCurves(
        "c", {"mtp": [0.5]}, output_tokens_mean=200, context_tokens_mean=1000
    )
    pool, again, other = drawn(source), drawn(source), drawn(source, seed=1)
    assert pool.output_tokens.mean() == pytest.approx(200, rel=0.05)
    assert pool.context_tokens.mean() == pytest.approx(1000, rel=0.05)
    assert np.array_equal(pool.accepted["mtp"], again.accepted["mtp"])
    assert not np.array_equal(pool.output_tokens, other.output_tokens)


def test_given_lengths_are_kept():
    outputs, contexts = np.array([3, 1], dtype=np.int64), np.array([7, 9], dtype=np.int64)
    pool = IndependentCurves("c", {"mtp": [1.0]}).pool(
        np.random.default_rng(0), 2, outputs, contexts
    )
    assert pool.output_tokens.tolist() == [3, 1]
    assert pool.context_tokens.tolist() == [7, 9]
    assert pool.accepted["mtp"].tolist() == [1, 1, 1, 1]


@given(PROBABILITIES)
def test_survival_and_conditional_acceptance_are_two_forms_of_one_curve(curve):
    survival = survival_of(curve)
    assert survival_of(conditional_curve(survival.tolist())) == pytest.approx(survival, abs=1e-12)


@pytest.mark.parametrize(
    ("survival", "message"),
    [
        ([0.5, 0.6], "position 2: 0.6 is more than 0.5"),
        ([1.1], r"must be in \[0, 1\]"),
        ([], "0 positions"),
    ],
)
def test_a_survival_curve_that_cannot_be_is_refused(survival, message):
    with pytest.raises(InvalidInputError, match=message):
        conditional_curve(survival)


@pytest.mark.parametrize(
    "curves",
    [{}, {"mtp": []}, {"mtp": [math.nan]}, {"mtp": [-0.1]}, {"mtp": [0.5, 2]},
     {"mtp": [0.5] * (MAX_GAMMA + 1)}, {"a": [0.5], "b": [math.inf]}],
)  # fmt: skip
def test_a_curve_that_cannot_be_is_refused(curves):
    with pytest.raises(InvalidInputError):
        IndependentCurves("c", curves)


@pytest.mark.parametrize("mean", [0, -1, math.nan, math.inf])
def test_a_mean_length_that_cannot_be_is_refused(mean):
    with pytest.raises(InvalidInputError, match=r"a mean of .* tokens must be in"):
        IndependentCurves("c", {"mtp": [0.5]}, output_tokens_mean=mean)


def test_curves_reach_a_worker_process():
    source = IndependentCurves("c", {"mtp": [0.5]})
    assert pickle.loads(pickle.dumps(source)) == source


@pytest.mark.parametrize(
    ("text", "curves"),
    [
        ("geometric:0.7", {"mtp": geometric_curve(0.7)}),
        (" positions:0.8, .7,0.6 ", {"mtp": [0.8, 0.7, 0.6]}),
        ("survival:.5,.25", {"mtp": [0.5, 0.5]}),
        ("survival:.5,0,0", {"mtp": [0.5, 0.0, 0.0]}),
        ("dflash=geometric:1", {"dflash": geometric_curve(1.0)}),
        ("mtp=positions:.8;dflash=survival:.4,.2", {"mtp": [0.8], "dflash": [0.4, 0.5]}),
    ],
)
def test_a_curve_is_named_in_short(text, curves):
    source: AcceptanceSource = parse_acceptance(text)
    assert isinstance(source, IndependentCurves)
    assert source.curves == curves
    assert source.drafters == tuple(curves)


def test_a_curve_without_a_name_is_that_of_all_drafters():
    assert parse_acceptance("geometric:0.5", ("a", "b")).drafters == ("a", "b")


@pytest.mark.parametrize(
    "text",
    ["", " ; ", "geometric:", "geometric:1.1", "geometric:nan", "geometric:.5,.5", "positions:",
     "positions:.5,,.5", "positions:.5;.6", "survival:.5,.6", "survival:-1", "geometric:0.7x",
     "a=geometric:.5;a=geometric:.6", "geometric:.5;geometric:.6", "geometrical:0.5",
     "positions:" + ",".join(["0.5"] * (MAX_GAMMA + 1)), "=geometric:.5"],
)  # fmt: skip
def test_a_short_name_that_means_nothing_is_refused(text):
    with pytest.raises(InvalidInputError):
        parse_acceptance(text)


@pytest.fixture
def files(tmp_path):
    request = '{"prompt_token_ids": [1, 2], "acc_eagle": {"acc_len": [3, 1]}}\n'
    (tmp_path / "chat.jsonl").write_text(request)
    (tmp_path / "code.jsonl").write_text(request * 2)
    (tmp_path / "rounds.csv").write_text("commits,category\n2,chat\n0,chat\n")
    return tmp_path


def test_a_file_is_a_bank_and_several_are_mixed_without_labels(files):
    one = parse_acceptance(str(files / "chat.jsonl"))
    both = parse_acceptance(f"{files}/chat.jsonl; {files}/code.jsonl")
    assert isinstance(one, AcceptanceTrace)
    assert one.drafters == ("eagle",)
    assert both.name == "chat+code"
    assert drawn(both, 3).label_names == ("",)
    assert drawn(both, 3).kind_count == 2


def test_rounds_are_of_the_drafter_that_is_named_or_of_the_only_one(files):
    path = files / "rounds.csv"
    assert parse_acceptance(f"dflash={path}").drafters == ("dflash",)
    assert parse_acceptance(str(path)).drafters == ("mtp",)
    assert parse_acceptance(f"a={path};b={path}").drafters == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{0}/chat.jsonl;geometric:0.5", "files cannot be combined with curves"),
        ("{0}/chat.jsonl;{0}/rounds.csv", "cannot be mixed"),
        ("{0}/rounds.csv;{0}/rounds.csv", "the drafter of these rounds"),
        ("a={0}/rounds.csv;a={0}/rounds.csv", "the drafter of these rounds"),
        ("mtp={0}/chat.jsonl", "names its drafters itself"),
        ("{0}/nothing.jsonl", "cannot be read"),
        ("{0}", "cannot be read"),
    ],
)
def test_files_that_do_not_go_together_are_refused(files, text, message):
    with pytest.raises(InvalidInputError, match=message):
        parse_acceptance(text.format(files))


def test_rounds_without_a_drafter_are_refused_where_there_are_two(files):
    with pytest.raises(InvalidInputError, match="the drafter of these rounds"):
        parse_acceptance(f"{files}/rounds.csv", ("a", "b"))

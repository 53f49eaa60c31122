import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import MAX_GAMMA
from simulator.acceptance_trace import AcceptanceTrace
from simulator.errors import InvalidInputError


def line(prompt=3, **drafters):
    keys = {f"acc_{name}": {"acc_len": values} for name, values in drafters.items()}
    return json.dumps({"id": "1", "prompt_token_ids": [9] * prompt, **keys}) + "\n"


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def pool(acceptance_trace, requests, seed=0, outputs=None, contexts=None):
    return acceptance_trace.pool(np.random.default_rng(seed), requests, outputs, contexts)


def sequences(request_pool, drafter):
    return [
        request_pool.accepted[drafter][start : start + n].tolist()
        for start, n in zip(request_pool.offsets, request_pool.output_tokens, strict=True)
    ]


def test_a_recorded_request_is_replayed_position_by_position(write):
    path = write("chat.jsonl", line(prompt=4, eagle=[3, 2, 1], ngram=[1, 21, 1]))
    request_pool = pool(AcceptanceTrace.load([path]), 1)
    assert sequences(request_pool, "eagle") == [[2, 1, 0]]
    assert sequences(request_pool, "ngram") == [[0, 20, 0]]
    assert request_pool.context_tokens.tolist() == [4]
    assert request_pool.label_names == ("",)


def test_positions_that_one_drafter_lacks_are_left_out(write):
    acceptance_trace = AcceptanceTrace.load(
        [write("a.jsonl", line(eagle=[3, 2, 1, 5], ngram=[1, 2]))]
    )
    assert sequences(pool(acceptance_trace, 1), "eagle") == [[2, 1]]


def test_a_record_shorter_than_the_output_starts_again_and_a_longer_one_is_cut(write):
    acceptance_trace = AcceptanceTrace.load([write("a.jsonl", line(eagle=[4, 3, 2]))])
    outputs, contexts = np.array([7, 2], dtype=np.int64), np.array([1, 2], dtype=np.int64)
    request_pool = pool(acceptance_trace, 2, 0, outputs, contexts)
    assert sequences(request_pool, "eagle") == [[3, 2, 1, 3, 2, 1, 3], [3, 2]]
    assert request_pool.context_tokens.tolist() == [1, 2]


def test_every_request_is_served_once_before_any_is_served_again(write):
    text = "".join(line(eagle=[k, k]) for k in range(1, 8))
    acceptance_trace = AcceptanceTrace.load([write("a.jsonl", text)])
    served = [values[0] for values in sequences(pool(acceptance_trace, 21), "eagle")]
    assert all(sorted(served[i : i + 7]) == list(range(7)) for i in (0, 7, 14))
    assert served != [
        values[0] for values in sequences(pool(acceptance_trace, 21, seed=1), "eagle")
    ]
    assert served == [values[0] for values in sequences(pool(acceptance_trace, 21), "eagle")]


def test_several_files_are_mixed_and_their_names_are_the_true_kinds(write):
    paths = [write("chat.jsonl", line(e=[1]) * 2), write("code.jsonl", line(e=[9]) * 6)]
    acceptance_trace = AcceptanceTrace.load(paths)
    request_pool = pool(acceptance_trace, 8)
    assert acceptance_trace.name == "chat+code"
    assert [9 * kind for kind in request_pool.request_kinds] == [
        v[0] + 1 if v[0] else 0 for v in sequences(request_pool, "e")
    ]
    assert np.bincount(request_pool.request_kinds).tolist() == [2, 6]
    assert request_pool.kind_count == 2


def test_an_engine_reports_the_kinds_of_traffic_only_where_it_is_asked_to(write):
    paths = [write("chat.jsonl", line(e=[1]) * 2), write("code.jsonl", line(e=[9]) * 6)]
    rounds = write("r.csv", "commits,category\n2,chat\n0,code\n")
    for load in (
        lambda **asked: AcceptanceTrace.load(paths, **asked),
        lambda **asked: AcceptanceTrace.load_rounds({"e": rounds}, **asked),
    ):
        silent, labelled = pool(load(), 8), pool(load(labelled=True), 8)
        assert silent.label_names == ("",)
        assert not silent.labels.any()
        assert labelled.label_names == ("chat", "code")
        assert labelled.labels.tolist() == silent.request_kinds.tolist()


@given(
    st.lists(
        st.lists(st.integers(1, MAX_GAMMA + 1), min_size=1, max_size=20), min_size=1, max_size=6
    ),
    st.integers(1, 12),
)
def test_replaying_keeps_every_value(tmp_path_factory, records, requests):
    path = tmp_path_factory.mktemp("bank") / "a.jsonl"
    path.write_text("".join(line(eagle=values) for values in records))
    request_pool = pool(AcceptanceTrace.load([path]), requests)
    known = [[v - 1 for v in values] for values in records]
    assert all(values in known for values in sequences(request_pool, "eagle"))
    assert len(request_pool.accepted["eagle"]) == request_pool.output_tokens.sum()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "an object is needed, not list"),
        ('{"acc_a": {"acc_len": [1]}}', "'prompt_token_ids' is needed"),
        ('{"prompt_token_ids": []}', "no key acc_NAME"),
        ('{"prompt_token_ids": [], "acc_a": [1]}', "acc_a.acc_len is needed"),
        ('{"prompt_token_ids": [], "acc_a": {"acc_len": 3}}', "acc_a.acc_len is needed, not 3"),
        (line(a=[]), "acc_a.acc_len is empty"),
        (line(a=[1, 1.0]), r"acc_a.acc_len\[1\] is 1.0, not an integer"),
        (line(a=[True]), "an integer"),
        (line(a=[None]), "an integer"),
        (line(a=["1"]), "an integer"),
        (line(a=[float("nan")]), "is nan, not an integer"),
        (line(a=[0]), r"is 0, must be in \[1, 65\]"),
        (line(a=[66]), r"is 66, must be in \[1, 65\]"),
        (line(a=[10**300]), r"must be in \[1, 65\]"),
        (line(b=[1]), r"drafters \['b'\] are recorded, \['a'\] in the first line"),
    ],
)
def test_a_bad_request_is_refused_with_its_line(write, second, message):
    path = write("a.jsonl", line(a=[1]) + "\n" + second)
    with pytest.raises(InvalidInputError, match=message) as caught:
        AcceptanceTrace.load([path])
    assert (caught.value.source, caught.value.line) == (str(path), 3)
    assert len(str(caught.value)) < 400


def test_files_of_other_drafters_or_no_request_or_no_file_are_refused(write):
    a, b = write("a.jsonl", line(a=[1])), write("b.jsonl", line(b=[1]))
    with pytest.raises(InvalidInputError, match=r"b.jsonl: drafters \['b'\] are recorded"):
        AcceptanceTrace.load([a, b])
    with pytest.raises(InvalidInputError, match="no request"):
        AcceptanceTrace.load([write("blank.jsonl", "\n \n")])
    with pytest.raises(InvalidInputError, match="no file"):
        AcceptanceTrace.load([])
    with pytest.raises(InvalidInputError, match="no file"):
        AcceptanceTrace.load_rounds({})
    with pytest.raises(InvalidInputError, match="no request in the bank"):
        AcceptanceTrace("empty", ())


def test_commits_of_a_round_are_accepted_drafts_by_category_in_order(write):
    path = write("r.csv", "commits,category,a0,a1\n2,chat,1,1\n0,code,0,0\n1,chat,.9,\n")
    request_pool = pool(AcceptanceTrace.load_rounds({"mtp": path}), 2)
    by_kind = dict(
        zip(request_pool.request_kinds.tolist(), sequences(request_pool, "mtp"), strict=True)
    )
    assert by_kind == {0: [2, 1], 1: [0]}


def test_long_rounds_become_requests_that_use_every_round_once(write):
    values = [i % 7 for i in range(700)]
    path = write("r.csv", "commits,category\n" + "".join(f"{v},x\n" for v in values))
    acceptance_trace = AcceptanceTrace.load_rounds({"mtp": path})
    assert [r.positions for r in acceptance_trace.recorded] == [256, 444]
    assert [v for r in acceptance_trace.recorded for v in r.accepted["mtp"].tolist()] == values


def test_rounds_of_two_drafters_are_paired_by_category(write):
    a = write("a.csv", "commits,category\n1,x\n2,x\n3,y\n")
    b = write("b.csv", "commits,category\n4,y\n5,x\n")
    acceptance_trace = AcceptanceTrace.load_rounds({"mtp": a, "dflash": b})
    assert acceptance_trace.drafters == ("mtp", "dflash")
    assert {r.kind: r.positions for r in acceptance_trace.recorded} == {"x": 1, "y": 1}
    request_pool = pool(acceptance_trace, 2)
    assert sorted(
        zip(
            *(
                np.concatenate(sequences(request_pool, d)).tolist()
                for d in acceptance_trace.drafters
            ),
            strict=True,
        )
    ) == [(1, 5), (3, 4)]
    lacking = write("c.csv", "commits,category\n1,x\n")
    with pytest.raises(InvalidInputError, match=r"c.csv: there is no round of 'y'"):
        AcceptanceTrace.load_rounds({"mtp": a, "dflash": lacking})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (",x", "commits is blank"),
        ("1.5,x", "an integer"),
        ("nan,x", "an integer"),
        ("-1,x", r"must be in \[0, 64\]"),
        ("65,x", r"must be in \[0, 64\]"),
        ("1", "1 fields, the header names 2"),
    ],
)
def test_a_bad_round_is_refused_with_its_line(write, row, message):
    path = write("r.csv", f"commits,category\n1,x\n{row}\n")
    with pytest.raises(InvalidInputError, match=message) as caught:
        AcceptanceTrace.load_rounds({"mtp": path})
    assert caught.value.line == 3


def with_tokens(prompt, output, **drafters):
    keys = {f"acc_{name}": {"acc_len": values} for name, values in drafters.items()}
    return json.dumps({"prompt_token_ids": prompt, "generated_token_ids": output, **keys}) + "\n"


def test_match_lengths_come_from_the_tokens_that_were_recorded(write):
    text = with_tokens([1, 2, 3, 4], [1, 2, 3, 9], eagle=[1] * 4, ngram=[1] * 4)
    request_pool = pool(AcceptanceTrace.load([write("a.jsonl", text)]), 1, outputs=np.array([6]))
    assert request_pool.matches.tolist() == [0, 0, 2, 3, 0, 0]


def test_without_tokens_nobody_knows_match_lengths(write):
    request_pool = pool(
        AcceptanceTrace.load([write("a.jsonl", line(eagle=[1, 2], ngram=[1, 1]))]), 1
    )
    assert request_pool.matches is None
    assert request_pool.known_matches.tolist() == [2, 2]


@pytest.mark.parametrize("output", [[1], "text", [1, -1], [1, True], [1, 2.0]])
def test_an_output_that_is_no_list_of_its_tokens_is_refused(write, output):
    path = write("a.jsonl", with_tokens([1, 2], output, eagle=[1, 2]))
    with pytest.raises(InvalidInputError, match=r"a\.jsonl:1: .*token"):
        AcceptanceTrace.load([path])

"""The traffic section: kinds accept what their curves, traces and mixes say."""

import json

import numpy as np
import pytest

from simulator.copying import CopyingSource
from simulator.correlated_curves import AcceptanceMemory, CorrelatedCurves
from simulator.errors import InvalidInputError
from simulator.scenarios.fields import FieldLocations
from simulator.scenarios.traffic import KindSection, make_sources
from simulator.sources import MeanTokens


def sources_from_kinds(tmp_path, **kinds):
    sections = {name: KindSection.model_validate(kind) for name, kind in kinds.items()}
    return make_sources(sections, tmp_path, FieldLocations("traffic"))


def survival(source, depth, requests=400):
    accepted = source.pool(np.random.default_rng(0), requests).accepted["eagle"]
    return [float((accepted >= k).mean()) for k in range(1, depth + 1)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"geometric": {"eagle": 0.8}}, [0.8**k for k in range(1, 9)]),
        ({"positions": {"eagle": [0.9, 0.5]}}, [0.9 * 0.5 ** (k - 1) for k in range(1, 9)]),
        ({"survival": {"eagle": [0.8, 0.6, 0.1]}}, [0.8, 0.6, 0.1, 0.0, 0.0]),
    ],
)
@pytest.mark.parametrize("memory", [None, {}])
def test_a_curve_is_met_in_each_notation(tmp_path, kind, expected, memory):
    source = sources_from_kinds(tmp_path, code=kind | {"memory": memory})["code"]
    assert isinstance(source, CorrelatedCurves) == (memory is not None)
    assert source.name == "code"
    assert survival(source, len(expected)) == pytest.approx(expected, abs=0.03)


def test_a_drafter_may_have_another_memory_than_the_others(tmp_path):
    memory = {
        "level_spread": 1.5,
        "correlation": 0.1,
        "by_drafter": {"ngram": {"passage_spread": 4}},
    }
    kind = {"geometric": {"eagle": 0.7, "ngram": 0.4}, "memory": memory}
    chain = sources_from_kinds(tmp_path, code=kind)["code"]
    assert isinstance(chain, CorrelatedCurves)
    assert chain.correlation == 0.1
    assert chain.memory == {
        "eagle": AcceptanceMemory(level_spread=1.5),
        "ngram": AcceptanceMemory(level_spread=1.5, passage_spread=4),
    }


def test_lengths_are_the_kinds_own(tmp_path):
    kind = {"geometric": {"eagle": 0.8}, "output_tokens_mean": 40, "context_tokens_mean": 9000}
    pool = sources_from_kinds(tmp_path, code=kind)["code"].pool(np.random.default_rng(0), 2000)
    assert pool.output_tokens.mean() == pytest.approx(40, rel=0.05)
    assert pool.context_tokens.mean() == pytest.approx(9000, rel=0.05)
    default = KindSection.model_validate({"geometric": {"eagle": 0.8}})
    assert default.mean_tokens == MeanTokens(256.0, 384.0)


def test_a_trace_keeps_its_lengths_and_is_labelled_on_request_only(tmp_path):
    lines = [
        {"prompt_token_ids": [1] * 5, "acc_eagle": {"acc_len": [1 + (i + p) % 3 for p in range(9)]}}
        for i in range(4)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "b.jsonl").write_text(json.dumps(lines[0]))
    both = {"requests": ["a.jsonl", "b.jsonl"]}
    sources_by_name = sources_from_kinds(
        tmp_path, plain={"trace": both}, named={"trace": both | {"labelled": True}}
    )  # fmt: skip
    pool = sources_by_name["plain"].pool(np.random.default_rng(0), 5)
    assert pool.output_tokens.tolist() == [9] * 5
    assert pool.label_names == ("",)
    assert sources_by_name["named"].pool(np.random.default_rng(0), 5).label_names == ("a", "b")
    assert KindSection.model_validate({"trace": both}).mean_tokens == MeanTokens(None, None)


def test_rounds_are_read_for_each_drafter(tmp_path):
    (tmp_path / "r.csv").write_text("commits,category\n" + "3,chat\n0,chat\n" * 10)
    trace = {"rounds": {"eagle": "r.csv"}}
    assert sources_from_kinds(tmp_path, code={"trace": trace})["code"].drafters == ("eagle",)


def test_a_mix_draws_its_parts_by_weight(tmp_path):
    mixed_source = sources_from_kinds(
        tmp_path,
        mixed={"mix": {"easy": 3, "hard": 1}, "labelled": True},
        easy={"geometric": {"eagle": 1.0}, "output_tokens_mean": 50},
        hard={"geometric": {"eagle": 0.0}, "output_tokens_mean": 500},
    )["mixed"]
    pool = mixed_source.pool(np.random.default_rng(0), 4000)
    assert pool.label_names == ("easy", "hard")
    assert (pool.labels == 0).mean() == pytest.approx(0.75, abs=0.03)
    assert pool.output_tokens[pool.labels == 0].mean() == pytest.approx(50, rel=0.1)
    assert pool.output_tokens[pool.labels == 1].mean() == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ({}, "one of geometric, positions, survival, copying, trace, mix is needed"),
        ({"geometric": {"eagle": 0.5}, "mix": {"a": 1}}, "there is geometric and mix"),
        ({"mix": {"a": 1}, "memory": {}}, "memory has no meaning beside mix"),
        ({"geometric": {"eagle": 0.5}, "labelled": True}, "labelled has no meaning beside geometr"),
        ({"geometric": {}}, "at least 1 item"),
        ({"geometric": {"eagle": 1.1}}, "less than or equal to 1"),
        ({"positions": {"eagle": []}}, "at least 1 item"),
        ({"positions": {"eagle": [0.5] * 65}}, "at most 64 items"),
        ({"trace": {}}, "either requests or rounds is needed"),
        ({"mix": {"a": 0}}, "greater than 0"),
    ],
)
def test_kinds_that_cannot_be_are_refused(kind, fault):
    with pytest.raises(ValueError, match=fault):
        KindSection.model_validate(kind)


def test_a_mix_of_mixes_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"traffic\.b\.mix\.a: there is no kind 'a'"):
        sources_from_kinds(
            tmp_path,
            a={"mix": {"c": 1}},
            b={"mix": {"a": 1}},
            c={"geometric": {"eagle": 0.5}},
        )


def test_copying_requests_have_the_fields_that_are_given_and_lengths_of_their_own(tmp_path):
    kind = {"copying": {"lookup": "suffix", "copied": 0.9}, "output_tokens_mean": 50}
    source = sources_from_kinds(tmp_path, code=kind)["code"]
    assert source == CopyingSource(
        "code", lookup="suffix", copied=0.9, output_tokens_mean=50.0, context_tokens_mean=384.0
    )
    with pytest.raises(InvalidInputError, match=r"code\.copying: copied: 2\.0 must be in \[0, 1\]"):
        sources_from_kinds(tmp_path, code={"copying": {"copied": 2.0}})


def test_match_lengths_go_along_when_kinds_are_mixed(tmp_path):
    kinds = {
        "code": {"copying": {"copied": 1.0, "faithful": 1.0, "chance": 0}},
        "prose": {"geometric": {"eagle": 0.5, "ngram": 0.1}},
        "both": {"mix": {"code": 1, "prose": 1}},
    }
    pool = sources_from_kinds(tmp_path, **kinds)["both"].pool(np.random.default_rng(0), 50)
    starts = zip(pool.offsets.tolist(), pool.kinds.tolist(), strict=True)
    assert {(kind, int(pool.matches[position])) for position, kind in starts} == {(0, 0), (1, 2)}

"""The merge of overrides: its written precedence, for any set of them in any order."""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from controller.core.engine_spec import MAX_GAMMA, Arm, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.plan import Regime, RegimeMode
from controller.core.planning.constraints import constrain_rows
from controller.core.planning.overrides import (
    NO_LIMITS,
    InvalidOverrideError,
    Limits,
    Override,
    Rule,
    Scope,
    ScopeKind,
    batch_edges,
    merge_limits,
    merge_regime,
)
from controller.wire.override_text import PRECEDENCE

DRAFTERS = ("dflash", "mtp", "ngram")
SPEC = EngineSpec(
    "engine-0",
    Fingerprint("model-a", engine="virtual"),
    tuple(DrafterSpec(name, DrafterKind.MTP, (0, 1, 2, 3, 5, 7)) for name in DRAFTERS),
    64,
)
ARMS = [Arm(d.name, g) for d in SPEC.drafters for g in d.gammas]
FLEET = Scope(ScopeKind.FLEET)
MODEL = Scope(ScopeKind.MODEL, "model-a")
ENGINE = Scope(ScopeKind.ENGINE, "engine-0")
OTHERS = (Scope(ScopeKind.MODEL, "model-b"), Scope(ScopeKind.ENGINE, "engine-1"))

gammas = st.integers(0, 9)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    low, high = sorted((draw(gammas), draw(gammas)))
    drafter = draw(st.sampled_from(DRAFTERS))
    return draw(
        st.sampled_from(
            [
                Rule(off=True),
                Rule(gamma=low),
                Rule(gamma_min=low),
                Rule(gamma_max=high),
                Rule(gamma_min=low, gamma_max=high),
                Rule(drafter=drafter),
                Rule(deny_drafters=(drafter,)),
                Rule(deny_exploration=True),
                Rule(tpot_max_seconds=(1 + low) / 100),
                Rule(deny_updates=True),
                Rule(regime=Regime(RegimeMode.ONLINE, 1 + low)),
                Rule(regime=Regime(RegimeMode.COLLECT)),
                Rule(regime=Regime()),
            ]
        )
    )


@st.composite
def commands(draw: st.DrawFn) -> Override:
    rule = draw(rules())
    first, last = 0, 0
    if rule.can_limit_batches and draw(st.booleans()):
        first, last = sorted((draw(st.integers(1, 40)), draw(st.integers(1, 40))))
    number = draw(st.integers(1, 10**6))
    return Override(
        f"o{number}",
        draw(st.sampled_from([FLEET, MODEL, ENGINE, *OTHERS])),
        rule,
        "ann",
        "because",
        first,
        last,
        number,
        rule.can_yield and draw(st.booleans()),
    )


sets = st.lists(commands(), max_size=8, unique_by=lambda o: o.override_id)
batches = st.integers(1, 64)


@given(sets, batches, st.randoms())
@settings(max_examples=300, deadline=None)
def test_the_order_does_not_matter(overrides, batch, rng: random.Random):
    shuffled = rng.sample(overrides, len(overrides))
    assert merge_limits(shuffled, SPEC, batch) == merge_limits(overrides, SPEC, batch)
    assert merge_regime(shuffled, SPEC) == merge_regime(overrides, SPEC)


@given(sets, batches)
@settings(max_examples=200, deadline=None)
def test_saying_it_twice_changes_nothing(overrides, batch):
    assert merge_limits(overrides * 2, SPEC, batch) == merge_limits(overrides, SPEC, batch)


@given(sets, batches)
@settings(max_examples=200, deadline=None)
def test_what_is_for_others_or_for_other_batches_does_not_count(overrides, batch):
    mine = [o for o in overrides if o.covers(SPEC, batch)]
    assert merge_limits(mine, SPEC, batch) == merge_limits(overrides, SPEC, batch)
    assert set(merge_limits(overrides, SPEC, batch).overrides) == {o.override_id for o in mine}


@given(sets, batches)
@settings(max_examples=300, deadline=None)
def test_denials_of_any_scope_beat_everything(overrides, batch):
    limits = merge_limits(overrides, SPEC, batch)
    counting = [o.rule for o in overrides if o.covers(SPEC, batch)]
    denied = {name for rule in counting for name in rule.deny_drafters}
    for arm, feasible in zip(ARMS, limits.feasible_arms(ARMS), strict=True):
        if feasible and arm.gamma > 0:
            assert arm.drafter not in denied
            assert not any(rule.off for rule in counting)
    assert limits.can_explore != any(rule.deny_exploration for rule in counting)


@given(sets, batches, st.sampled_from([FLEET, MODEL, ENGINE]))
@settings(max_examples=200, deadline=None)
def test_off_beats_every_pin_of_every_scope(overrides, batch, scope):
    limits = merge_limits(
        [*overrides, Override("off", scope, Rule(off=True), "ann", "why")], SPEC, batch
    )
    feasible = [arm for arm, may in zip(ARMS, limits.feasible_arms(ARMS), strict=True) if may]
    assert feasible
    assert {arm.gamma for arm in feasible} == {0}


def rivals(draw, stronger: dict[str, Any], weaker: dict[str, Any]) -> tuple[Override, Override]:
    """Two overrides with bounds, of which `stronger` and `weaker` say what differs."""
    rivals_seen = []
    for name, fields in (("a", stronger), ("b", weaker)):
        low, high = sorted((draw(gammas), draw(gammas)))
        rule = Rule(gamma_min=low, gamma_max=high, drafter=draw(st.sampled_from(DRAFTERS)))
        base: dict[str, Any] = {"scope": FLEET, "revision": draw(st.integers(1, 99))}
        rivals_seen.append(Override(name, rule=rule, author="ann", reason="why", **(base | fields)))
    return rivals_seen[0], rivals_seen[1]


@st.composite
def contests(draw: st.DrawFn) -> tuple[Override, Override]:
    """(the stronger override, the weaker one), by each clause of the sentence in turn."""
    clause = draw(st.sampled_from(["narrower", "newer", "file"]))
    scopes = [ENGINE, MODEL, FLEET]
    wide = draw(st.integers(0, 2))
    narrow = draw(st.integers(0, wide))
    if clause == "narrower":
        assume(narrow < wide)
        return rivals(draw, {"scope": scopes[narrow]}, {"scope": scopes[wide]})
    if clause == "newer":
        old, scope = draw(st.integers(1, 99)), {"scope": scopes[wide]}
        return rivals(draw, {"revision": 100, **scope}, {"revision": old, **scope})
    return rivals(draw, {"scope": scopes[wide]}, {"scope": scopes[narrow], "from_file": True})


@given(contests(), batches, st.booleans())
@settings(max_examples=400, deadline=None)
def test_of_two_that_contradict_each_other_the_sentence_says_which_one_holds(
    contest, batch, turned
):
    stronger, weaker = contest
    limits = merge_limits([weaker, stronger] if turned else [stronger, weaker], SPEC, batch)
    assert limits.drafter == stronger.rule.drafter
    low, high = stronger.rule.gamma_range
    assert low <= limits.gamma_min <= limits.gamma_max <= high
    least, most = weaker.rule.gamma_range
    if least <= high and low <= most:
        assert (limits.gamma_min, limits.gamma_max) == (max(low, least), min(high, most))
    else:
        assert (limits.gamma_min, limits.gamma_max) == (low, high)


@given(sets, batches)
@settings(max_examples=300, deadline=None)
def test_every_bound_in_force_was_asked_for_by_the_override_that_is_named(overrides, batch):
    limits = merge_limits(overrides, SPEC, batch)
    ranges = {o.override_id: o.rule.gamma_range for o in overrides}
    bounds = {bound for name in limits.gamma_by for bound in ranges[name]}
    assert {limits.gamma_min, limits.gamma_max} <= bounds | {0, MAX_GAMMA}
    assert limits.gamma_min <= limits.gamma_max


@given(sets, batches)
@settings(max_examples=300, deadline=None)
def test_of_the_bounds_on_the_time_per_token_the_smallest_holds_whoever_has_set_it(
    overrides, batch
):
    limits = merge_limits(overrides, SPEC, batch)
    asked = {
        o.override_id: o.rule.tpot_max_seconds
        for o in overrides
        if o.covers(SPEC, batch) and o.rule.tpot_max_seconds is not None
    }
    assert limits.tpot_max_seconds == min(asked.values(), default=None)
    assert asked.get(limits.tpot_by) == limits.tpot_max_seconds
    assert bool(limits.tpot_by) == bool(asked)


@pytest.mark.parametrize(
    "rule",
    [
        Rule(off=True),
        Rule(gamma=0, deny_drafters=("mtp",)),
        Rule(gamma_max=3, deny_exploration=True),
        Rule(deny_updates=True),
        Rule(gamma_max=3, tpot_max_seconds=0.02),
    ],
)
def test_policy_cannot_demand_what_no_override_could_displace(rule: Rule):
    with pytest.raises(InvalidOverrideError, match="file-based policy is weakest"):
        Override("policy:a", FLEET, rule, "ann", "why", from_file=True)
    Override("a", FLEET, rule, "ann", "why")


def test_the_sentence_names_every_rank_in_order():
    ranks = ["Off and denials", "narrower scope", "newer override", "file-based policy"]
    assert sorted(ranks, key=PRECEDENCE.index) == ranks


def bounds(*parts):
    overrides = [
        Override(f"o{i}", scope, Rule(**rule), "ann", "why", revision=i)
        for i, (scope, rule) in enumerate(parts)
    ]
    limits = merge_limits(overrides, SPEC, 8)
    return limits.gamma_min, limits.gamma_max


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], (0, MAX_GAMMA)),
        ([(FLEET, {"gamma": 3})], (3, 3)),
        # Each one is newer than those before it: in one scope the newer one wins.
        ([(FLEET, {"gamma_max": 2}), (FLEET, {"gamma_min": 5})], (5, MAX_GAMMA)),
        ([(FLEET, {"gamma_max": 2}), (FLEET, {"gamma": 5})], (5, 5)),
        ([(FLEET, {"gamma": 2}), (FLEET, {"gamma": 5})], (5, 5)),
        ([(FLEET, {"gamma": 5}), (FLEET, {"gamma_max": 2})], (0, 2)),
        # The narrower scope wins.
        ([(FLEET, {"gamma_max": 2}), (ENGINE, {"gamma": 5})], (5, 5)),
        ([(ENGINE, {"gamma": 5}), (FLEET, {"gamma": 0})], (5, 5)),
        ([(FLEET, {"gamma": 1}), (MODEL, {"gamma": 2}), (ENGINE, {"gamma": 3})], (3, 3)),
        ([(FLEET, {"gamma_min": 5}), (MODEL, {"gamma_max": 3})], (0, 3)),
        # What can hold together does.
        ([(FLEET, {"gamma_max": 3}), (ENGINE, {"gamma_min": 2})], (2, 3)),
        ([(FLEET, {"gamma_max": 3}), (ENGINE, {"gamma_min": 1, "gamma_max": 7})], (1, 3)),
        ([(FLEET, {"gamma": 5}), (FLEET, {"gamma_max": 7})], (5, 5)),
    ],
)
def test_precedence_of_draft_lengths(parts, expected):
    assert bounds(*parts) == expected


def legal_arms(*parts):
    overrides = [
        Override(f"o{i}", scope, Rule(**rule), "ann", "why", revision=i)
        for i, (scope, rule) in enumerate(parts)
    ]
    allowed_arms = merge_limits(overrides, SPEC, 8).feasible_arms(ARMS)
    return [(a.drafter, a.gamma) for a, ok in zip(ARMS, allowed_arms, strict=True) if ok]


def test_which_arms_are_left():
    assert legal_arms((FLEET, {"off": True}), (ENGINE, {"gamma": 5})) == [(d, 0) for d in DRAFTERS]
    assert legal_arms((FLEET, {"drafter": "mtp"}), (FLEET, {"gamma_max": 1})) == [
        ("mtp", 0), ("mtp", 1),
    ]  # fmt: skip
    # Two pins in one scope: the newer one wins, and a narrower one beats both.
    pins = [(FLEET, {"drafter": "ngram"}), (FLEET, {"drafter": "mtp"})]
    assert {d for d, _ in legal_arms(*pins)} == {"mtp"}
    assert {d for d, _ in legal_arms(*pins, (ENGINE, {"drafter": "dflash"}))} == {"dflash"}
    # A denied drafter is not run, pinned or not; at gamma = 0 nothing of it runs.
    assert legal_arms((ENGINE, {"drafter": "mtp"}), (FLEET, {"deny_drafters": ("mtp",)})) == [
        (d, 0) for d in DRAFTERS
    ]
    # 4 was never prepared: nothing is left.
    assert legal_arms((ENGINE, {"gamma": 4})) == []
    assert legal_arms((ENGINE, {"gamma": 5}), (ENGINE, {"deny_drafters": DRAFTERS})) == []


def test_no_overrides_leave_everything():
    assert merge_limits([], SPEC, 8) is NO_LIMITS
    assert all(Limits().feasible_arms(ARMS))


def regime_of(*rules_):
    overrides = [
        Override(f"o{i}", scope, rule, "ann", "why", revision=i)
        for i, (scope, rule) in enumerate(rules_)
    ]
    return merge_regime(overrides, SPEC)[:2]


def test_regimes():
    online, collect = Regime(RegimeMode.ONLINE, 5), Regime(RegimeMode.COLLECT)
    assert regime_of() == (None, True)
    assert regime_of((FLEET, Rule(regime=online))) == (online, True)
    assert regime_of((FLEET, Rule(regime=online)), (FLEET, Rule(regime=collect))) == (collect, True)
    slow = Regime(RegimeMode.ONLINE, 50)
    assert regime_of((FLEET, Rule(regime=online)), (FLEET, Rule(regime=slow))) == (slow, True)
    assert regime_of((FLEET, Rule(regime=slow)), (FLEET, Rule(regime=online))) == (online, True)
    assert regime_of((FLEET, Rule(regime=Regime())), (ENGINE, Rule(regime=online))) == (
        online,
        True,
    )
    assert regime_of((ENGINE, Rule(regime=online)), (FLEET, Rule(deny_updates=True))) == (
        Regime(), False,
    )  # fmt: skip


@given(sets)
@settings(max_examples=100, deadline=None)
def test_between_two_edges_the_limits_are_the_same(overrides):
    edges = batch_edges(overrides, SPEC)
    assert all(0 < edge < SPEC.max_batch_size for edge in edges)
    for batch in range(1, SPEC.max_batch_size):
        if batch not in edges:
            assert merge_limits(overrides, SPEC, batch) == merge_limits(overrides, SPEC, batch + 1)


def test_a_plan_never_has_more_rows_than_an_engine_takes():
    spec = dataclasses.replace(SPEC, max_batch_size=4096)
    many = [
        Override(f"o{i}", FLEET, Rule(gamma_max=i % 4), "a", "r", 7 * i + 1, 7 * i + 4)
        for i in range(400)
    ]
    buckets = (1, 8, 64, 512, 4096)
    rows = constrain_rows(many, spec, buckets, ARMS)
    assert rows.upper_batch_sizes == buckets
    assert not rows.has_split_buckets
    few = constrain_rows(many[:100], spec, buckets, ARMS)
    assert len(few.upper_batch_sizes) > 100
    assert few.feasible is not None
    assert few.feasible.any(axis=0).all()


@given(rules())
def test_a_rule_is_equal_to_its_copy(rule):
    assert dataclasses.replace(rule) == rule
    assume(rule.can_limit_batches)
    Override("o", FLEET, rule, "ann", "why", 2, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"override_id": ""}, "override id ''"),
        ({"override_id": "a b"}, "override id 'a b'"),
        ({"override_id": "x" * 129}, "1 to 128 letters"),
        ({"author": ""}, "author: 0 characters"),
        ({"author": "a\nb"}, "only printable"),
        ({"reason": ""}, "reason: 0 characters"),
        ({"reason": "x" * 513}, "reason: 513 characters"),
        ({"reason": "a\x00b"}, "only printable"),
        ({"min_batch_size": 9, "max_batch_size": 8}, "the range is empty"),
        ({"min_batch_size": -1}, r"must be in \[0, 65536\]"),
        ({"max_batch_size": 65537}, r"must be in \[0, 65536\]"),
        ({"max_batch_size": 8, "rule": Rule(deny_updates=True)}, "omit the batch range"),
        ({"max_batch_size": 8, "rule": Rule(regime=Regime())}, "omit the batch range"),
    ],
)
def test_an_override_that_cannot_be_is_refused(change, message):
    good: dict[str, Any] = {
        "override_id": "o", "scope": FLEET, "rule": Rule(off=True), "author": "a", "reason": "r",
    }  # fmt: skip
    Override(**good)
    with pytest.raises(InvalidOverrideError, match=message):
        Override(**(good | change))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "must demand something"),
        ({"gamma": -1}, "gamma -1 must be in"),
        ({"gamma_max": 65}, "gamma_max 65 must be in"),
        ({"gamma": 2, "gamma_min": 1}, "must be omitted"),
        ({"gamma_min": 3, "gamma_max": 2}, "is above gamma_max 2"),
        ({"off": True, "gamma": 2}, "off and drafting"),
        ({"off": True, "gamma_min": 1}, "off and drafting"),
        ({"drafter": "a", "deny_drafters": ("a",)}, "pinned and denied"),
        ({"deny_drafters": ("a", "a")}, "named twice"),
        ({"deny_drafters": tuple("abcdefghijklmnopq")}, "16 at most"),
        ({"drafter": ""}, "drafter: 0 characters"),
        (
            {"tpot_max_seconds": 0.0},
            "a time per output token is at least 1e-06 s",
        ),
        ({"tpot_max_seconds": -0.01}, "tpot_max_seconds -0.01"),
        ({"tpot_max_seconds": 0.9e-6}, "tpot_max_seconds 9e-07"),
        ({"tpot_max_seconds": 3601.0}, "at most 3600 s"),
        ({"tpot_max_seconds": float("inf")}, "tpot_max_seconds inf"),
        ({"tpot_max_seconds": float("nan")}, "tpot_max_seconds nan"),
        ({"regime": Regime(RegimeMode.ONLINE, 0)}, "need a stride"),
        ({"regime": Regime(RegimeMode.OFF, 3)}, "other regimes have none"),
        ({"regime": Regime(RegimeMode.ONLINE, 3), "deny_updates": True}, "pinned and denied"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(rule, message):
    with pytest.raises(InvalidOverrideError, match=message):
        Rule(**rule)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (ScopeKind.FLEET, "x", "the fleet has no name"),
        (ScopeKind.MODEL, "", "name the model"),
        (ScopeKind.ENGINE, "x" * 257, "257 characters"),
    ],
)
def test_a_scope_that_cannot_be_is_refused(kind, name, message):
    with pytest.raises(InvalidOverrideError, match=message):
        Scope(kind, name)

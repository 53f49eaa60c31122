"""Several pods' measurements as one: nothing is lost, nothing counts twice."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.cost.profile_merge import (
    differences,
    measurements_of,
    merge_profiles,
    select_distinct,
)
from controller.core.engine_spec import Fingerprint
from controller.core.errors import ProfileMergeError
from tests.unit.controller.core.cost.small_profile import PROFILE

KEYS = [(gamma, batch) for gamma in (0, 1, 3) for batch in (1, 8)]


def measured(*, kv=128.0, slope=0.0, catch_up=0.0, timestamp="2026-01-01", **cells):
    """A profile of one pod; cells: b<batch>g<gamma> = (seconds, spread, steps)."""
    profile_cells = tuple(
        ProfileCell("mtp", int(name[3:]), int(name[1]), *values) for name, values in cells.items()
    )
    return dataclasses.replace(
        PROFILE, cells=profile_cells, kv_tokens_per_sequence=kv, seconds_per_kv_token=slope,
        catch_up_seconds_per_token=catch_up, measured_at=timestamp,
    )  # fmt: skip


def test_steps_add_up_and_the_spread_holds_what_lies_between_the_pods():
    one = measured(b1g0=(0.010, 0.001, 30), timestamp="2026-01-01")
    two = measured(b1g0=(0.014, 0.001, 10), b1g2=(0.02, 0.002, 5), timestamp="2026-01-02")
    merged = merge_profiles([one, two])
    plain, drafting = merged.cells
    assert plain.steps == 40
    assert plain.step_seconds == pytest.approx(0.011)
    # Between: 30 x 1 ms^2 + 10 x 9 ms^2, within: (1 / 1.349 ms)^2.
    between = (30 * 1e-6 + 10 * 9e-6) / 40
    assert plain.spread_seconds == pytest.approx(1.349 * (between + (0.001 / 1.349) ** 2) ** 0.5)
    assert drafting == two.cells[1]
    assert merged.measured_at == "2026-01-02"
    assert set(merged.merged_from) == {one.profile_id, two.profile_id}
    assert Profile.from_json(merged.to_json()) == merged


def test_profiles_of_two_contexts_are_brought_to_one():
    short = measured(kv=100.0, slope=1e-6, b1g0=(0.010, 0.0, 10), b8g0=(0.010, 0.0, 10))
    long = measured(kv=300.0, slope=1e-6, b1g0=(0.0102, 0.0, 10), b8g0=(0.0116, 0.0, 10))
    merged = merge_profiles([short, long])
    assert merged.kv_tokens_per_sequence == 200.0
    assert [c.step_seconds for c in merged.cells] == pytest.approx([0.0101, 0.0108])
    assert [c.spread_seconds for c in merged.cells] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_what_only_one_pod_knows_is_kept():
    known = measured(catch_up=2e-5, b1g0=(0.01, 0.0, 10))
    unknown = measured(b1g0=(0.02, 0.0, 10))
    assert merge_profiles([known, unknown]).catch_up_seconds_per_token == pytest.approx(2e-5)
    assert merge_profiles([known]) is known


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=5, unique=True), st.randoms())
def test_order_does_not_matter_nor_merging_in_stages(seeds, shuffled):
    profiles = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        keys = random.permutation(len(KEYS))[: random.integers(1, len(KEYS) + 1)]
        cells = tuple(
            ProfileCell(
                "mtp",
                KEYS[k][0],
                KEYS[k][1],
                float(random.uniform(0.001, 1)),
                float(random.uniform(0.001, 1)),
                int(random.integers(1, 50)),
            )
            for k in sorted(keys)
        )
        profiles.append(dataclasses.replace(PROFILE, cells=cells, seconds_per_kv_token=0.0))
    at_once = merge_profiles(profiles)
    other = [*profiles]
    shuffled.shuffle(other)
    in_stages = merge_profiles([merge_profiles(other[:1]), merge_profiles(other[1:])])
    assert at_once.merged_from == in_stages.merged_from
    for one, two in zip(at_once.cells, in_stages.cells, strict=True):
        assert dataclasses.astuple(one)[:3] == dataclasses.astuple(two)[:3]
        assert one.steps == two.steps
        assert one.step_seconds == pytest.approx(two.step_seconds)
        assert one.spread_seconds == pytest.approx(two.spread_seconds)


def test_a_measurement_never_counts_twice():
    one, two, three = (measured(b1g0=(0.01 * n, 0.0, 10)) for n in (1, 2, 3))
    merged = merge_profiles([one, two])
    with pytest.raises(ProfileMergeError, match=one.profile_id):
        merge_profiles([merged, one])
    with pytest.raises(ProfileMergeError):
        merge_profiles([three, three])
    assert select_distinct([one, three, merged, three]) == [merged, three]
    assert measurements_of(three) == (three.profile_id,)


def test_profiles_of_different_engines_are_not_merged():
    one = measured(b1g0=(0.01, 0.0, 10))
    other = dataclasses.replace(one, fingerprint=Fingerprint("qwen3", engine="sglang", device="h"))
    with pytest.raises(ProfileMergeError, match=r"device is 'cpu' in .* and 'h' in"):
        merge_profiles([one, other])
    more = dataclasses.replace(one, drafters=(*one.drafters, DrafterIdentity("dflash")))
    assert [field for field, *_ in differences(one, more)] == ["drafters"]
    assert [field for field, *_ in differences(more, one)] == ["drafters"]
    with pytest.raises(ProfileMergeError, match="drafters"):
        merge_profiles([one, more])
    with pytest.raises(ProfileMergeError, match="no profile"):
        merge_profiles([])

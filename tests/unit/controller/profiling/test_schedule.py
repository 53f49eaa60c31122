import dataclasses

import pytest

from controller.core.engine_spec import Arm, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.profiling.engine_http import EngineHttp, EngineLimits
from controller.profiling.errors import ProfilingUsageError
from controller.profiling.load import LoadSource, Prompts
from controller.profiling.schedule import (
    PartKind,
    ProfilePart,
    ProfilingSettings,
    TimeBudget,
    batch_sizes_for,
    context_sweep_arms,
    long_context_tokens,
    profile_parts,
)

GRID, CONTEXT = PartKind.GRID, PartKind.CONTEXT


def engine(max_batch_size=16, gammas=(0, 1, 2, 3, 5, 7)):
    drafter = DrafterSpec("mtp", DrafterKind.MTP, gammas)
    return EngineSpec("engine-0", Fingerprint("target"), (drafter,), max_batch_size)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, (1,)),
        (16, (1, 2, 4, 8, 16)),
        (24, (1, 2, 4, 8, 16, 24)),
        (500, (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_the_default_grid_is_powers_of_two_up_to_what_the_engine_runs(largest, sizes):
    assert batch_sizes_for(engine(largest), ()) == sizes


def test_batch_sizes_that_are_asked_for_are_taken_sorted_and_once():
    assert batch_sizes_for(engine(), (9, 3, 9)) == (3, 9)
    with pytest.raises(ProfilingUsageError, match="batch size 17"):
        batch_sizes_for(engine(), (1, 17))


@pytest.mark.parametrize(
    "changes",
    [{"budget_seconds": 0}, {"batch_sizes": (0,)}, {"tolerance": 1.0}, {"context_tokens": 0}],
)
def test_settings_that_cannot_work_are_refused(changes):
    with pytest.raises(ProfilingUsageError):
        ProfilingSettings(**changes)


def test_the_grid_is_gone_through_up_and_down_with_the_sweep_between():
    parts = profile_parts((1, 2, 4, 8, 16))
    assert [p.batch_size for p in parts] == [1, 2, 4, 8, 16, 2, 8, 16, 8, 4, 2, 1]
    assert [p.name for p in parts if p.kind is CONTEXT] == ["context:2", "context:8"]
    assert [p.name for p in profile_parts((32,))] == ["grid:32", "context:32", "grid:32:again"]
    assert len({p.name for p in parts}) == len(parts)


def test_every_draft_length_is_an_arm_and_two_of_them_are_swept():
    assert Arm("mtp", 0) in engine().arms
    assert len(engine().arms) == 6
    assert context_sweep_arms(engine()) == (Arm("mtp", 0), Arm("mtp", 3))
    assert context_sweep_arms(engine(gammas=(4,))) == (Arm("mtp", 4),)


def make_budget(parts):
    settings = ProfilingSettings(budget_seconds=100.0, context_share=0.2, spare_share=0.1)
    budget = TimeBudget(settings, parts, len(parts))
    budget.start(1000.0)
    return budget


def test_the_shares_are_the_budget_less_the_spare_and_the_sweep_gets_its_own():
    parts, now, shares = profile_parts((1, 2, 4)), 1000.0, {}
    budget = make_budget(parts)
    for part in parts:
        shares[part.name] = budget.part_seconds(part, now)
        now += shares[part.name]
        budget.finish_part(part)
    assert now == pytest.approx(1090.0)
    assert shares["context:1"] + shares["context:4"] == pytest.approx(0.2 * 90)
    assert shares["grid:1"] == pytest.approx(shares["grid:4:again"])


def test_time_that_a_part_leaves_goes_to_those_after_it():
    budget = make_budget(profile_parts((1, 2, 4)))
    first = ProfilePart(GRID, 1)
    before = budget.part_seconds(ProfilePart(GRID, 2), 1000.0)
    budget.finish_part(first)
    assert budget.part_seconds(ProfilePart(GRID, 2), 1001.0) > before


def test_progress_goes_from_nothing_to_all_and_the_time_left_to_zero():
    parts = profile_parts((1, 2, 4))
    budget = make_budget(parts)
    assert budget.progress(0.0, 1000.0) == (0.0, 90.0)
    assert budget.progress(0.5, 1010.0)[0] == pytest.approx(0.8 / 6 / 2)
    for part in parts:
        budget.finish_part(part)
    assert budget.progress(0.0, 1080.0) == (1.0, 0.0)


def test_a_resumed_measurement_gets_the_part_of_the_budget_that_is_left():
    parts = profile_parts((1, 2, 4))
    settings = ProfilingSettings(budget_seconds=100.0)
    assert TimeBudget(settings, parts[4:], len(parts)).seconds == pytest.approx(50.0)


def loads(sequence_tokens=100_000, pool_tokens=1_000_000, new_tokens=512):
    limits = EngineLimits(sequence_tokens, pool_tokens)
    return LoadSource(EngineHttp("http://127.0.0.1:1"), limits, Prompts([1]), new_tokens)


def test_a_load_grows_as_far_as_the_context_and_the_pool_allow():
    assert loads().new_tokens_for(16, 128) == 512
    assert loads(sequence_tokens=300).new_tokens_for(1, 128) == 300 - 64 - 128
    assert loads(pool_tokens=10_000).new_tokens_for(16, 128) == 500 - 128
    assert loads(pool_tokens=3_000).new_tokens_for(16, 128) == 0


def test_the_long_context_is_the_longest_that_fits_and_can_be_afforded():
    settings = ProfilingSettings()
    assert long_context_tokens(8, settings, loads(), 1e-6, 10.0) == 8192
    assert long_context_tokens(8, settings, loads(sequence_tokens=2043), 1e-6, 10.0) == 1536
    assert long_context_tokens(8, settings, loads(pool_tokens=16_384), 1e-6, 10.0) == 1536
    # 8 sequences at a millisecond a token: 4 s of 10 are 500 tokens each.
    assert long_context_tokens(8, settings, loads(), 1e-3, 10.0) == 384
    assert long_context_tokens(8, settings, loads(), 1e-2, 10.0) == 0


def test_no_long_context_where_the_short_one_is_long_already():
    settings = dataclasses.replace(ProfilingSettings(), context_tokens=8000)
    assert long_context_tokens(1, settings, loads(), 1e-9, 10.0) == 0

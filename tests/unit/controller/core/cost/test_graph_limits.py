"""Draft lengths that cannot win are known from their costs alone."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell, batch_limits
from controller.core.engine_spec import Fingerprint
from tests.support.virtual_engine import engine_spec, gpu_step_seconds, profile_of

GAMMAS = (0, 1, 2, 3, 5, 7)
SIZES = (1, 4, 16, 64)


@given(
    st.lists(st.floats(0.5, 20.0), min_size=24, max_size=24),
    st.lists(st.floats(0.0, 1.0), min_size=7, max_size=7),
)
@settings(max_examples=400, deadline=None)
def test_no_acceptance_makes_what_is_left_out_the_best(seconds, acceptance):
    cost = dict(zip([(g, b) for g in GAMMAS for b in SIZES], seconds, strict=True))
    cells = tuple(ProfileCell("mtp", g, b, s, 0.0, 1) for (g, b), s in cost.items())
    profile = Profile(Fingerprint("x"), (DrafterIdentity("mtp"),), 1.0, 0.0, cells)
    limits = batch_limits(profile, max(acceptance, default=1.0) or 0.01)
    tokens, survival = [1.0], 1.0
    for probability in acceptance:
        survival *= probability
        tokens.append(tokens[-1] + survival)
    for size in SIZES:
        best = max(GAMMAS, key=lambda g: (tokens[g] / cost[g, size], -g))
        assert size <= limits.get(best, size)


def test_on_a_gpu_long_drafts_are_for_small_batches():
    limits = batch_limits(profile_of(engine_spec(max_batch_size=256), gpu_step_seconds))
    assert 7 in limits
    assert 0 < limits[7] < 256
    assert 0 not in limits
    for shorter, longer in ((3, 5), (5, 7)):
        assert limits.get(longer, 256) <= limits.get(shorter, 256)


def test_a_drafter_that_can_still_win_keeps_its_length_for_all():
    one = profile_of(engine_spec(max_batch_size=256), gpu_step_seconds)
    cheap = [
        ProfileCell("dflash", cell.gamma, cell.batch_size, 0.01, 0.0, 20)
        for cell in one.cells
        if cell.gamma
    ]
    both = dataclasses.replace(
        one, cells=(*one.cells, *cheap), drafters=(*one.drafters, DrafterIdentity("dflash"))
    )
    assert batch_limits(one)
    assert not batch_limits(both)


def test_a_size_that_was_not_measured_is_not_lost():
    profile = profile_of(engine_spec(), gpu_step_seconds)
    few = [c for c in profile.cells if c.gamma != 7 or c.batch_size <= 4]
    assert 7 not in batch_limits(dataclasses.replace(profile, cells=tuple(few)))

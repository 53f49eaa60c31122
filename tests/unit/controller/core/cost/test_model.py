"""Costs: monotone, honest about what was not measured, hard to upset."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.model import CostModel
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.cost.table import CostPrior
from controller.core.engine_spec import Arm, Fingerprint
from controller.core.settings import PlannerSettings

SETTINGS = PlannerSettings()
GAMMAS = (0, 1, 3, 7)
SIZES = (1, 4, 16)
ARMS = [Arm("mtp", g) for g in GAMMAS]


def profile(table, k_kv=0.0):
    cells = tuple(
        ProfileCell("mtp", g, b, float(table[i][j]), 0.0, 10)
        for i, g in enumerate(GAMMAS)
        for j, b in enumerate(SIZES)
    )
    return Profile(Fingerprint("t"), (DrafterIdentity("mtp"),), 100.0, k_kv, cells)


def observe(model, arm, batch_size, kv_tokens, seconds):
    """One plain step, learnt at once."""
    expected = model.predict(arm, batch_size, kv_tokens)
    cell = arm, model.bucket_of(batch_size)
    model.observe(cell, kv_tokens / batch_size, expected, seconds)
    model.commit()


def plain(i, j):
    return 0.01 + 0.002 * GAMMAS[i] + 0.0005 * SIZES[j]


TABLE = [[plain(i, j) for j in range(3)] for i in range(4)]


def test_measured_cells_come_back_as_measured():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    costs = model.costs(100.0)
    assert costs.seconds == pytest.approx(np.array(TABLE))
    assert not costs.extrapolated.any()


def test_context_adds_its_scalar_per_token():
    model = CostModel(ARMS, SIZES, profile(TABLE, k_kv=1e-6), SETTINGS)
    more = model.costs(1100.0).seconds - np.array(TABLE)
    assert more == pytest.approx(np.tile(np.array(SIZES) * 1000 * 1e-6, (4, 1)))


def test_outside_the_measured_grid_is_marked():
    arms = [*ARMS, Arm("mtp", 9)]
    costs = CostModel(arms, (1, 16, 64), profile(TABLE), SETTINGS).costs(100.0)
    assert costs.extrapolated[:, 2].all()
    assert costs.extrapolated[4].all()
    assert not costs.extrapolated[:4, :2].any()
    assert costs.seconds[4, 0] > costs.seconds[3, 0]


@given(st.lists(st.floats(1e-4, 1.0), min_size=12, max_size=12))
@settings(max_examples=80, deadline=None)
def test_after_smoothing_no_cost_falls_with_batch_or_draft_length(values):
    table = np.array(values).reshape(4, 3)
    step_seconds = CostModel(ARMS, (1, 2, 4, 9, 16), profile(table), SETTINGS).costs(100.0).seconds
    assert np.all(np.diff(step_seconds, axis=0) >= -1e-12)
    assert np.all(np.diff(step_seconds, axis=1) >= -1e-12)
    assert np.all(step_seconds > 0)


def test_a_single_wild_step_moves_nothing():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    for _ in range(50):
        observe(model, 2, 4, 400, TABLE[2][1])
    before = model.costs(100.0).seconds.copy()
    observe(model, 2, 4, 400, 10 * TABLE[2][1])
    assert model.costs(100.0).seconds == pytest.approx(before)
    assert model.rejected_steps == 1


def test_a_machine_that_slows_down_moves_all_arms_and_so_no_choice():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    for _ in range(300):
        observe(model, 2, 4, 400, 1.3 * TABLE[2][1])
    slowdown = model.costs(100.0).seconds[:, 1] / np.array(TABLE)[:, 1]
    assert slowdown[2] == pytest.approx(1.3, rel=0.02)
    # The arm that ran takes more of it than the others, but they follow.
    assert np.all(slowdown > 1.08)


def test_cells_that_are_learnt_together_do_not_add_up_to_more_than_was_seen():
    """Between two plans many batch sizes may run; all of them say the same: 20 % slower."""
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    for _ in range(20):
        for i in range(4):
            for j, size in enumerate(SIZES):
                for _ in range(8):
                    expected = model.predict(i, size, 100 * size)
                    model.observe((i, j), 100.0, expected, 1.2 * TABLE[i][j])
        model.commit()
        assert np.all(model.drift() < 1.25)
    assert model.drift() == pytest.approx(np.full((4, 3), 1.2), rel=0.02)


def test_what_keeps_happening_is_news_and_is_learnt():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    for _ in range(50):
        observe(model, 0, 4, 400, TABLE[0][1])
    for _ in range(200):
        observe(model, 0, 4, 400, 3 * TABLE[0][1])
    assert model.costs(100.0).seconds[0, 1] > 2.5 * TABLE[0][1]


def test_what_live_steps_may_move_between_arms_is_bounded():
    settings_ = PlannerSettings(cost_drift_max_profiled=1.2)
    model = CostModel(ARMS, SIZES, profile(TABLE), settings_)
    for i in range(2000):
        arm = i % 2
        observe(model, arm, 4, 400, (40.0 if arm else 1.0) * TABLE[arm][1])
    drift = model.drift()[:, 1]
    # Twice for what arms share, once up and once down for the single cells.
    assert drift.max() / drift.min() <= 1.2**4 + 1e-9


def test_one_arm_that_costs_more_than_its_table_moves_its_kin():
    # All drafting is 30 % more expensive than the profile says; only gamma = 3 and 0 ever run.
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    for _ in range(200):
        observe(model, 2, 4, 400, 1.3 * TABLE[2][1])
        observe(model, 0, 4, 400, TABLE[0][1])
    slowdown = model.costs(100.0).seconds[:, 1] / np.array(TABLE)[:, 1]
    assert slowdown[0] == pytest.approx(1.0, abs=0.02)
    assert slowdown[2] == pytest.approx(1.3, abs=0.02)
    assert slowdown[1] > 1.1
    assert slowdown[3] > 1.1


def test_a_table_that_surprises_is_trusted_less_where_it_was_never_run():
    calm, surprised = (CostModel(ARMS, SIZES, profile(TABLE), SETTINGS) for _ in range(2))
    for model, factor in ((calm, 1.0), (surprised, 3.0)):
        for _ in range(30):
            observe(model, 0, 4, 400, TABLE[0][1])
        for _ in range(30):
            observe(model, 2, 4, 400, factor * TABLE[2][1])
    assert (
        surprised.uncertainty().relative_variance(1, 2)[3]
        > 1.5 * calm.uncertainty().relative_variance(1, 2)[3]
    )


def test_running_two_arms_settles_which_is_cheaper():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    before = model.uncertainty().relative_variance(1, 0)[2]
    for _ in range(20):
        observe(model, 0, 4, 400, TABLE[0][1])
        observe(model, 2, 4, 400, TABLE[2][1])
    after = model.uncertainty().relative_variance(1, 0)
    assert after[2] < before / 10
    assert after[0] == 0


def test_a_batch_between_two_sizes_is_priced_between_them_unless_it_is_padded():
    plain_, padded = (
        CostModel(ARMS, SIZES, profile(TABLE), SETTINGS, padded=p) for p in (False, True)
    )
    assert TABLE[1][1] < plain_.predict(1, 9, 900) < TABLE[1][2]
    assert padded.predict(1, 9, 900) == pytest.approx(TABLE[1][2])


def test_a_prior_is_used_where_there_is_no_profile():
    grid = np.array(TABLE) * 3
    model = CostModel(ARMS, SIZES, None, SETTINGS, prior=CostPrior("roofline", grid, 1e-6))
    assert model.costs(0.0).seconds == pytest.approx(grid)
    assert model.costs(1000.0).seconds[0, 2] == pytest.approx(grid[0, 2] + 16 * 1000 * 1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(1e-6, 1000.0)), min_size=1, max_size=300))
@settings(max_examples=40, deadline=None)
def test_whatever_an_engine_reports_costs_stay_positive_and_finite(steps):
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    for arm, seconds in steps:
        observe(model, arm, 4, 400, seconds)
    step_seconds = model.costs(100.0).seconds
    assert np.all(np.isfinite(step_seconds))
    assert np.all(step_seconds > 0)
    assert np.all(model.uncertainty().relative_variance(1, 0) >= 0)


def test_without_a_profile_live_steps_fix_the_scale_at_once():
    model = CostModel(ARMS, SIZES, None, SETTINGS)
    observe(model, 0, 1, 100, 0.5)
    assert model.costs(100.0).seconds[0, 0] == pytest.approx(0.5, rel=0.01)
    assert model.costs(100.0).seconds[0, 2] > 0.4


def test_a_drafter_without_measurements_is_never_silently_cheap():
    arms = [*ARMS, Arm("dflash", 4)]
    costs = CostModel(arms, SIZES, profile(TABLE), SETTINGS).costs(100.0)
    assert np.all(costs.seconds[4] >= costs.seconds[:4].max())
    assert costs.extrapolated[4].all()


def test_a_reload_of_the_settings_changes_which_batch_sizes_are_similar():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    observe(model, 0, 1, 100, TABLE[0][0])
    assert model.uncertainty().is_off_due(2, gain=1.1)
    model.use_settings(PlannerSettings(near_batch_octaves=16.0))
    assert not model.uncertainty().is_off_due(2, gain=1.1)


def test_gamma_0_counts_as_tried_close_by_until_many_steps_have_run_there():
    def due(model, buckets, gain=1.1):
        return [model.uncertainty().is_off_due(j, gain) for j in range(buckets)]

    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    observe(model, 0, 1, 100, TABLE[0][0])
    assert due(model, 3) == [False, True, True]
    sizes = CostModel(ARMS, (4, 6), profile(TABLE), SETTINGS)
    observe(sizes, 0, 4, 400, TABLE[0][1])
    assert due(sizes, 2) == [False, False]
    for _ in range(60):
        observe(sizes, 1, 6, 600, sizes.predict(1, 6, 600))
    assert due(sizes, 2) == [False, True]
    # A profile that is so wrong about one batch size only is not worth the steps.
    assert due(sizes, 2, gain=1.6) == [False, False]


def test_a_batch_size_is_new_until_a_few_plain_steps_have_run():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    assert model.is_new(model.bucket_of(4))
    for i in range(3):
        observe(model, i, 4, 400, TABLE[i][1])
    assert not model.is_new(model.bucket_of(4))
    assert model.is_new(model.bucket_of(1))


def test_an_arm_that_costs_twice_what_was_believed_is_found_out_by_its_second_step():
    model = CostModel(ARMS, SIZES, profile(TABLE), SETTINGS)
    for _ in range(8):
        observe(model, 0, 4, 400, TABLE[0][1])
    for _ in range(2):
        observe(model, 3, 4, 400, 2 * TABLE[3][1])
    assert model.predict(3, 4, 400) > 1.5 * TABLE[3][1]


def test_what_was_not_measured_does_not_move_what_was():
    """A profile of one batch size: smaller batches are cheaper, most of all with long drafts."""
    cells = tuple(ProfileCell("mtp", g, 16, plain(i, 2), 0.0, 10) for i, g in enumerate(GAMMAS))
    narrow = Profile(Fingerprint("t"), (DrafterIdentity("mtp"),), 100.0, 0.0, cells)
    model = CostModel(ARMS, SIZES, narrow, SETTINGS)
    measured = model.costs(100.0).seconds[:, 2]
    for _ in range(30):
        for arm, share in ((0, 0.9), (3, 0.7)):
            for batch_size in (1, 4):
                observe(model, arm, batch_size, 100 * batch_size, share * plain(arm, 2))
    now = model.costs(100.0).seconds
    for arm, share in ((0, 0.9), (3, 0.7)):
        assert now[arm, :2] == pytest.approx(share * plain(arm, 2), rel=0.05)
    ratios = now[:, 2] / measured
    assert ratios.max() / ratios.min() < 1.06

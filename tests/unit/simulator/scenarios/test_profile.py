"""The profile section: the profile is wrong as it says, and in nothing else."""

import numpy as np
import pytest

from simulator.errors import InvalidInputError
from tests.unit.simulator.scenarios.minimal import FORMULA, file

EXACT = {"noise": 0}


def profile_of(**section):
    cost_profile = file(profile=section).make_scenario().profile
    assert cost_profile is not None
    return cost_profile


def cells(profile):
    return {(c.drafter, c.gamma, c.batch_size): c.step_seconds for c in profile.cells}


def ratios(**section):
    """(drafter, gamma, batch size) -> believed over true seconds."""
    true = cells(profile_of(**EXACT))
    wrong = cells(profile_of(**EXACT, **section))
    assert true.keys() == wrong.keys()
    return {key: wrong[key] / true[key] for key in true}


def test_an_exact_profile_is_what_the_engine_charges():
    scenario = file(profile=EXACT).make_scenario()
    assert scenario.profile is not None
    assert scenario.profile.seconds_per_kv_token == 1e-8
    assert sorted({c.batch_size for c in scenario.profile.cells}) == [1, 2, 4, 8, 16, 32]
    for (_, gamma, size), seconds in cells(scenario.profile).items():
        arm = (0, 1, 3, 7).index(gamma)
        assert seconds == pytest.approx(scenario.surface.seconds[arm, size])


def test_a_common_factor_is_on_everything():
    assert set(ratios(factor=2).values()) == {2.0}
    exact, wrong = profile_of(**EXACT), profile_of(**EXACT, factor=2)
    assert wrong.seconds_per_kv_token == 2 * exact.seconds_per_kv_token
    assert wrong.catch_up_seconds_per_token == 2 * exact.catch_up_seconds_per_token > 0


def test_factors_on_drafting_arms_and_batches_multiply():
    factors = ratios(drafting=3, by_arm={"eagle": {1: 2, 7: 0.5}}, by_batch_size={2: 1, 8: 4})
    over_batch = {1: 1.0, 2: 1.0, 4: 2.5, 8: 4.0, 16: 4.0, 32: 4.0}
    over_gamma = {0: 1.0, 1: 6.0, 3: 3.0, 7: 1.5}
    for (_, gamma, size), ratio in factors.items():
        assert ratio == pytest.approx(over_batch[size] * over_gamma[gamma])


def test_noise_is_drawn_once_and_as_large_as_asked():
    step = FORMULA["step"]
    many = {"step": step, "drafters": {"eagle": {"gammas": list(range(1, 64))}}}

    def errors(**section):
        exact, wrong = (
            cells(file(cost={"formula": many}, profile=profile).make_scenario().profile)
            for profile in (EXACT, section)
        )
        return np.array([wrong[key] / exact[key] for key in exact])

    lognormal = errors(noise=0.2)
    assert np.log(lognormal).std() == pytest.approx(0.2, rel=0.15)
    assert (lognormal == errors(noise=0.2)).all()
    assert (lognormal != errors(noise=0.2, noise_seed=1)).any()
    uniform = errors(noise=0.3, noise_shape="uniform")
    assert 0.7 <= uniform.min() < 0.72
    assert 1.28 < uniform.max() <= 1.3
    assert np.log(errors()).std() == pytest.approx(0.01, rel=0.15)


def test_the_context_term_may_be_missing_and_the_context_another():
    profile = profile_of(**EXACT, context_term=False, kv_tokens_per_sequence=8000)
    assert profile.seconds_per_kv_token == 0
    assert profile.kv_tokens_per_sequence == 8000
    exact = cells(profile_of(**EXACT))
    for key, seconds in cells(profile).items():
        assert seconds == pytest.approx(exact[key] + 1e-8 * key[2] * (8000 - 512))


def test_without_a_profile_nothing_is_known():
    assert file(profile=None).make_scenario().profile is None
    assert file().make_scenario().profile is not None


def test_a_factor_on_an_arm_that_is_not_there_is_refused():
    with pytest.raises(InvalidInputError, match=r"profile.by_arm.eagle: there is no arm"):
        file(profile={"by_arm": {"eagle": {2: 2}}}).make_scenario()

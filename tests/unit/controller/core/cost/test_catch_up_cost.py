"""What a drafter missed is counted, and what catching up takes is learnt from wakings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.catch_up_cost import CatchUpEstimator
from controller.core.engine_spec import Capabilities, DrafterSpec, Mixture, drafters_in_sync
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepFlags, StepReport

SETTINGS = PlannerSettings()


def report(step, gamma, seconds=0.01, batch=4, drafter="mtp", kv=100_000, flags=None):
    counts = [batch] + [0] * gamma
    return StepReport(
        step, batch, kv, drafter, gamma, tuple(counts), seconds, flags=flags or StepFlags()
    )  # fmt: skip


def test_an_engine_with_one_drafter_that_drafts_owes_nothing():
    catch_up = CatchUpEstimator(["mtp"], 1e-4, Capabilities(can_sleep=True), SETTINGS)
    for step in range(1, 50):
        assert not catch_up.observe(report(step, 3), 0.01)
    assert catch_up.seconds_by_drafter() == {"mtp": 0.0}


def test_a_sleeping_drafter_misses_every_token_and_pays_once():
    catch_up = CatchUpEstimator(["mtp"], 1e-4, Capabilities(can_sleep=True), SETTINGS)
    for step in range(1, 11):
        assert not catch_up.observe(report(step, 0), 0.01)
    assert catch_up.seconds_by_drafter()["mtp"] == pytest.approx(40 * 1e-4)
    assert catch_up.observe(report(11, 3, seconds=0.014), 0.01)
    assert catch_up.seconds_by_drafter()["mtp"] == 0.0
    assert not catch_up.observe(report(12, 3), 0.01)


def test_a_drafter_that_catches_up_in_its_sleep_misses_no_more_than_that():
    catch_up = CatchUpEstimator(
        ["mtp"], 1e-4, Capabilities(can_sleep=True, catch_up_steps=5), SETTINGS
    )
    owed = []
    for step in range(1, 14):
        catch_up.observe(report(step, 0), 0.01)
        owed.append(round(catch_up.seconds_by_drafter()["mtp"] / 4e-4))
    assert owed == [1, 2, 3, 4, 5] * 2 + [1, 2, 3]
    assert catch_up.observe(report(14, 3, seconds=0.0112), 0.01)
    catch_up.observe(report(15, 0), 0.01)
    assert round(catch_up.seconds_by_drafter()["mtp"] / 4e-4) == 1


def test_a_drafter_that_stays_awake_at_zero_misses_nothing():
    catch_up = CatchUpEstimator(["mtp"], 1e-4, Capabilities(can_sleep=False), SETTINGS)
    for step in range(1, 11):
        catch_up.observe(report(step, 0), 0.01)
    assert catch_up.seconds_by_drafter()["mtp"] == 0.0


def test_what_one_drafter_drafts_the_other_misses():
    catch_up = CatchUpEstimator(["mtp", "dflash"], 1e-4, Capabilities(can_sleep=True), SETTINGS)
    for step in range(1, 6):
        catch_up.observe(report(step, 3), 0.01)
    assert catch_up.seconds_by_drafter()["mtp"] == 0.0
    assert catch_up.seconds_by_drafter()["dflash"] == pytest.approx(20 * 1e-4)
    assert catch_up.observe(report(6, 3, drafter="dflash"), 0.01)
    assert catch_up.seconds_by_drafter() == {"mtp": pytest.approx(4e-4, rel=1e-3), "dflash": 0.0}


def test_drafters_that_follow_miss_only_what_is_slept_through():
    catch_up = CatchUpEstimator(
        ["mtp", "dflash"], 1e-4, Capabilities(can_sleep=True, drafters_follow=True), SETTINGS
    )
    for step in range(1, 6):
        assert not catch_up.observe(report(step, 3), 0.01)
    assert catch_up.seconds_by_drafter() == {"mtp": 0.0, "dflash": 0.0}
    for step in range(6, 11):
        assert not catch_up.observe(report(step, 0), 0.01)
    owed = pytest.approx(20 * 1e-4)
    assert catch_up.seconds_by_drafter() == {"mtp": owed, "dflash": owed}
    # Whoever wakes first wakes both.
    assert catch_up.observe(report(11, 3, drafter="dflash", seconds=0.012), 0.01)
    assert catch_up.seconds_by_drafter() == {"mtp": 0.0, "dflash": 0.0}


def test_no_drafter_owes_more_than_the_context_that_is_there():
    catch_up = CatchUpEstimator(["mtp"], 1e-4, Capabilities(can_sleep=True), SETTINGS)
    for step in range(1, 200):
        catch_up.observe(report(step, 0, kv=50), 0.01)
    assert catch_up.seconds_by_drafter()["mtp"] == pytest.approx(50 * 1e-4)


def test_a_larger_batch_or_a_longer_context_has_more_to_read():
    catch_up = CatchUpEstimator(["mtp"], 1e-4, Capabilities(can_sleep=True), SETTINGS)
    for step in range(1, 200):
        catch_up.observe(report(step, 0, batch=4, kv=80), 0.01)
    sizes, context = np.array([1.0, 4.0, 64.0]), np.array([5.0, 30.0, 10.0])
    # The present context is 20 tokens; 796 tokens were missed.
    catch_up_costs = catch_up.seconds_by_batch(sizes, context)["mtp"]
    assert catch_up_costs == pytest.approx(1e-4 * np.array([20.0, 120.0, 796.0]))


def test_an_expensive_waking_is_learnt_at_once_if_much_was_missed():
    catch_up = CatchUpEstimator(["mtp"], 1e-6, Capabilities(can_sleep=True), SETTINGS)
    for step in range(1, 2001):
        catch_up.observe(report(step, 0), 0.01)
    # 8,000 tokens in 200 plain steps.
    assert catch_up.observe(report(2001, 3, seconds=2.01), 0.01)
    for step in range(2002, 2102):
        catch_up.observe(report(step, 0), 0.01)
    assert catch_up.seconds_by_drafter()["mtp"] == pytest.approx(400 * 2.0 / 8000, rel=0.1)


@pytest.mark.parametrize("true_price", [2e-5, 5e-4])
def test_the_price_follows_what_wakings_take(true_price):
    catch_up, step = CatchUpEstimator(["mtp"], 1e-4, Capabilities(can_sleep=True), SETTINGS), 0
    for _ in range(500):
        for _ in range(10):
            step += 1
            catch_up.observe(report(step, 0), 0.01)
        step += 1
        catch_up.observe(report(step, 3, seconds=0.01 + 40 * true_price), 0.01)
    assert catch_up.price.seconds_per_token == pytest.approx(true_price, rel=0.15)
    assert catch_up._fixed_seconds == pytest.approx(0.0, abs=4 * true_price)


@pytest.mark.parametrize("fixed", [0.0, 0.006])
def test_a_pass_of_the_drafter_is_told_from_the_tokens_that_it_reads(fixed):
    """What 120 missed tokens take is not three times what 40 take."""
    catch_up, step, true_price = (
        CatchUpEstimator(["mtp"], 2e-5, Capabilities(can_sleep=True), SETTINGS),
        0,
        2.5e-6,
    )
    for waking in range(300):
        slept = (5, 15, 40)[waking % 3]
        for _ in range(slept):
            step += 1
            catch_up.observe(report(step, 0), 0.01)
        step += 1
        excess = fixed + 4 * slept * true_price
        catch_up.observe(report(step, 3, seconds=0.01 + excess), 0.01)
    # The penalty keeps a fifth of it in the price of a token.
    assert catch_up._fixed_seconds == pytest.approx(fixed, rel=0.25, abs=3e-4)
    for _ in range(30):
        step += 1
        catch_up.observe(report(step, 0), 0.01)
    owed = fixed + 120 * true_price
    assert catch_up.seconds_by_drafter()["mtp"] == pytest.approx(owed, rel=0.1, abs=1e-3)
    assert catch_up.price.cheapest_seconds == catch_up.seconds_by_drafter()["mtp"]


def test_a_waking_that_takes_less_than_a_plain_step_makes_nothing_negative():
    catch_up, step = CatchUpEstimator(["mtp"], 1e-5, Capabilities(can_sleep=True), SETTINGS), 0
    for slept, seconds in ((3, 0.02), (30, 0.001), (3, 0.03), (60, 0.001)):
        for _ in range(slept):
            step += 1
            catch_up.observe(report(step, 0), 0.01)
        step += 1
        catch_up.observe(report(step, 3, seconds=seconds), 0.01)
        assert catch_up._fixed_seconds >= 0
        assert catch_up.price.seconds_per_token >= 0


@pytest.mark.parametrize("flags", [StepFlags(after_gap=True), StepFlags(first_use=True)])
def test_a_waking_whose_time_says_nothing_teaches_nothing(flags):
    catch_up = CatchUpEstimator(["mtp"], 1e-4, Capabilities(can_sleep=True), SETTINGS)
    catch_up.observe(report(1, 0), 0.01)
    assert catch_up.observe(report(2, 3, seconds=3.0, flags=flags), 0.01)
    assert catch_up.price.seconds_per_token == pytest.approx(1e-4)
    assert catch_up.seconds_by_drafter()["mtp"] == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), st.floats(1e-6, 3000.0)),
        max_size=80,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_prices_stay_finite_and_not_below_zero(steps, can_sleep):
    catch_up = CatchUpEstimator(["a", "b"], 0.0, Capabilities(can_sleep=can_sleep), SETTINGS)
    for step, (drafter, gamma, seconds) in enumerate(steps):
        catch_up.observe(report(step, gamma, seconds, drafter=drafter), 0.01)
        assert all(0 <= value < 1e9 for value in catch_up.seconds_by_drafter().values())


def test_a_mixture_its_main_drafter_and_its_lookup_are_kept_in_step_together():
    specs = (
        DrafterSpec("mtp", DrafterKind.MTP, (0, 3)),
        DrafterSpec("ngram", DrafterKind.NGRAM, (3,)),
        DrafterSpec("both", DrafterKind.MIXTURE, (3,), mixture=Mixture("mtp", "ngram")),
        DrafterSpec("dflash", DrafterKind.DFLASH, (3,)),
    )
    names = [spec.name for spec in specs]
    catch_up = CatchUpEstimator(
        names, 1e-4, Capabilities(can_sleep=True), SETTINGS, drafters_in_sync(specs)
    )

    def mixture_step(step, drafter):
        catch_up.observe(report(step, 3, drafter=drafter), 0.01)
        return {name for name, seconds in catch_up.seconds_by_drafter().items() if seconds}

    assert mixture_step(1, "mtp") == mixture_step(2, "both") == {"dflash"}
    assert mixture_step(3, "ngram") == {"mtp", "both", "dflash"}
    assert mixture_step(4, "mtp") == {"dflash"}
    assert mixture_step(5, "dflash") == {"mtp", "ngram", "both"}

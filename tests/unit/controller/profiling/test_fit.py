import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.cost.profile import ProfileCell
from controller.profiling.errors import MeasurementError
from controller.profiling.fit import doubt_reason, fit_context, fit_costs, largest_disorder
from controller.profiling.samples import CellKey, Context, Samples

K_KV = 3e-7


def cost(gamma, size, kv_tokens, k_kv=K_KV):
    return 0.012 * (1 + 0.1 * gamma + 0.03 * size * (gamma + 1)) + k_kv * kv_tokens


def cells(gammas=(0, 1, 3), sizes=(1, 4, 16), k_kv=K_KV, noise=0.01, steps=40, sweep=True, seed=3):
    """Every context grows by a few tokens a step, as in a real load."""
    rng = np.random.default_rng(seed)
    samples_by_key = {}

    def add(gamma, size, context, start):
        samples = Samples()
        for i in range(steps):
            kv_tokens = size * (start + i * (1 + gamma // 2))
            seconds = cost(gamma, size, kv_tokens, k_kv) * (1 + noise * rng.standard_normal())
            samples.add(seconds, kv_tokens, i // 10)
        samples_by_key[CellKey("mtp", gamma, size, context)] = samples

    for gamma in gammas:
        for size in sizes:
            # Grown for longer where steps are quicker: the grid is not at one context.
            add(gamma, size, Context.GRID, 128 + 800 // size)
    if sweep:
        for gamma in (0, 1):
            add(gamma, 4, Context.SHORT, 128)
            add(gamma, 4, Context.LONG, 4096)
    return samples_by_key


def test_cells_are_the_cost_at_the_reference_context_wherever_they_were_measured():
    fit = fit_costs(cells())
    assert fit.context.seconds_per_kv_token == pytest.approx(K_KV, rel=0.1)
    for cell in fit.cells:
        at_reference = cell.batch_size * fit.kv_tokens_per_sequence
        truth = cost(cell.gamma, cell.batch_size, at_reference)
        assert cell.step_seconds == pytest.approx(truth, rel=0.01)


def test_the_error_of_the_context_term_says_how_far_off_it_may_be():
    errors = []
    for seed in range(40):
        term = fit_context(cells(noise=0.05, seed=seed))
        errors.append(abs(term.seconds_per_kv_token - K_KV) / term.error)
    # Standard errors: of a normal distribution the mean is 0.8, and 1 in 20 lies beyond 2.
    assert 0.4 < np.mean(errors) < 1.3


@given(st.floats(0, 1e-5))
def test_without_noise_the_context_term_is_exact(k_kv):
    term = fit_context(cells(k_kv=k_kv, noise=0.0, steps=6))
    assert term.seconds_per_kv_token == pytest.approx(k_kv, abs=1e-9)


def test_a_context_term_is_never_negative():
    term = fit_context(cells(k_kv=-1e-7, noise=0.0))
    assert term.seconds_per_kv_token == 0
    assert term.measured


def test_without_a_sweep_the_context_term_is_zero_and_says_so():
    fit = fit_costs(cells(sweep=False))
    assert fit.context.seconds_per_kv_token == 0
    assert not fit.context.measured


def test_half_a_sweep_is_none():
    half = {k: s for k, s in cells().items() if k.context is not Context.LONG}
    assert not fit_context(half).measured


def test_cells_with_next_to_no_steps_are_left_out():
    samples_by_key = cells()
    key = CellKey("mtp", 3, 16)
    samples_by_key[key] = Samples(
        samples_by_key[key].seconds[:2],
        samples_by_key[key].kv_tokens[:2],
        samples_by_key[key].rounds[:2],
    )
    assert not any(c.gamma == 3 and c.batch_size == 16 for c in fit_costs(samples_by_key).cells)


def test_an_empty_grid_is_refused():
    with pytest.raises(MeasurementError, match="no cell of the grid"):
        fit_costs({CellKey("mtp", 0, 1): Samples()})


def grid(cost_of, spread=0.02):
    return [
        ProfileCell("mtp", gamma, size, cost_of(gamma, size), spread * cost_of(gamma, size), 20)
        for gamma in (0, 1, 3)
        for size in (1, 4, 16)
    ]


def test_costs_that_rise_with_batch_and_draft_length_are_not_doubted():
    assert largest_disorder(grid(lambda gamma, size: cost(gamma, size, 0))) == 0
    assert doubt_reason(grid(lambda gamma, size: cost(gamma, size, 0))) == ""


def test_a_small_batch_that_costs_more_than_a_large_one_casts_doubt():
    def busy_once(gamma, size):
        return cost(gamma, size, 0) * (4 if size == 1 else 1)

    assert largest_disorder(grid(busy_once)) > 0.5
    assert "costs up to" in doubt_reason(grid(busy_once))


def test_so_does_a_wide_spread():
    doubt = doubt_reason(grid(lambda gamma, size: cost(gamma, size, 0), spread=0.4))
    assert "spread by 40%" in doubt

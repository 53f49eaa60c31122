"""Without a profile on an unknown device: cautious at first, and soon near the optimum.

A run of this length takes seconds, so that these are the cells that are hardest and most common;
`controller simulate --suite cold-start` runs all.
"""

import pytest

from simulator.cold_start import (
    CAUTIOUS_STEPS,
    WORTHWHILE_GAIN,
    cold_start_cases,
    run_cold_start,
)

CELLS = {cell.name: cell for cell in cold_start_cases((1, 8, 64))}

# A single sequence shows one draft a step: what it lost before that was known is luck, and so is
# how far its draft length has come.
LEAST_OF_OFF = {1: 0.97}
LEAST_SETTLED = {1: 0.93}

CHOSEN = [
    (f"{engine}/{traffic}/B={size}", seed)
    for engine in ("h100-llama3.1-8b", "tide-llama3.3-70b", "tide-gpt-oss-120b")
    for traffic in ("prose", "code", "garbled")
    for size, seed in ((1, 0), (8, 1), (64, 2))
    if f"{engine}/{traffic}/B={size}" in CELLS
]


@pytest.mark.parametrize(("name", "seed"), CHOSEN)
def test_it_starts_cautiously_and_finds_what_pays(name, seed):
    cell = CELLS[name]
    run = run_cold_start(cell, seed)
    assert run.ratio_to_off >= LEAST_OF_OFF.get(cell.batch_size, 0.98)
    if run.gain >= WORTHWHILE_GAIN:
        assert run.settled_ratio >= LEAST_SETTLED.get(cell.batch_size, 0.95)


def test_the_first_step_does_not_speculate_and_the_second_length_comes_after_the_first():
    run = run_cold_start(CELLS["h100-llama3.1-8b/code/B=8"], 0)
    assert run.gammas[0] == 0
    ran = list(dict.fromkeys(run.gammas))
    assert ran[:3] == [0, 1, 2]
    assert len(run.gammas) > CAUTIOUS_STEPS


def test_prose_on_an_unknown_device_is_not_drafted_seven_deep():
    run = run_cold_start(CELLS["tide-llama3.3-70b/prose/B=8"], 3)
    assert sum(gamma >= 4 for gamma in run.gammas[:100]) == 0

"""Whatever the estimates say: in no 500 steps is the controller far below plain decoding.

Every run deals the same scenarios.  Others, more of them, and the counterexample shrunk:

    SAFETY_SEED=7 SAFETY_EXAMPLES=1000 SAFETY_SHRINK=1 \\
        make test ARGS=tests/unit/controller/core/test_never_far_below_off.py

What must hold here is what holds today; the bar is higher.  `python -m
tools.bench.safety_bench` measures it over a hundred thousand scenarios, each with a number
of its own, and lists those below the bar, of which there should be one in a thousand.
"""

import os
import tempfile
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, seed, settings

from tests.support.against_off import BAR, WINDOW, against_off
from tests.support.dealing import without_constants_of_modules
from tests.support.random_scenarios import DrawnScenario, scenarios

EXAMPLES: Final = int(os.environ.get("SAFETY_EXAMPLES", "120"))
SEED: Final = int(os.environ.get("SAFETY_SEED", "1"))
_PHASES: Final = [Phase.generate, *([Phase.shrink] if os.environ.get("SAFETY_SHRINK") else [])]
# The lowest window of any scenario, and the share of scenarios with one below the bar.
LOWEST: Final = 0.85
SHARE_BELOW: Final = 0.09
# Where a counterexample is written to.
_FOLDER: Final = Path("build/safety")


@pytest.mark.slow
# Only a hang takes so long: nothing that is tested depends on the machine's speed.
@pytest.mark.timeout(1800 + 10 * EXAMPLES)
def test_in_hardly_any_500_steps_of_random_scenarios_is_it_worth_less_than_98_percent_of_off():
    worst: list[float] = []

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=_PHASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios())
    def every_window_holds(drawn: DrawnScenario) -> None:
        with tempfile.TemporaryDirectory() as folder:
            comparison = against_off(drawn.make_scenario(Path(folder)), by_request=drawn.has_memory)
        assume(comparison is not None)
        assert comparison is not None
        worst.append(comparison.worst)
        if comparison.worst < LOWEST:
            _FOLDER.mkdir(parents=True, exist_ok=True)
            description = (
                f"{comparison.worst:.4f} of plain decoding in {WINDOW} steps from "
                f"{comparison.begins}"
            )
            note(f"{drawn.write(_FOLDER, 'counterexample', description)}: {description}")
        assert comparison.worst >= LOWEST

    with without_constants_of_modules():
        every_window_holds()
    below = sorted(one for one in worst if one < BAR)
    print(f"{len(below)} of {len(worst)} scenarios are below {BAR}: {below}")
    assert len(below) <= SHARE_BELOW * len(worst)

"""The smallest scenario file, to change one thing in."""

import copy
from typing import Any

from simulator.scenarios.fields import FieldLocations
from simulator.scenarios.scenario_file import ScenarioFile, parse_scenario

FORMULA = {
    "step": {"base_seconds": 0.005, "seconds_per_token": 2e-5, "seconds_per_kv_token": 1e-8},
    "drafters": {
        "eagle": {"gammas": [1, 3, 7], "seconds_per_pass": 4e-4, "seconds_per_token": 1e-6}
    },
}
VALUES: dict[str, Any] = {
    "name": "small",
    "engine": {"max_batch_size": 32},
    "cost": {"formula": FORMULA},
    "traffic": {
        "code": {"geometric": {"eagle": 0.7}},
        "prose": {"geometric": {"eagle": 0.3}},
    },
    "phases": [{"kind": "code", "batch": 4, "tokens": 100}],
}


def values(**changes: Any) -> dict[str, Any]:
    """The file's contents with other top-level sections; ... leaves one out."""
    section_values = copy.deepcopy(VALUES) | changes
    return {name: value for name, value in section_values.items() if value is not ...}


def file(**changes: Any) -> ScenarioFile:
    """The checked file."""
    return parse_scenario(values(**changes), FieldLocations("small.yaml"))

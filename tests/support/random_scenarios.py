"""Scenarios drawn at random over the whole schema of scenario files, for hypothesis.

Numbers come from grids that are even on the scale that matters, mostly the logarithm, so that
drafting is cheap in some scenarios and expensive in others, and off best or worst.  Every draw
shrinks towards the plainest scenario: one phase, one drafter, an exact profile, no noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from simulator.scenarios.fields import FieldLocations
from simulator.scenarios.scenario_file import Scenario, parse_scenario
from tests.support.random_costs import Cost, costs, graded

Draw = st.DrawFn

_SHARES = [i / 20 for i in range(21)]
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# Of the best arm, in all.
_STEPS = (600, 1000, 1600)


@dataclass(frozen=True)
class DrawnScenario:
    """A scenario file before it is written.  files: name -> text of what it names."""

    document: dict[str, Any]
    files: dict[str, str]

    @property
    def has_memory(self) -> bool:
        """Tells whether requests of a kind differ."""
        return has_memory(self.document)

    def make_scenario(self, folder: Path) -> Scenario:
        """Makes the scenario; its files are written to the folder."""
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return parse_scenario(self.document, FieldLocations("drawn")).make_scenario(folder)

    def write(self, folder: Path, name: str, comment: str = "") -> Path:
        """Writes the scenario file and those that it names, which get its name before theirs."""
        document = self.document
        for old, text in self.files.items():
            new = f"{name}-{old}"
            (folder / new).write_text(text)
            table = {d: new if f == old else f for d, f in document["cost"]["table"].items()}
            document = document | {"cost": document["cost"] | {"table": table}}
        path = folder / f"{name}.yaml"
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        path.write_text(lines + yaml.safe_dump(document | {"name": name}, sort_keys=False))
        return path


def has_memory(document: dict[str, Any]) -> bool:
    """Returns whether requests of a kind differ in the scenario of this file."""
    return any("memory" in section for section in document["traffic"].values())


@st.composite
def scenarios(draw: Draw) -> DrawnScenario:
    """Any scenario that runs for some 600 to 2,000 steps."""
    cost = draw(costs())
    traffic, kinds = draw(_traffic(cost.drafters))
    document: dict[str, Any] = {
        "name": "drawn",
        "seeds": 1,
        "engine": draw(_engine(cost.max_batch_size)),
        "cost": cost.section,
        "profile": draw(_profile(cost)),
        "traffic": traffic,
    }
    if draw(_one_in(5)):
        document["arrivals"] = draw(_arrivals(cost, kinds, traffic))
    else:
        document |= draw(_phases(cost, kinds))
    return DrawnScenario(document, cost.files)


def _one_in(n: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([*[False] * (n - 1), True])


@st.composite
def _engine(draw: Draw, max_batch_size: int) -> dict[str, Any]:
    section: dict[str, Any] = {
        "max_batch_size": max_batch_size,
        "lag_steps": draw(st.sampled_from([1, 1, 1, 0, 2, 4])),
        "step_noise": draw(st.sampled_from([0.0, 0.01, 0.03, 0.05, 0.1])),
    }
    if draw(_one_in(5)):
        section["outlier_share"] = draw(st.sampled_from([0.001, 0.003, 0.01]))
        section["outlier_factor"] = draw(st.sampled_from([3, 10]))
    if draw(_one_in(5)):
        section["pace"] = draw(st.sampled_from([0.02, 0.05, 0.1]))
    if draw(_one_in(6)):
        section["prefill"] = "chunked"
        section["prefill_chunk_tokens"] = draw(st.sampled_from([512, 2048, 8192]))
    if draw(_one_in(4)):
        section["warm_factor"] = draw(st.sampled_from([1.0, 1.02, 1.1]))
    if draw(_one_in(6)):
        section["stale_steps"] = draw(st.sampled_from([1, 4, 8]))
        section["stale_after"] = draw(st.sampled_from([8, 2, 50]))
        section["stale_acceptance"] = draw(st.sampled_from([0.3, 0.0, 0.7]))
    return section


@st.composite
def _profile(draw: Draw, cost: Cost) -> dict[str, Any] | None:
    """Up to a factor of 5 wrong in common, and of 2 to 3 in parts; or none at all."""
    if draw(_one_in(10)):
        return None
    section: dict[str, Any] = {"noise": draw(st.sampled_from([0.0, 0.01, 0.03, 0.1]))}
    if section["noise"]:
        section["noise_seed"] = draw(st.integers(0, 99))
        section["noise_shape"] = draw(st.sampled_from(["lognormal", "uniform"]))
    if draw(_one_in(3)):
        section["factor"] = draw(graded(0.2, 5.0, 1.0))
    if draw(_one_in(4)):
        section["drafting"] = draw(graded(1 / 3, 3.0, 1.0))
    if draw(_one_in(4)):
        arms = [(name, gamma) for name, gammas in cost.drafters.items() for gamma in (0, *gammas)]
        wrong: dict[str, dict[int, float]] = {}
        for name, gamma in draw(st.lists(st.sampled_from(arms), min_size=1, unique=True)):
            wrong.setdefault(name, {})[gamma] = draw(graded(0.5, 2.0, 1.0))
        section["by_arm"] = wrong
    if draw(_one_in(4)):
        sizes = [b for b in _BATCHES if b <= cost.max_batch_size]
        chosen_sizes = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=3, unique=True))
        section["by_batch_size"] = {size: draw(graded(0.5, 2.0, 1.0)) for size in chosen_sizes}
    if draw(_one_in(5)):
        section["context_term"] = False
    if draw(_one_in(5)):
        section["kv_tokens_per_sequence"] = draw(st.sampled_from([64, 2048, 16384]))
    return section


@st.composite
def _traffic(draw: Draw, drafters: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(the section, kinds that phases may name); all requests have the same mean length."""
    output = draw(st.sampled_from([256, 128, 64, 512]))
    context = draw(st.sampled_from([384, 100, 2000, 16000]))
    lengths = {"output_tokens_mean": output, "context_tokens_mean": context}
    names = [f"kind{i}" for i in range(draw(st.integers(1, 3)))]
    section = {name: draw(_kind(list(drafters))) | lengths for name in names}
    if len(names) > 1 and draw(_one_in(3)):
        weights = {name: draw(st.sampled_from([1, 0.2, 5])) for name in names}
        section["mixed"] = {"mix": weights, "labelled": draw(st.booleans())} | lengths
        names = ["mixed", *names]
    return section, names


@st.composite
def _kind(draw: Draw, drafters: Sequence[str]) -> dict[str, Any]:
    shape = draw(st.sampled_from(["geometric", "positions", "survival"]))
    share = st.sampled_from(_SHARES)
    section: dict[str, Any] = {shape: {}}
    for drafter in drafters:
        if shape == "geometric":
            section[shape][drafter] = draw(share)
            continue
        curve = draw(st.lists(share, min_size=1, max_size=5))
        if shape == "survival":
            curve = [round(math.prod(curve[: k + 1]), 6) for k in range(len(curve))]
        section[shape][drafter] = curve
    if draw(_one_in(4)):
        section["memory"] = draw(_memory(drafters))
    return section


@st.composite
def _memory(draw: Draw, drafters: Sequence[str]) -> dict[str, Any]:
    """Around the fits to recorded requests."""

    def parts() -> dict[str, Any]:
        return {
            "level_spread": draw(st.sampled_from([0.5, 0.0, 0.25, 1.0])),
            "passage_spread": draw(st.sampled_from([0.8, 0.0, 1.5])),
            "passage_tokens": draw(st.sampled_from([2, 8, 30])),
        }

    section = parts()
    if draw(_one_in(4)):
        section["drift_spread"] = draw(st.sampled_from([0.3, 0.6]))
        section["drift_requests"] = draw(st.sampled_from([100, 20]))
    if len(drafters) > 1:
        section["correlation"] = draw(st.sampled_from([0.25, 0.0, 1.0]))
        if draw(_one_in(3)):
            section["by_drafter"] = {drafters[-1]: parts()}
    return section


@st.composite
def _phases(draw: Draw, cost: Cost, kinds: Sequence[str]) -> dict[str, Any]:
    """One to four phases, again and again until there are steps enough."""
    total_steps = draw(st.sampled_from(_STEPS))
    batches = st.sampled_from([b for b in _BATCHES if b <= cost.max_batch_size])
    count = draw(st.integers(1, 4))
    length = draw(st.sampled_from([total_steps, 200, 100, 50, 20])) if count > 1 else total_steps
    phases = []
    for _ in range(count):
        phase: dict[str, Any] = {"kind": draw(st.sampled_from(kinds)), "batch": draw(batches)}
        if count > 1:
            phase["begins"] = draw(st.sampled_from(["drained", "changed", "replaced"]))
        if draw(_one_in(3)):
            phase["context_tokens_mean"] = draw(st.sampled_from([100, 500, 8000, 60_000]))
        if draw(_one_in(4)):
            # Up to two tokens a step and sequence.
            phase["tokens"] = round(length * draw(st.sampled_from([1, 2])))
        else:
            phase["steps"] = length
        phases.append(phase)
    return {
        "phases": phases,
        "repeat": max(1, math.ceil(total_steps / (length * count))),
        "requests": draw(st.sampled_from([128, 64, 256])),
    }


@st.composite
def _arrivals(
    draw: Draw, cost: Cost, kinds: Sequence[str], traffic: dict[str, Any]
) -> dict[str, Any]:
    """One to three rates, below and above what the engine serves without drafting."""
    kind = draw(st.sampled_from(kinds))
    count = draw(st.integers(1, 3))
    steps = draw(st.sampled_from(_STEPS)) / count
    context = traffic[kind]["context_tokens_mean"]
    rates = []
    for _ in range(count):
        batch = draw(st.sampled_from([b for b in _BATCHES if b <= cost.max_batch_size]))
        step = cost.off_seconds(batch, context)
        load = draw(st.sampled_from([0.9, 0.3, 0.6, 1.1]))
        seconds = max(1, round(steps * step))
        rate = load * batch / step / traffic[kind]["output_tokens_mean"]
        rate_section: dict[str, Any] = {
            "seconds": seconds,
            "requests_per_second": float(f"{max(rate, 5 / seconds):.3g}"),
        }
        if draw(_one_in(3)):
            rate_section["kind"] = draw(st.sampled_from(kinds))
        rates.append(rate_section)
    return {"kind": kind, "rates": rates, "seed": draw(st.integers(0, 99))}

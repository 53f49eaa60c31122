"""Costs of a step drawn at random: formulas, tables with their bumps, and published tables."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from simulator import published
from simulator.scenarios.cost import CostSection
from simulator.scenarios.fields import FieldLocations
from simulator.step_costs import COLUMNS

_SIZES = (64, 8, 32, 128)
# Draft lengths by kind of drafter.
_GAMMAS: dict[str, list[tuple[int, ...]]] = {
    "mtp": [(1, 2, 3, 5, 7), (3,), (1,), (1, 2, 3), (2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8)],
    "standalone": [(1, 3, 5, 7), (4,), (1, 2, 4, 8, 16)],
    "dflash": [(3, 7, 15), (7,), (1, 3, 7)],
    "ngram": [(3, 7), (1, 3, 7, 15), (5,)],
}


@dataclass(frozen=True)
class Cost:
    """The section `cost`.

    drafters: name -> draft lengths.  off_seconds: (batch, context of a sequence) -> seconds of
    plain decoding, about.  files: name -> text of the files that the section names.
    """

    section: dict[str, Any]
    drafters: dict[str, tuple[int, ...]]
    max_batch_size: int
    off_seconds: Callable[[int, float], float]
    files: dict[str, str] = field(default_factory=dict)


def graded(low: float, high: float, plain: float, steps: int = 16) -> st.SearchStrategy[float]:
    """Numbers even on the logarithm from low to high, and `plain`, towards which they shrink."""
    values = [low * (high / low) ** (i / steps) for i in range(steps + 1)]
    values.sort(key=lambda value: abs(math.log(value / plain)))
    return st.sampled_from([plain, *(float(f"{value:.3g}") for value in values)])


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """Any of the sources but a profile, which prices what a table does."""
    source = draw(st.sampled_from(["formula", "formula", "formula", "table", "published"]))
    if source == "published":
        return draw(_published())
    cost = draw(_formula())
    return draw(_tabulated(cost)) if source == "table" else cost


@st.composite
def _formula(draw: st.DrawFn) -> Cost:
    base = draw(graded(0.7e-3, 40e-3, 7e-3))
    # Tokens of a pass, and of context, at which they take as long as everything else.
    token = base / draw(graded(16, 1024, 256))
    step: dict[str, Any] = {"base_seconds": base, "seconds_per_token": _short(token)}
    if draw(st.booleans()):
        step["seconds_per_kv_token"] = _short(base / draw(graded(3e5, 3e7, 3e6)))
    if draw(st.sampled_from([False, False, False, True])):
        step["seconds_per_sequence"] = _short(base / draw(graded(16, 1024, 256)))
    drafters: dict[str, Any] = {}
    for i in range(draw(st.sampled_from([1, 1, 1, 2, 2, 3]))):
        kind = draw(st.sampled_from(list(_GAMMAS)))
        section: dict[str, Any] = {"kind": kind, "gammas": [*draw(st.sampled_from(_GAMMAS[kind]))]}
        if kind == "ngram":
            section["share_of_step"] = draw(st.sampled_from([0.006, 0.0, 0.05]))
        else:
            price = "once_seconds" if kind == "dflash" else "seconds_per_pass"
            section[price] = _short(base * draw(graded(0.005, 0.6, 0.05)))
            section["seconds_per_token"] = _short(token * draw(graded(0.01, 0.3, 0.03)))
        drafters[f"{kind}{i}"] = section
    section = {"formula": {"step": step, "drafters": drafters}} | draw(_prices(base, token))

    def off_seconds(batch: int, context: float) -> float:
        sequence_seconds: float = step["seconds_per_token"] + step.get("seconds_per_sequence", 0.0)
        of_context: float = context * step.get("seconds_per_kv_token", 0.0)
        return base + batch * (sequence_seconds + of_context)

    return Cost(
        section,
        {name: tuple(drafter["gammas"]) for name, drafter in drafters.items()},
        draw(st.sampled_from(_SIZES)),
        off_seconds,
    )


@st.composite
def _prices(draw: st.DrawFn, base: float, token: float) -> dict[str, Any]:
    """What a change of arm costs, and what a drafter that missed tokens pays."""
    section: dict[str, Any] = {}
    if draw(st.booleans()):
        section["switch_seconds"] = draw(
            st.sampled_from([0.0, 5e-4, 1e-3, _short(0.05 * base), _short(0.3 * base)])
        )
    if draw(st.sampled_from([False, False, True])):
        section["catch_up_seconds_per_token"] = _short(token * draw(graded(0.003, 0.3, 0.03)))
    if draw(st.sampled_from([False, False, True])):
        section["catch_up_pass_seconds"] = _short(base * draw(graded(0.003, 0.3, 0.05)))
    if draw(st.sampled_from([False] * 7 + [True])):
        section["scale"] = draw(st.sampled_from([0.3, 2.0]))
    return section


@st.composite
def _tabulated(draw: st.DrawFn, cost: Cost) -> Cost:
    """The same costs as a table, every cell up to a fifth off the smooth formula."""
    folder, place = Path(), FieldLocations("drawn")
    section = {name: value for name, value in cost.section.items() if name == "formula"}
    surface = CostSection.model_validate(section).make_surface(cost.max_batch_size, folder, place)
    sizes = [2**i for i in range(cost.max_batch_size.bit_length())]
    rough = st.sampled_from([1.0, 1.05, 0.95, 1.1, 0.9, 1.2, 0.8])
    files: dict[str, str] = {}
    for name in cost.drafters:
        lines = [",".join(COLUMNS)]
        for i, arm in enumerate(surface.arms):
            if arm.drafter == name:
                lines += [
                    f"{size},{arm.gamma + 1},{draw(rough) * float(surface.seconds[i, size]):.6g}"
                    for size in sizes
                ]
        files[f"{name}.csv"] = "\n".join(lines) + "\n"
    formula = cost.section["formula"]
    other_sections = {name: value for name, value in cost.section.items() if name != "formula"}
    kinds = {name: drafter["kind"] for name, drafter in formula["drafters"].items()}
    table_section = {
        "table": {name: f"{name}.csv" for name in cost.drafters},
        "kinds": kinds,
    } | other_sections
    price = formula["step"].get("seconds_per_kv_token")
    if price is not None:
        table_section |= {"seconds_per_kv_token": price, "kv_reference": surface.kv_reference}
    return Cost(table_section, cost.drafters, cost.max_batch_size, cost.off_seconds, files)


@st.composite
def _published(draw: st.DrawFn) -> Cost:
    name = draw(st.sampled_from(sorted(published.surface_names())))
    surface = published.published_surface(name)
    names = [spec.name for spec in surface.drafters]
    drafter_names = draw(st.sampled_from([names, *[[single] for single in names]]))
    base = float(surface.seconds[0, 1])
    section: dict[str, Any] = {"published": name, "drafters": drafter_names}
    section |= draw(_prices(base, surface.prefill_seconds_per_token))
    if draw(st.booleans()):
        section["gammas"] = draw(st.sampled_from([[1, 2, 3], [1, 3, 5], [3]]))
    size = min(surface.max_batch_size, 128)
    priced = CostSection.model_validate(section).make_surface(size, Path(), FieldLocations("drawn"))
    gammas = {d.name: tuple(g for g in d.gammas if g) for d in priced.drafters}

    def off_seconds(batch: int, context: float) -> float:
        return float(priced.step_seconds(batch, batch * context)[0])

    return Cost(section, gammas, size, off_seconds)


def _short(value: float) -> float:
    return float(f"{value:.3g}")

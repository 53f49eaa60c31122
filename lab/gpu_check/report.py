"""Writes the check's findings as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from lab.gpu_check import learning


def markdown(found: Mapping[str, Any]) -> str:
    """Makes the tables of one result.json."""
    sections = [
        f"# {found['shape']}: {where(found)}",
        "Weights are dummies, and drafts are accepted by chance: "
        + ", ".join(f"{name} {value}" for name, value in found["acceptance"].items())
        + " a position.",
    ]
    if "startup" in found:
        sections.append(_graphs(found))
    if "arms" in found:
        sections += [_arms(found), _steered(found)]
    if prices := _prices(found):
        sections.append(table(["price", ""], prices))
    if "profile" in found:
        sections.append(costs(found["profile"]))
    return "\n\n".join(sections)


def problems(found: Mapping[str, Any]) -> list[str]:
    """Returns the problems found, in sentences; empty for a check that passed.

    Eager steps, and passes that have no graphs at all, are problems only where graphs are expected.
    """
    exact: Mapping[str, Any] = found.get("exact", {})
    wrong = [
        one["sentence"] for one in exact.get("differences", []) if one["verdict"] != "rounding"
    ]
    if "learning" in found:
        wrong += learning.problems(found["learning"])
    if not found.get("graphs_expected"):
        return wrong
    never = [
        f"SGLang captured no graphs for {name}: it runs eagerly in every step"
        for name in found.get("startup", {}).get("without_graphs", [])
    ]
    arms = [*found.get("graphs", {}).get("arms", []), *found.get("arms", [])]
    eager = [
        f"{arm['drafter']} gamma {arm['gamma']}: {arm['eager_steps']} of {arm['steps']} steps ran "
        "without a graph"
        for arm in arms
        if arm["eager_steps"]
    ]
    return wrong + never + eager


def where(found: Mapping[str, Any]) -> str:
    """Names the machine and the versions."""
    machine, versions = found["machine"], found["versions"]
    gpus = ", ".join(machine["gpus"]) or f"{machine['processor']} (no GPU)"
    return f"{gpus}; SGLang {versions['sglang']}, torch {versions['torch']}"


def _graphs(found: Mapping[str, Any]) -> str:
    startup = found["startup"]
    rows = [
        [
            gamma,
            f"{state['seconds']:.1f}",
            f"{state['device_bytes'] / 2**20:.0f}",
            str(state["largest_batch"] or "all"),
        ]
        for gamma, state in startup["prepared"].items()
    ]
    seconds = ", ".join(f"{name} {value}" for name, value in startup["seconds"].items())
    return f"Seconds until ready: {seconds}.\n\n" + table(
        ["γ prepared", "seconds", "MiB", "largest batch"], rows
    )


def _arms(found: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{arm['drafter']} {arm['gamma']}" if arm["gamma"] else "0",
            f"{arm['tokens_per_second']:.1f}",
            str(arm["steps"]),
            str(arm["eager_steps"]),
            f"{arm['acceptance_length']:.2f}",
        ]
        for arm in found["arms"]
    ]
    expected = "" if found["graphs_expected"] else " (graphs are off)"
    return f"The moving load, held to one arm{expected}:\n\n" + table(
        ["arm", "tokens/s", "steps", "eager steps", "tokens a verification"], rows
    )


def _steered(found: Mapping[str, Any]) -> str:
    steered = found["steered"]
    lines = [
        f"- steered over {one['drafter']} {one['gamma']}: {_spread(one)}" for one in steered["over"]
    ]
    names = [name for name in steered["phases"][0] if name != "phase"]
    rows = [
        [phase["phase"], *(f"{phase[name]['median']:.1f}" for name in names)]
        for phase in steered["phases"]
    ]
    return (
        f"Steered: {_spread(steered['tokens_per_second'])} tokens/s.\n\n"
        + "\n".join(lines)
        + "\n\nTokens/s by phase (median):\n\n"
        + table(["phase", *names], rows)
    )


def _prices(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    if switch := found.get("switch"):
        what = f"changing the arm at B = {switch['batch_size']}, {switch['switches']} times"
        price = f"{switch['microseconds']:.0f} µs, {100 * switch['share']:.1f} % of a step"
        rows.append([what, price])
    if pinned := found.get("pinned"):
        what = f"plugin at γ = {pinned['gamma']}, over the engine without it"
        rows.append([what, _spread(pinned)])
    rows += [
        [f"asleep at B = {size}, over an engine without speculation", _spread(ratio)]
        for size, ratio in found.get("asleep", {}).items()
    ]
    return rows


def costs(profile: Mapping[str, Any]) -> str:
    """Makes the table of C(γ, B) in milliseconds."""
    cells = profile["cells"]
    arms = list(dict.fromkeys((c["drafter"], c["gamma"]) for c in cells))
    sizes = sorted({c["batch_size"] for c in cells})
    seconds = {(c["drafter"], c["gamma"], c["batch_size"]): c["step_seconds"] for c in cells}
    rows = []
    for drafter, gamma in arms:
        row = [f"{drafter} {gamma}" if gamma else "0"]
        for size in sizes:
            value = seconds.get((drafter, gamma, size))
            row.append("" if value is None else f"{1e3 * value:.2f}")
        rows.append(row)
    return "Milliseconds a step:\n\n" + table(["arm", *(f"B={size}" for size in sizes)], rows)


def _spread(spread: Mapping[str, Any]) -> str:
    return f"{spread['median']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a Markdown table; the first column is text, the others are numbers."""
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join(["---", *["---:"] * (len(columns) - 1)]) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines)

"""Writes the one page that somebody with a GPU sends: machine, verdicts, counts and costs."""

from collections.abc import Mapping
from typing import Any

from lab.gpu_check import learning, report

_DIFFERENCES_SHOWN = 5


def markdown(found: Mapping[str, Any]) -> str:
    """Makes the page of one result.json."""
    rows = [
        *([["exact", *_exact(found["exact"])]] if "exact" in found else []),
        *([["learning", *_learning(found["learning"])]] if "learning" in found else []),
        *([["graphs", *_graphs(found)]] if "graphs" in found else []),
        *([["costs", "measured", f"{len(found['profile']['cells'])} cells"]]
          if "profile" in found else []),
    ]  # fmt: skip
    sections = [
        f"# GPU check: {report.where(found)}",
        f"Shape of `graphs` and `costs`: {found['shape']}. Seconds: {found['seconds']}.",
    ]
    if rows:
        sections.append(_text_table(["part", "verdict", "details"], rows))
    if problems := report.problems(found):
        shown = [f"- {problem}" for problem in problems[:_DIFFERENCES_SHOWN]]
        if more := len(problems) - len(shown):
            shown.append(f"- and {more} more, in result.json")
        sections.append("Problems:\n\n" + "\n".join(shown))
    if "profile" in found:
        sections.append(report.costs(found["profile"]))
    return "\n\n".join(sections)


def _exact(exact: Mapping[str, Any]) -> list[str]:
    details = (
        f"{exact['tokens']} tokens, {len(exact['arms'])} arms, {exact['wrong']} wrong, "
        f"{exact['rounding']} near-ties that rounding decided"
    )
    return ["FAILED" if exact["wrong"] else "passed", details]


def _learning(found: Mapping[str, Any]) -> list[str]:
    online = found["online"] or {"updates": 0, "refused": 0, "restored": 0}
    lengths = ", ".join(f"{length:.2f}" for length in found["acceptance_lengths"])
    details = (
        f"{found['wrong']} wrong tokens; {online['updates']} updates landed, {online['refused']} "
        f"refused, {online['restored']} taken back; acceptance length by play: {lengths}; "
        f"{_synchronisations(found['syncs'])}"
    )
    return ["FAILED" if learning.problems(found) else "passed", details]


def _synchronisations(syncs: Mapping[str, Any] | None) -> str:
    if syncs is None:
        return "synchronisations: not watched (no CUDA)"
    shim, others = sum(syncs["shim"].values()), sum(syncs["others"].values())
    return f"synchronisations in {syncs['steps']} steps: {shim} shim, {others} SGLang"


def _graphs(found: Mapping[str, Any]) -> list[str]:
    graphs = found["graphs"]
    eager, beyond, steps = (
        sum(arm[name] for arm in graphs["arms"]) for name in ("eager_steps", "beyond", "steps")
    )
    details = f"{eager} of {steps} steps eager ({beyond} more beyond the captured batch sizes); "
    passes = ", ".join(f"{name} {count}" for name, count in graphs["passes"].items())
    details += f"steps with an eager pass: {passes or 'not counted (no graphs)'}; "
    if never := found["startup"]["without_graphs"]:
        details += f"no graphs at all for {', '.join(never)}; "
    details += _synchronisations(graphs["syncs"])
    if not found["graphs_expected"]:
        return ["no graphs", details]
    return ["FAILED" if eager or never else "passed", details]


def _text_table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

"""A run's table, its result.json, and its plot."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from lab.harness.measured import run_facts, write_result
from lab.harness.terminal import Terminal
from tools.soak.growth import TOLERANCES, lives
from tools.soak.reconcile import served_tokens
from tools.soak.run import Options, SoakResult

_COLUMNS = ["process", "of it", "first", "last", "grown", "an hour", "allowed", ""]


def show(result: SoakResult, terminal: Terminal) -> None:
    """Prints the result for a person."""
    terminal.table(
        "What each process holds, from its warm-up to its end",
        _COLUMNS,
        [
            [
                f"{growth.name} {growth.pid}",
                growth.kind.replace("_", " "),
                f"{growth.first:.6g}",
                f"{growth.last:.6g}",
                f"{growth.grown:.3g}",
                f"{growth.per_hour:.3g}",
                f"{growth.allowed:.3g}",
                "TOO MUCH" if growth.is_too_much else "",
            ]
            for growth in result.growths
        ],
    )
    terminal.heading("Ran, and on record")
    for name, value in _counts(result).items():
        terminal.say(f"{name}: {value}")
    terminal.heading("Findings")
    for name, findings in result.findings.items():
        terminal.say(f"{name}: {'none' if not findings else ''}")
        for finding in findings:
            terminal.say(f"  {finding}")


def write(result: SoakResult, options: Options) -> None:
    """Writes result.json and soak.png."""
    document = {
        **run_facts(),
        "minutes": options.minutes,
        "seconds": round(result.seconds, 1),
        "is_sound": not any(result.findings.values()),
        "findings": result.findings,
        "counts": _counts(result),
        "link": result.link,
        "growth": [
            asdict(growth) | {"per_hour": growth.per_hour, "is_too_much": growth.is_too_much}
            for growth in result.growths
        ],
        "samples": [asdict(sample) for sample in result.samples],
    }
    write_result(document, options.output)
    _draw(result, options.output / "soak.png")


def _counts(result: SoakResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "steps that ran": len(result.executed_steps),
        "reports on record": len(result.record.reports),
        "sidecar's sessions": len(result.record.sessions),
        "counted as dropped": result.record.dropped,
        "tokens gained": sum(step.tokens for step in result.executed_steps),
        "tokens on record": served_tokens(result.record),
        "plans decided again": 0 if verdict is None else verdict.plans,
        "decisions again": 0 if verdict is None else verdict.decisions,
        "looks": result.probes,
        **result.load,
    }


def _draw(result: SoakResult, path: Path) -> None:
    mpl.use("agg")
    figure, axes = plt.subplots(len(TOLERANCES), 1, figsize=(10, 12), sharex=True)
    for number, (process_name, life) in enumerate(lives(result.samples)):
        for axis, kind in zip(axes, TOLERANCES, strict=True):
            values = [(sample.seconds / 60, getattr(sample, kind)) for sample in life]
            points = [point for point in values if point[1] is not None]
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=process_name, color=f"C{number}", linewidth=1
                )
    for axis, kind in zip(axes, TOLERANCES, strict=True):
        axis.set_ylabel(kind.replace("_", " "))
        axis.set_yscale("symlog" if kind in {"memory_megabytes", "log_bytes"} else "linear")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

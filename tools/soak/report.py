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
from tools.soak.run import Options, Soaked

_COLUMNS = ["process", "of it", "first", "last", "grown", "an hour", "allowed", ""]


def show(found: Soaked, terminal: Terminal) -> None:
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
            for growth in found.growths
        ],
    )
    terminal.heading("Ran, and on record")
    for name, value in _counts(found).items():
        terminal.say(f"{name}: {value}")
    terminal.heading("Findings")
    for name, findings in found.findings.items():
        terminal.say(f"{name}: {'none' if not findings else ''}")
        for finding in findings:
            terminal.say(f"  {finding}")


def write(found: Soaked, options: Options) -> None:
    """Writes result.json and soak.png."""
    document = {
        **run_facts(),
        "minutes": options.minutes,
        "seconds": round(found.seconds, 1),
        "is_sound": not any(found.findings.values()),
        "findings": found.findings,
        "counts": _counts(found),
        "link": found.link,
        "growth": [
            asdict(growth) | {"per_hour": growth.per_hour, "is_too_much": growth.is_too_much}
            for growth in found.growths
        ],
        "samples": [asdict(sample) for sample in found.samples],
    }
    write_result(document, options.output)
    _draw(found, options.output / "soak.png")


def _counts(found: Soaked) -> dict[str, Any]:
    verdict = found.verdict
    return {
        "steps that ran": len(found.ran),
        "reports on record": len(found.record.told),
        "sidecar's sessions": len(found.record.sessions),
        "counted as dropped": found.record.dropped,
        "tokens gained": sum(step.tokens for step in found.ran),
        "tokens on record": served_tokens(found.record),
        "plans decided again": 0 if verdict is None else verdict.plans,
        "decisions again": 0 if verdict is None else verdict.decisions,
        "looks": found.looks,
        **found.load,
    }


def _draw(found: Soaked, path: Path) -> None:
    mpl.use("agg")
    figure, axes = plt.subplots(len(TOLERANCES), 1, figsize=(10, 12), sharex=True)
    for number, (of, life) in enumerate(lives(found.samples)):
        for axis, kind in zip(axes, TOLERANCES, strict=True):
            values = [(sample.seconds / 60, getattr(sample, kind)) for sample in life]
            points = [point for point in values if point[1] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=of, color=f"C{number}", linewidth=1)
    for axis, kind in zip(axes, TOLERANCES, strict=True):
        axis.set_ylabel(kind.replace("_", " "))
        axis.set_yscale("symlog" if kind in {"memory_megabytes", "log_bytes"} else "linear")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

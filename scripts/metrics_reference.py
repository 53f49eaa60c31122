"""Writes docs/metrics.md from the metrics themselves; with --check, only compares."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from controller.service.metrics.decisions import DECISION, ESTIMATES, LEARNING
from controller.service.metrics.family import Family
from controller.service.metrics.sidecar import OF_THE_SIDECAR
from controller.service.metrics.steps import LINK, STEPS

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_HEAD = """# Metrics

The sidecar serves these metrics at `/metrics` (`--metrics-host`, `--metrics-port`; 127.0.0.1:9464),
with the usual `process_*` and `python_*` metrics. The dashboard and the alert rules are in
`deploy/monitoring`. This page is written from the code by `scripts/metrics_reference.py`, and
`make check` compares the two.

Every series of an engine has the label `engine`, the engine's id, and at most one more label with
few values. The counters of an engine end with its session and begin at zero with the next one. If
vLLM or SGLang have a metric for the same thing, the last column names it, and ours uses its words.

`speculation_estimated_*` are counterfactuals: what did not run cannot be timed. They are computed
from the cost table and the acceptance estimates, so they are as accurate as these;
`speculation_prediction_error_seconds_total` shows how accurate that is.

Common questions about an engine:
"""


def _rate(name: str) -> str:
    return f"rate(speculation_{name}_total[5m])"


_PLAIN = _rate("plain_seconds")
_QUERIES = (
    (
        "How many tokens does a sequence gain in a drafted step (SGLang: accept length)?",
        f"1 + {_rate('accepted_tokens')} / {_rate('drafts')}",
    ),
    (
        "What share of the drafted tokens is accepted (SGLang: accept rate)?",
        f"{_rate('accepted_tokens')} / {_rate('draft_tokens')}",
    ),
    (
        "Are as many tokens accepted as expected (1: yes)?",
        f"{_rate('accepted_tokens')} / {_rate('expected_accepted_tokens')}",
    ),
    (
        "Do steps take as long as predicted (1: yes)?",
        f"{_PLAIN} / {_rate('predicted_seconds')}",
    ),
    (
        "How much faster is it than with other choices (estimated)?",
        f"{_rate('estimated_instead_seconds')} / ignoring (instead) group_left () {_PLAIN}",
    ),
)

_SECTIONS: tuple[tuple[str, bool, tuple[Family[Any], ...]], ...] = (
    ("Decision", True, DECISION),
    ("Estimates against reality", True, ESTIMATES),
    ("Steps", True, STEPS),
    ("Link and lease", True, LINK),
    ("A drafter that learns", True, LEARNING),
    ("The sidecar", False, OF_THE_SIDECAR),
)


def reference() -> str:
    """Returns the whole page."""
    lines = [_HEAD, "| question | query |", "|---|---|"]
    lines += [*(f"| {what} | `{query}` |" for what, query in _QUERIES), ""]
    for title, of_engine, families in _SECTIONS:
        lines += [f"## {title}", "", *_table(families, of_engine=of_engine), ""]
    return "\n".join(lines)


def _table(families: Iterable[Family[Any]], *, of_engine: bool) -> Iterable[str]:
    yield "| name | type | labels | unit | meaning | vLLM, SGLang |"
    yield "|---|---|---|---|---|---|"
    for family in families:
        labels = ", ".join([*(["engine"] if of_engine else []), *filter(None, [family.label])])
        cells = (
            f"`{family.sample_name}`", family.kind.value, labels, family.unit, family.text,
            family.like and f"`{family.like}`",
        )  # fmt: skip
        yield f"| {' | '.join(cell or '–' for cell in cells)} |"


def main() -> int:
    """Writes or compares the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--file", type=Path, default=REFERENCE, help="by default docs/metrics.md")
    arguments = parser.parse_args()
    path: Path = arguments.file
    if not arguments.check:
        path.write_text(reference(), encoding="utf-8")
        return 0
    if not path.is_file() or path.read_text(encoding="utf-8") != reference():
        print(f"{path.name} is not what the code says; run python scripts/metrics_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

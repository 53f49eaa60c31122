"""Writes docs/metrics.md from the metrics themselves; with --check only compares."""

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

Written by `scripts/metrics_reference.py` from the code; `make check` compares.

The sidecar serves them at `/metrics` (`--metrics-host`, `--metrics-port`; 127.0.0.1:9464). Every
series of an engine has the label `engine`, its id, and at most one more with a handful of values;
an engine's counters end with its session and begin at zero with the next. The words are those of
vLLM and SGLang where they have one for the same thing (last column). Beside these there are the
usual `process_*` and `python_*` metrics. A dashboard and alert rules: `deploy/monitoring`.

`speculation_estimated_*` are counterfactuals: what did not run cannot be timed, so they come from
the cost table and the acceptance estimates (`controller/core/account.py`) and are as good as those;
`speculation_prediction_error_seconds_total` says how good.

What people ask for, of each engine:
"""


def _rate(name: str) -> str:
    return f"rate(speculation_{name}_total[5m])"


_PLAIN = _rate("plain_seconds")
_QUERIES = (
    (
        "tokens a sequence gains in a drafted step (SGLang: accept length)",
        f"1 + {_rate('accepted_tokens')} / {_rate('drafts')}",
    ),
    (
        "share of drafted tokens that is accepted (SGLang: accept rate)",
        f"{_rate('accepted_tokens')} / {_rate('draft_tokens')}",
    ),
    (
        "accepted tokens, observed over expected",
        f"{_rate('accepted_tokens')} / {_rate('expected_accepted_tokens')}",
    ),
    (
        "step seconds, observed over predicted",
        f"{_PLAIN} / {_rate('predicted_seconds')}",
    ),
    (
        "speed over other choices, estimated",
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
    """The whole page."""
    lines = [_HEAD, "| what | query |", "|---|---|"]
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
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--file", type=Path, default=REFERENCE, help="by default docs/metrics.md")
    arguments = parser.parse_args()
    path: Path = arguments.file
    if not arguments.check:
        path.write_text(reference(), encoding="utf-8")
        return 0
    if not path.is_file() or path.read_text(encoding="utf-8") != reference():
        print(f"{path.name} is not what the code says: python scripts/metrics_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

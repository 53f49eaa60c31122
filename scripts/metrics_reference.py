"""Writes docs/metrics.md from the metrics themselves; with --check, only compares."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from controller.service.metrics.engines import (
    DECISION_FAMILIES,
    ESTIMATE_FAMILIES,
    LEARNING_FAMILIES,
    LINK_FAMILIES,
    STEP_FAMILIES,
)
from controller.service.metrics.family import MetricFamily
from controller.service.metrics.sidecar import SIDECAR_FAMILIES

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_HEAD = """# Metrics

The sidecar serves these metrics at `/metrics` (`--metrics-host`, `--metrics-port`; 127.0.0.1:9464),
with the usual `process_*` and `python_*` metrics. This page is written from the code by
`scripts/metrics_reference.py`, and `make check` compares the two.

The dashboard and the alert rules are in `deploy/monitoring`. Tests run every query of both, and of
this page, in a Prometheus that scrapes a sidecar, and hold the dashboard against the models that
Grafana publishes for its version 11.6. It has not been opened in Grafana itself, which no registry
of packages offers.

Every series of an engine has the label `engine`, the engine's id, and at most one more label with
few values. The counters of an engine end with its session and begin at zero with the next one. If
vLLM or SGLang have a metric for the same thing, the last column names it, and ours uses its words.

`speculation_estimated_*` are counterfactuals: what did not run cannot be timed. They are computed
from the cost table and the acceptance estimates, so they are as accurate as these;
`speculation_prediction_error_seconds_total` shows how accurate that is.

Common questions about an engine:
"""

_DEFINITIONS = """## Acceptance in the words of SGLang, vLLM and AIPerf

The same words are used for different quantities elsewhere, so this table says what is divided by
what. *Accepted* and *draft tokens* are without the bonus token, the one that every verification
adds. A *draft* is one sequence in one step of which a draft token was verified. A *sequence step*
is one sequence in one step, drafted for or not. The gauges cover the last minute; `rate()` of the
counters gives the same ratio over any other time and over several engines. Names are those of
SGLang 0.5.23, vLLM 0.32 and AIPerf 0.13.
"""

_COUNTS = """## Are these counts the engine's own?

Tests hold them against the counters of the real SGLang and the real vLLM, over requests that end by
a stop, by their length, by a grammar or by an abort, requests without speculation, and draft
lengths that change. `_total` is left out.
"""

# Ours, SGLang's, vLLM's.
_SAME_COUNTS = (
    (
        "`speculation_sequence_steps`",
        (
            "equals `spec_verify_ct` of all requests, which `sglang:spec_verify_calls_total` adds "
            "when they end; `sglang:spec_accept_length` divides by these and "
            "`speculation_ended_sequence_steps`"
        ),
        "–",
    ),
    (
        "`speculation_drafts`",
        "–",
        (
            "equals `spec_decode_num_drafts`, which with async scheduling also counts drafts of "
            "which a grammar left nothing"
        ),
    ),
    (
        "`speculation_draft_tokens`",
        (
            "`spec_num_proposed_drafts` of a request is the draft length of the engine's start "
            "times its steps, whatever ran"
        ),
        "equals `spec_decode_num_draft_tokens`",
    ),
    (
        "`speculation_accepted_tokens`",
        (
            "equals `spec_num_correct_drafts` of all requests, by number "
            "`spec_correct_drafts_histogram`; a request without speculation can have accepted the "
            "token in place of its drafts"
        ),
        "equals `spec_decode_num_accepted_tokens`",
    ),
    (
        "`speculation_generated_tokens`",
        "more than was delivered: what lies behind the end of an answer was verified too",
        "likewise",
    ),
    (
        "`speculation_delivered_tokens`",
        (
            "equals `sglang:generation_tokens_total` without the first token of each answer, and "
            "is counted at once, not when a request ends"
        ),
        (
            "equals `vllm:generation_tokens` without the first token of each answer; what follows "
            "a stop string within a step is in both, because the API server looks for it; what "
            "further steps gave before the scheduler heard of the stop, or of a hang-up, is in "
            "ours alone"
        ),
    ),
)

_OTHER_COUNTS = """\
A request whose prompt is read again after a retraction or a preemption gets one more token from
that pass. Steps that are lost on their way to the sidecar (`speculation_dropped_reports`) are in no
counter. A step of vLLM in which all sequences are nearly as long as the model allows is not
reported, because its drafts are fewer than any draft length.

The estimates of acceptance learn from what a step shows, which is less than it counts. Behind the
end of an answer nothing is shown. A draft of vLLM that a grammar takes away before it is verified
is neither accepted nor refused; SGLang verifies it under the grammar's mask, and refuses it. Steps
at gamma = 0 show nothing. Where a lookup finds nothing, nothing is accepted: that counts as
refused.
"""

# What, its fraction, ours, SGLang's, vLLM's, AIPerf's.
_AGREEMENT = (
    (
        "acceptance length",
        "(accepted + drafts) / drafts",
        "`speculation_acceptance_length`",
        "`sglang:spec_accept_length` divides by sequence steps",
        "`1 + spec_decode_num_accepted_tokens / spec_decode_num_drafts`",
        (
            "`spec_decode_acceptance_length` of a request, "
            "`spec_decode_token_weighted_acceptance_length` of a run"
        ),
    ),
    (
        "tokens per sequence step",
        "(accepted + sequence steps) / sequence steps",
        "`speculation_generated_tokens_total / speculation_sequence_steps_total`",
        "`sglang:spec_accept_length`",
        "–",
        "–",
    ),
    (
        "draft acceptance rate",
        "accepted / draft tokens",
        "`speculation_draft_acceptance_rate`",
        (
            "`sglang:spec_accept_rate`, as if the newest draft length had run since the last log "
            "line; `spec_accept_rate` of a request, as if that of the engine's start had run"
        ),
        "`spec_decode_num_accepted_tokens / spec_decode_num_draft_tokens`",
        (
            "`spec_decode_draft_acceptance_rate` of a request, "
            "`spec_decode_overall_draft_acceptance_rate` of a run, both in percent"
        ),
    ),
    (
        "accepted per verified",
        "(accepted + drafts) / (draft tokens + drafts)",
        "`speculation_accepted_per_verified`",
        "–",
        "–",
        "`spec_decode_accepted_per_verified`",
    ),
    (
        "histogram of accepted tokens",
        "drafts by their accepted tokens",
        "`speculation_accepted_tokens_per_draft`",
        "`spec_correct_drafts_histogram` of a request",
        "`acceptance_histogram` of a request",
        "`pooled_spec_decode_acceptance_histogram`",
    ),
    (
        "accepted by position",
        "drafts of which the position was accepted",
        "`speculation_accepted_tokens_per_pos_total`",
        "–",
        "`spec_decode_num_accepted_tokens_per_pos`",
        "–",
    ),
    (
        "expected minus actual acceptance length",
        "(expected - accepted) / drafts",
        "`speculation_acceptance_length_error`",
        "–",
        "–",
        "–",
    ),
    (
        "error of the cost model",
        "sum of abs(predicted - reported seconds) / reported seconds, of plain steps",
        "`speculation_step_time_error_ratio`",
        "–",
        "–",
        "–",
    ),
)


def _rate(name: str) -> str:
    return f"rate(speculation_{name}_total[5m])"


_PLAIN = _rate("plain_seconds")
_QUERIES = (
    (
        "How many tokens does a draft gain (acceptance length)?",
        f"1 + {_rate('accepted_tokens')} / {_rate('drafts')}",
    ),
    (
        "How many tokens does a sequence gain in a step, plain steps included?",
        f"{_rate('generated_tokens')} / {_rate('sequence_steps')}",
    ),
    (
        "What share of the draft tokens is accepted (draft acceptance rate)?",
        f"{_rate('accepted_tokens')} / {_rate('draft_tokens')}",
    ),
    (
        "Of what share of the drafts were at most `le` tokens accepted?",
        (
            "rate(speculation_accepted_tokens_per_draft_bucket[5m]) / ignoring (le) group_left () "
            "rate(speculation_accepted_tokens_per_draft_count[5m])"
        ),
    ),
    (
        "How many tokens a draft are expected too much (below 0: too few)?",
        f"({_rate('expected_accepted_tokens')} - {_rate('accepted_tokens')}) / {_rate('drafts')}",
    ),
    (
        "How wrong is the cost model, as a share of the time?",
        f"{_rate('prediction_error_seconds')} / {_PLAIN}",
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

_SECTIONS: tuple[tuple[str, bool, tuple[MetricFamily[Any], ...]], ...] = (
    ("Decision", True, DECISION_FAMILIES),
    ("Estimates against reality", True, ESTIMATE_FAMILIES),
    ("Steps", True, STEP_FAMILIES),
    ("Link and lease", True, LINK_FAMILIES),
    ("A drafter that learns", True, LEARNING_FAMILIES),
    ("The sidecar", False, SIDECAR_FAMILIES),
)


def reference() -> str:
    """Returns the whole page."""
    lines = [_HEAD, "| question | query |", "|---|---|"]
    lines += [*(f"| {question} | `{query}` |" for question, query in _QUERIES), "", _DEFINITIONS]
    lines += [
        "| quantity | numerator / denominator | ours | SGLang | vLLM | AIPerf |",
        6 * "|---" + "|",
    ]
    lines += [*(f"| {' | '.join(row)} |" for row in _AGREEMENT), "", _COUNTS]
    lines += ["| ours | SGLang | vLLM |", "|---|---|---|"]
    lines += [*(f"| {' | '.join(row)} |" for row in _SAME_COUNTS), "", _OTHER_COUNTS]
    for title, of_engine, families in _SECTIONS:
        lines += [f"## {title}", "", *_table(families, of_engine=of_engine), ""]
    return "\n".join(lines)


def _table(families: Iterable[MetricFamily[Any]], *, of_engine: bool) -> Iterable[str]:
    yield "| name | type | labels | unit | meaning | vLLM, SGLang |"
    yield "|---|---|---|---|---|---|"
    for family in families:
        labels = ", ".join([*(["engine"] if of_engine else []), *family.labels])
        cells = (
            f"`{family.sample_name}`", family.kind.value, labels, family.unit, family.help_text,
            family.similar_metrics and f"`{family.similar_metrics}`",
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

"""Writes the page of a run, from what result.json holds."""

from collections.abc import Mapping
from typing import Any

from lab.demo.gpu.plan import STATIC_BEST
from lab.gpu_check.parts.part import text_table

# Causes of lost_time.py.  The time of a switch is part of the step that ran it.
_CAUSES = ("waiting", "probing", "estimates", "link")
_MEANING = """\
- Nothing is imposed: a step takes what kernels, graphs and schedule take on this machine.
- Acceptance is drawn from measured curves by request, position and drafter, so every policy gets
  the same draws. The weights are dummies: the text of the answers is noise.
- tokens/s: all tokens over the time from the first request to the last answer. In a phase: the
  tokens of steps that began in it, and the first tokens of requests, over its seconds.
- Arm: a drafter and its draft length, as in eagle3 3; arm 0 decodes without drafts.
- ÷ oracle: tokens/s over those of the best draft length of each phase. These are computed: the
  stream is replayed with the costs that `controller profile` measured on this machine.
- time ÷ profile: the decode steps' time over their time by that profile. If it is far from 1, the
  oracle is not reliable.
- ms/token: percentiles over requests of the mean time between their tokens, by the engine's log of
  when it had read them. Latency: from sending a request to its whole answer, at the client."""


def markdown(document: Mapping[str, Any]) -> str:
    """Makes the page; a run that was cut off has the plays that it finished."""
    machine, versions = document["machine"], document["versions"]
    gpu_text = ", ".join(machine["gpus"]) or f"no GPU, {machine['processor']}"
    lines = ["# The day of the demo at this machine's own pace", ""]
    if document["complete"]:
        lines.append("The run came to its end.")
    else:
        lines.append(f"**The run is incomplete**: {document['stopped']}.")
    for policy, reason in document["not_played"].items():
        lines += ["", f"{policy} was not played: {reason}."]
    lines += [
        "",
        f"- Machine: {gpu_text}; {machine['cores']} cores, {machine['system']}",
        f"- Versions: {', '.join(f'{name} {number}' for name, number in versions.items())}",
        f"- Command: `{' '.join(document['command'])}`",
        f"- Models: dummy weights of the shape {document['shape']}",
        f"- Time: {document['seconds']:.0f} of {document['seconds_allowed']:.0f} s",
    ]
    if "runs" in document:
        lines += _results(document)
    lines += ["", "## What it took", ""]
    lines.append(text_table(["piece", "engine", "planned, s", "took, s"], _duration_rows(document)))
    return "\n".join(lines) + "\n"


def _results(document: Mapping[str, Any]) -> list[str]:
    oracle, stream = document["oracle"][0], document["stream"]
    names = [run["policy"] for run in document["runs"]]
    requests = sum(phase["requests"] for phase in stream["phases"])
    tokens = sum(phase["tokens"] for phase in stream["phases"])
    best = oracle["best_static"]
    lines = [
        f"- Stream: {requests} requests, {tokens} tokens",
        f"- Answers: {document['share_of_answers']:.0%} of their full length",
        f"- Oracle: {oracle['tokens_per_second']:.0f} tokens/s, by the measured costs",
        f"- Oracle over the best static arm ({best}): {oracle['over_best_static']:.3f}",
        "",
        "## The whole day",
        "",
    ]
    head = [
        "policy", "tokens/s", "÷ oracle", "steered ÷", "ms/token p50", "p99", "latency p50, s",
        "p99", "time ÷ profile",
    ]  # fmt: skip
    lines.append(
        text_table(head, [_policy_row(run, document["ratios"]) for run in document["runs"]])
    )
    lines += ["", "## By phase: tokens/s, and ÷ the best arm of the phase", ""]
    rows = []
    for number, phase in enumerate(stream["phases"]):
        cells = [
            f"{run['phases'][number]['median']:.0f} ({run['phase_shares'][number]:.2f})"
            for run in document["runs"]
        ]
        rows.append([f"{phase['phase']} ×{phase['concurrency']}", oracle["arms"][number], *cells])
    lines.append(text_table(["phase", "best arm", *names], rows))
    lost_time = document["lost_time"][0]
    causes = ", ".join(f"{cause} {lost_time[cause]:.1%}" for cause in _CAUSES)
    lines += [
        "",
        f"Steered lost {lost_time['total']:.1%} of its decode steps' time against the best arm of",
        f"every single step, by the measured costs: {causes}.",
        "",
        "## What the numbers mean",
        "",
        _MEANING,
    ]
    return lines


def _policy_row(run: Mapping[str, Any], ratios: Mapping[str, Any]) -> list[str]:
    play = run["repeats"][0]
    ratio = ratios.get(f"steered/{run['policy']}")
    token, latency = play["token_milliseconds"], play["latency_seconds"]
    return [
        run["policy"],
        f"{run['tokens_per_second']:.0f}",
        f"{run['share_of_oracle']['median']:.3f}",
        f"{ratio['median']:.3f}" if ratio else "",
        f"{token['p50']:.2f}",
        f"{token['p99']:.2f}",
        f"{latency['p50']:.2f}",
        f"{latency['p99']:.2f}",
        f"{run['time_over_costs']:.2f}",
    ]


def _duration_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Rows of what was done so far: estimated and measured seconds."""
    planned = {(piece["name"], piece["policy"]): piece["seconds"] for piece in document["planned"]}
    rows = []
    for piece in document["took"]:
        name, policy = piece["name"], piece["policy"]
        planned_policy = policy if (name, policy) in planned else STATIC_BEST
        seconds = planned[name, planned_policy]
        rows.append([name, policy, f"{seconds:.0f}", f"{piece['seconds']:.0f}"])
    return rows

"""Writes the page of a run, from what result.json holds."""

from collections.abc import Mapping, Sequence
from typing import Any

_MEANING = (
    "- Nothing is imposed: a step takes what kernels, graphs and schedule take here.",
    (
        "- Acceptance is drawn from measured curves by request, position and drafter, so every policy "
        "meets the same luck. The weights are dummies, so what the answers say is noise."
    ),
    (
        "- tokens/s: all tokens over the time from the first request to the last answer. In a phase: "
        "tokens of the steps that began in it, and first tokens of requests, over its seconds."
    ),
    (
        "- ÷ oracle: tokens/s over those of the best draft length of each phase. That is computed: the "
        "stream is replayed with the costs that `controller profile` measured on this machine."
    ),
    (
        "- ms/token: percentiles over requests of the mean time between their tokens, from the "
        "engine's log of when it read them. latency: from sending to the whole answer, at the client."
    ),
)


def markdown(document: Mapping[str, Any]) -> str:
    """Makes the page; a run that was cut off has the plays that it finished."""
    machine, versions = document["machine"], document["versions"]
    where = ", ".join(machine["gpus"]) or f"no GPU, {machine['processor']}"
    lines = ["# The day of the demo at this machine's own pace", ""]
    if document["complete"]:
        lines.append("The run came to its end.")
    else:
        lines.append(f"**The run is incomplete**: {document['stopped']}.")
    lines += [f"{policy} was not played: {why}." for policy, why in document["not_played"].items()]
    lines += [
        "",
        f"- Machine: {where}; {machine['cores']} cores, {machine['system']}",
        f"- Versions: {', '.join(f'{name} {number}' for name, number in versions.items())}",
        f"- Command: `{' '.join(document['command'])}`",
        (
            f"- Models: the shape {document['shape']}, dummy weights; {document['seconds']:.0f} of "
            f"{document['seconds_allowed']:.0f} s"
        ),
    ]
    if "runs" in document:
        lines += _results(document)
    lines += ["", "## What it took", ""]
    lines += _table(["piece", "engine", "planned, s", "took, s"], _took(document))
    return "\n".join(lines) + "\n"


def _results(document: Mapping[str, Any]) -> list[str]:
    oracle, stream = document["oracle"][0], document["stream"]
    names = [run["policy"] for run in document["runs"]]
    requests = sum(phase["requests"] for phase in stream["phases"])
    tokens = sum(phase["tokens"] for phase in stream["phases"])
    lines = [
        (
            f"- Stream: {requests} requests, {tokens} tokens; answers of "
            f"{document['share_of_answers']:.0%} of the day's lengths"
        ),
        (
            f"- Oracle: {oracle['tokens_per_second']:.0f} tokens/s, {oracle['over_best_static']:.3f} "
            f"of the best static arm ({oracle['best_static']})"
        ),
        "",
        "## The whole day",
        "",
    ]
    head = ["policy", "tokens/s", "÷ oracle", "steered ÷", "ms/token p50", "p99", "latency p50, s",
            "p99"]  # fmt: skip
    lines += _table(head, [_run(run, document["ratios"]) for run in document["runs"]])
    lines += ["", "## By phase: tokens/s, and ÷ the best arm of the phase", ""]
    rows = []
    for number, phase in enumerate(stream["phases"]):
        cells = [
            f"{run['phases'][number]['median']:.0f} ({run['phase_shares'][number]:.2f})"
            for run in document["runs"]
        ]
        rows.append([f"{phase['phase']} ×{phase['concurrency']}", oracle["arms"][number], *cells])
    lines += _table(["phase", "best arm", *names], rows)
    lost = document["lost_time"][0]
    causes = ", ".join(f"{cause} {share:.1%}" for cause, share in lost.items() if cause != "total")
    lines += [
        "",
        (
            f"Steered lost {lost['total']:.1%} of its decode steps' time against the best arm of every "
            f"single step, by the measured costs ({causes}; the shim's own work is not part of it)."
        ),
        "",
        "## What the numbers mean",
        "",
        *_MEANING,
    ]
    return lines


def _run(run: Mapping[str, Any], ratios: Mapping[str, Any]) -> list[str]:
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
    ]


def _took(document: Mapping[str, Any]) -> list[list[str]]:
    """Rows of what was done so far, in the order of the plan: estimated and measured seconds."""
    took = [(piece["name"], piece["policy"], piece["seconds"]) for piece in document["took"]]
    rows = []
    for planned, done in zip(document["planned"], took, strict=False):
        name, policy, seconds = done
        rows.append([name, policy, f"{planned['seconds']:.0f}", f"{seconds:.0f}"])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]

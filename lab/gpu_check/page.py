"""Writes the page of a check: machine, verdicts, and every figure."""

import shlex
from collections.abc import Mapping
from typing import Any

from lab.gpu_check.parts import PARTS
from lab.gpu_check.parts.part import Part, text_table
from lab.gpu_check.shapes import Device

_PROBLEMS_SHOWN = 8
_SMALL_MODELS = "`exact`, `rounding`, `learning` and `outage` use small trained models instead."
_NOTATION = (
    "- An arm is a drafter and its draft length γ, as in eagle3 3; arm 0 decodes without drafts. "
    "B is the number of sequences that decode at once."
)
_FAILED = "FAILED"


def markdown(document: Mapping[str, Any]) -> str:
    """Makes the page of one result file, which may be that of an unfinished check."""
    finished_parts = {name: part for name, part in PARTS.items() if document.get(part.KEY)}
    texts = [f"# GPU check: {machine_text(document)}", _facts(document)]
    if "stopped" in document:
        texts.append(f"The check was stopped ({document['stopped']}); here are its results so far.")
    if running_parts := unfinished_parts(document):
        texts.append(f"Not finished when this page was written: {', '.join(running_parts)}.")
    if finished_parts:
        rows = [[name, *_summary(name, part, document)] for name, part in finished_parts.items()]
        texts.append(text_table(["part", "verdict", "details"], rows))
    if failed := document.get("failed"):
        lines = [f"- {name}: {reason.splitlines()[0]}" for name, reason in failed.items()]
        texts.append("Parts that failed:\n\n" + "\n".join(lines))
    if left_out := document.get("left_out"):
        lines = [f"- {name}: {reason}" for name, reason in left_out.items()]
        texts.append("Not finished within the budget:\n\n" + "\n".join(lines))
    if all_problems := problems(document):
        lines = [f"- {problem}" for problem in all_problems[:_PROBLEMS_SHOWN]]
        if omitted := len(all_problems) - len(lines):
            lines.append(f"- and {omitted} more, in result.json")
        texts.append("Problems:\n\n" + "\n".join(lines))
    if seconds := document.get("startup", {}).get("seconds"):
        texts.append(
            "Seconds until an engine was ready: "
            + ", ".join(f"{name} {value}" for name, value in seconds.items())
            + "."
        )
    for part in finished_parts.values():
        texts += part.sections(document)
    return "\n\n".join(texts)


def unfinished_parts(document: Mapping[str, Any]) -> list[str]:
    """Names the parts that were running or not started when the document was written."""
    ended = document.get("part_seconds", {})
    return [name for name in document.get("planned_seconds", {}) if name not in ended]


def _summary(name: str, part: Part, document: Mapping[str, Any]) -> tuple[str, str]:
    """Returns verdict and details of a part; only one that came to its end can have passed."""
    verdict, details = part.summary(document)
    if name in document.get("failed", {}):
        return _FAILED, details
    if verdict != _FAILED and (
        name in document.get("left_out", {}) or name in unfinished_parts(document)
    ):
        return "unfinished", details
    return verdict, details


def problems(document: Mapping[str, Any]) -> list[str]:
    """Returns the problems of all parts, in sentences; empty for a check that passed."""
    part_problems = [
        problem
        for part in PARTS.values()
        if document.get(part.KEY)
        for problem in part.problems(document)
    ]
    return part_problems + [
        f"engine {engine_name}: {lost_capability['capability']} was lost: "
        f"{lost_capability['reason']}"
        for engine_name, lost_capabilities in document.get("lost", {}).items()
        for lost_capability in lost_capabilities
    ]


def wrong_tokens(document: Mapping[str, Any]) -> int:
    """Counts the wrong tokens of all parts that compare them."""
    parts = (document.get(name) or {} for name in ("exact", "learning", "outage"))
    return sum(part.get("wrong", 0) for part in parts)


def machine_text(document: Mapping[str, Any]) -> str:
    """Names the machine and the versions."""
    machine, versions = document["machine"], document["versions"]
    device = document.get("device", "GPU")
    gpus = ", ".join(machine["gpus"]) if device == "GPU" else ""
    machine_name = gpus or f"{machine['processor']} (no GPU: {device})"
    return f"{machine_name}; SGLang {versions['sglang']}, torch {versions['torch']}"


def _facts(document: Mapping[str, Any]) -> str:
    assumed = ", ".join(f"{name} {value}" for name, value in document["acceptance"].items())
    lines = [
        f"- Models: the shape {document['shape']} with dummy weights. {_SMALL_MODELS}",
        f"- Assumed probability that a draft of the shape is accepted: {assumed}.",
        _NOTATION,
        f"- Scale: {document['scale']}. The check took {document['seconds']} s.",
    ]
    if command := document.get("command"):
        lines.append(f"- Command: `{shlex.join(command)}`")
    if document.get("device", Device.GPU.value) != Device.GPU.value:
        lines.append("- **No GPU was used: durations and speeds on this page mean nothing.**")
    return "\n".join(lines)

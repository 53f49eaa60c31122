"""Writes the incident report: one self-contained page about a recording, without secrets."""

from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

import controller
from controller.core.engine_spec import Arm
from controller.recording.html_page import (
    Cell,
    HighlightedCell,
    html_document,
    html_table,
    inline_svg,
    new_figure,
    time_text,
)
from controller.recording.replay import ReplayVerdict
from controller.recording.window import SessionStart, Window, changed_constants
from controller.wire.override_text import enum_name, rule_text, scope_text
from speculation.v1 import record_pb2

_DROPPED = record_pb2.RECORD_NOTE_KIND_DROPPED
_REJECTED = record_pb2.RECORD_NOTE_KIND_REJECTED
# Most rows of a table: the newest are shown.
_ROWS_MAX = 300
# Number of time bins of a plot.
_POINTS = 400
_COLOURS = (
    "#0b6e4f", "#c8553d", "#4062bb", "#e0a030", "#8d5a97", "#59a5d8", "#7a7a7a", "#b8c04a",
)  # fmt: skip


def render_incident_report(window: Window, verdict: ReplayVerdict) -> str:
    """Renders the page.  Raises MissingPlotsError when matplotlib is not installed."""
    return html_document(
        f"{verdict.engine_id}: recorded decisions", "\n".join(_sections(window, verdict))
    )


def _sections(window: Window, verdict: ReplayVerdict) -> Iterator[str]:
    yield f"<h1>{escape(verdict.engine_id)}: decisions and their reasons</h1>"
    yield (
        f"<p class=small>{time_text(verdict.began_at)} to {time_text(verdict.ended_at)} (UTC), "
        f"page made by version {escape(controller.__version__)}</p>"
    )
    yield html_table(("", ""), list(_summary_rows(window, verdict)), label="summary")
    yield "<h2>Over time</h2>"
    yield timeline_svg(window) or "<p>No step was recorded.</p>"
    yield (
        "<p class=small>Means over time bins. Step times exclude steps after gaps, first uses of a "
        "graph and updates. Dashed: an override began or ended. Red: without a valid lease.</p>"
    )
    yield "<h2>Overrides</h2>"
    yield _overrides_table(window)
    yield "<h2>Trouble</h2>"
    yield _trouble_tables(window, verdict)
    yield "<h2>Predicted against observed</h2>"
    yield _predictions_table(window)
    if window.classes:
        yield "<h2>Request classes</h2>"
        yield _classes_table(window)
    yield "<h2>Reasons</h2>"
    yield _reasons_table(window)
    yield "<h2>Settings and versions</h2>"
    for session in window.sessions[-_ROWS_MAX:]:
        yield _session_tables(session)
    yield _details("Plans", _plans_table(window))
    yield _details("Log", _log_table(window))


def _summary_rows(window: Window, verdict: ReplayVerdict) -> Iterator[tuple[Cell, Cell]]:
    steps = window.steps
    seconds = float(np.sum(steps.seconds)) if steps else 0.0
    tokens = float(np.sum(steps.tokens)) if steps else 0.0
    yield "steps", str(len(steps))
    yield "mean sequences per step", f"{np.mean(steps.batch):.1f}" if steps else "-"
    yield "tokens per second of step time", f"{tokens / seconds:.1f}" if seconds else "-"
    yield "plans", str(window.plan_count)
    yield "segments, sessions", f"{verdict.segments}, {verdict.sessions}"
    outcome = "the same, bit by bit" if verdict.is_same else f"{verdict.differences} differences"
    yield "replayed for this page", HighlightedCell("good" if verdict.is_same else "bad", outcome)
    if verdict.first is not None:
        yield "the first difference", verdict.first.text


def _overrides_table(window: Window) -> str:
    if not window.override_intervals:
        return "<p>No override was in force.</p>"
    rows = []
    for spell in window.override_intervals[-_ROWS_MAX:]:
        term, override = spell.term, spell.term.override
        rows.append(
            (
                override.override_id, override.author, override.reason, scope_text(override),
                rule_text(override),
                "before" if spell.began_at is None else time_text(spell.began_at),
                "still in force" if spell.ended_at is None else time_text(spell.ended_at),
                time_text(term.ends_at) if term.HasField("ends_at") else "never, or unknown",
            )
        )  # fmt: skip
    head = ("id", "author", "reason", "scope", "demands", "from", "until", "would expire")
    return html_table(head, rows, label="overrides")


def _trouble_tables(window: Window, verdict: ReplayVerdict) -> str:
    rows: list[tuple[Cell, Cell, Cell]] = []
    unsteered_steps = sum(stretch.steps for stretch in window.unsteered_intervals)
    for name, count, detail in (
        (
            "steps without a valid lease",
            unsteered_steps,
            f"{len(window.unsteered_intervals)} intervals",
        ),
        (
            "reports dropped by the engine's agent",
            window.note_counts[record_pb2.RECORD_NOTE_KIND_DROPPED],
            "",
        ),
        (
            "reports refused",
            window.note_counts[record_pb2.RECORD_NOTE_KIND_REJECTED],
            _refusals(window),
        ),
        ("records that the sidecar dropped", verdict.lost, ""),
        ("gaps in the recording", len(verdict.gaps), "; ".join(map(": ".join, verdict.gaps[:5]))),
    ):
        rows.append((name, HighlightedCell("bad" if count else "good", str(count)), detail))
    counts_table = html_table(("what", "count", ""), rows, label="trouble")
    if not window.unsteered_intervals:
        return counts_table
    stretches = [
        (
            time_text(interval.began_at),
            f"{interval.ended_at - interval.began_at:.3f}",
            str(interval.steps),
        )
        for interval in window.unsteered_intervals[-_ROWS_MAX:]
    ]
    lost = html_table(("from", "seconds", "steps"), stretches, label="steps without a lease")
    return counts_table + _details("Without a valid lease", lost)


def _refusals(window: Window) -> str:
    texts = [note.text for _, note in window.notes if note.kind == _REJECTED]
    return "; ".join(list(dict.fromkeys(texts))[:3])


def _predictions_table(window: Window) -> str:
    steps = window.steps
    arms, usual = np.array(steps.arm, dtype=np.int64), np.array(steps.distorted) == 0
    seconds, predicted = np.array(steps.seconds), np.array(steps.predicted)
    tokens, decoded = np.array(steps.tokens), np.array(steps.decoded)
    rows = []
    for i in sorted(range(len(window.arms)), key=lambda i: _arm_order(window.arms[i])):
        is_arm = arms == i
        is_counted = is_arm & usual
        priced: tuple[str, ...] = ("-", "-", "-", "-")
        if is_counted.any():
            relative_error = np.abs(seconds[is_counted] / predicted[is_counted] - 1)
            priced = (
                f"{1e3 * np.median(predicted[is_counted]):.3f}",
                f"{1e3 * np.median(seconds[is_counted]):.3f}",
                f"{np.median(seconds[is_counted] / predicted[is_counted]):.3f}",
                f"{np.median(relative_error):.1%}",
            )
        tokens_per_row = tokens[is_arm].sum() / max(decoded[is_arm].sum(), 1)
        rows.append(
            (_arm_text(window.arms[i]), str(int(is_arm.sum())), *priced, f"{tokens_per_row:.2f}")
        )
    head = (
        "arm", "steps", "predicted ms", "observed ms", "observed ÷ predicted", "typical error",
        "tokens per sequence and step",
    )  # fmt: skip
    return html_table(head, rows, label="predicted and observed step seconds") + (
        "<p class=small>Medians; predicted just before each step, at its batch and context.</p>"
    )


def _classes_table(window: Window) -> str:
    classes = sorted(window.classes.items(), key=lambda item: -item[1].sequences)
    rows = [
        (
            label,
            str(counters.sequences),
            f"{1 + counters.accepted / max(counters.sequences, 1):.2f}",
        )
        for label, counters in classes[:_ROWS_MAX]
    ]
    return html_table(("class", "sequences", "tokens per sequence and step"), rows, label="classes")


def _reasons_table(window: Window) -> str:
    total = max(1, window.reasons.total())
    rows = [(reason, str(n), f"{n / total:.1%}") for reason, n in window.reasons.most_common()]
    return html_table(("reason", "steps", "share"), rows, label="reasons")


def _session_tables(session: SessionStart) -> str:
    spec, target = session.spec, session.spec.fingerprint
    rows = [
        ("session started or first recorded", time_text(session.wall_seconds)),
        ("model", f"{target.target_model} {target.target_revision}".rstrip()),
        ("engine", f"{target.engine} {target.engine_version}".rstrip()),
        ("device", target.device or "-"),
        *(
            (f"drafter {d.name}", f"{d.kind.value} {d.model} γ {', '.join(map(str, d.gammas))}")
            for d in spec.drafters
        ),
        ("largest batch", str(spec.max_batch_size)),
        ("costs", f"profile {session.profile_id}" if session.profile_id else session.cost_source),
        *sorted(session.versions.items()),
    ]
    changed = changed_constants(session.planner)
    changed_text = (
        ", ".join(f"{name} = {value}" for name, value in changed.items()) or "the defaults"
    )
    rows.append(("planner", changed_text))
    constants_table = html_table(
        ("constant", "value"), [(n, str(v)) for n, v in session.planner.items()], label="constants"
    )
    session_table = html_table(("", ""), rows, label="session")
    return session_table + _details("All constants of the planner", constants_table)


def _plans_table(window: Window) -> str:
    rows = [
        (
            time_text(p.wall_seconds), str(p.epoch), p.reason, str(p.batch), _arm_text(p.arm),
            p.regime,
            p.detail,
        )
        for p in window.plans[-_ROWS_MAX:]
    ]  # fmt: skip
    head = ("when", "epoch", "reason", "B", "arm", "regime", "detail")
    hidden_count = window.plan_count - len(rows)
    return html_table(head, rows, label="plans") + (
        f"<p class=small>{hidden_count} earlier plans are not shown.</p>" if hidden_count else ""
    )


def _log_table(window: Window) -> str:
    notes = []
    for wall, note in window.notes:
        kind = enum_name(note, "kind", "RECORD_NOTE_KIND_").replace("-", " ")
        notes.append((wall, f"{kind} {note.count or ''} {note.text}"))
    rows = [(time_text(wall), text) for wall, text in sorted([*notes, *window.input_log])]
    return html_table(("when", "what"), rows[-_ROWS_MAX:], label="log")


def _details(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _arm_text(arm: Arm) -> str:
    return f"{arm.drafter} {arm.gamma}"


def _arm_order(arm: Arm) -> tuple[str, int]:
    return arm.drafter, arm.gamma


def timeline_svg(window: Window) -> str:
    """Plots draft length by drafter, batch, acceptance and step seconds; "" without a step."""
    if not window.steps:
        return ""
    wall = np.array(window.steps.wall_seconds)
    seconds = wall - wall[0]
    bins = _bins(seconds)
    points = np.array([float(seconds[part].mean()) for part in bins])
    arms = np.array(window.steps.arm)
    gammas = np.array([arm.gamma for arm in window.arms])[arms]
    names = list(dict.fromkeys(arm.drafter for arm in window.arms))
    drafter = np.array([names.index(arm.drafter) for arm in window.arms])[arms]
    batch = np.array(window.steps.batch)
    decoded = np.array(window.steps.decoded)
    gained = np.array(window.steps.tokens) / np.maximum(decoded, 1)

    figure = new_figure(9.5, 8.0)
    draft, size, gain, price = figure.subplots(4, 1, sharex=True)
    for i, name in enumerate(names):
        drafter_gammas = _means(bins, gammas, drafter == i)
        colour = _COLOURS[i % len(_COLOURS)]
        draft.plot(
            points,
            drafter_gammas,
            ".-",
            color=colour,
            label=plot_label(name),
            markersize=3,
            linewidth=1,
        )
    draft.set_ylabel("draft length")
    draft.legend(fontsize=8, frameon=False, ncols=4, loc="upper right")
    size.plot(points, _means(bins, batch), color="#555555")
    size.set_ylabel("batch size")
    gain.plot(points, _means(bins, gained, decoded > 0), color=_COLOURS[0])
    gain.set_ylabel("tokens a\nsequence and step")
    usual = np.array(window.steps.distorted) == 0
    for values, colour, name in (
        (window.steps.seconds, _COLOURS[2], "observed"),
        (window.steps.predicted, _COLOURS[1], "predicted"),
    ):
        line = 1e3 * _means(bins, np.array(values), usual)
        price.plot(points, line, color=colour, label=name, linewidth=1)
    price.set_ylabel("step, ms")
    price.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    price.set_xlabel("seconds since the first step")
    for axes in (draft, size, gain, price):
        axes.grid(alpha=0.3)
        _mark_events(axes, window, float(wall[0]))
    return inline_svg(figure, "draft length, batch size, tokens a step and step seconds over time")


def _mark_events(axes: Any, window: Window, start: float) -> None:
    """Draws changes of overrides as lines, and steps without a lease as areas."""
    for override in window.override_intervals:
        for wall_seconds in (override.began_at, override.ended_at):
            if wall_seconds is not None:
                axes.axvline(wall_seconds - start, color="#8d5a97", linewidth=0.8, linestyle="--")
    for unsteered in window.unsteered_intervals[:200]:
        axes.axvspan(
            unsteered.began_at - start, unsteered.ended_at - start, color="#b3261e", alpha=0.15
        )


def _bins(seconds: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Returns the indices of the steps in each non-empty time bin."""
    width = max(float(seconds[-1]), 1e-9) / _POINTS
    bins = np.minimum((seconds / width).astype(np.int64), _POINTS - 1)
    edges = np.flatnonzero(np.diff(bins)) + 1
    return [part.astype(np.int64) for part in np.split(np.arange(len(bins)), edges)]


def _means(
    parts: list[NDArray[np.int64]],
    values: NDArray[np.float64] | NDArray[np.int64],
    is_counted: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Returns [parts] means; NaN for a part without counted values."""
    means = []
    for part in parts:
        chosen = part if is_counted is None else part[is_counted[part]]
        means.append(float(values[chosen].mean()) if len(chosen) else np.nan)
    return np.array(means)


def plot_label(name: str) -> str:
    """Returns a label that matplotlib shows literally: no formulas, no missing glyphs."""
    shown = name.encode("ascii", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else "?" for c in shown).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown

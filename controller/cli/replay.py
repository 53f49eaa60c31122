"""Implements `controller replay` and `controller report`, which read recordings.

`replay` repeats the recorded decisions, unchanged or with other constants.  `report` writes one
HTML page about a recording for an incident.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.output import (
    FormOption,
    Output,
    OutputOption,
    exit_with_error,
    print_line,
    print_result,
    print_table,
)
from controller.util.exit_codes import Exit
from controller.util.text import TextColumn, TextTable

if TYPE_CHECKING:
    from controller.core.cost.profile import Profile
    from controller.core.engine_spec import Arm
    from controller.recording.counterfactual import Comparison, CounterfactualChange
    from controller.recording.replay import ReplayVerdict

# Number of stretches that are printed: the longest.
_STRETCHES_SHOWN = 20

RecordingPath = Annotated[
    Path, typer.Argument(metavar="RECORDING", help="A segment, or a directory of them.")
]
Engine = Annotated[
    str, typer.Option(help="Engine id; needed if the directory has recordings of several.")
]


def replay(
    recording: RecordingPath,
    engine: Engine = "",
    policy: Annotated[
        str,
        typer.Option(help="Also replay with this decision rule: goodput, tide or sglang-ema."),
    ] = "",
    profile: Annotated[
        Path | None, typer.Option(help="Also replay with this profile of step times.")
    ] = None,
    planner_constant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Also replay with this planner constant; may be repeated."
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Repeats the decisions of a recording, and compares every plan bit by bit.

    With --policy, --profile or --planner-constant it also shows what would have been decided with
    these, and estimates the gain.

    Exit codes: 0 all plans are the same, 1 a plan differs, 2 bad input.
    """
    from controller.core.errors import SpeculationError
    from controller.recording.counterfactual import Counterfactual
    from controller.recording.recording import find_recording
    from controller.recording.replay import replay as decide_again

    try:
        counterfactual_change = _counterfactual_change(policy, profile, planner_constant or [])
        counterfactual = (
            None if counterfactual_change is None else Counterfactual(counterfactual_change)
        )
        verdict = decide_again(
            find_recording(recording, engine), [] if counterfactual is None else [counterfactual]
        )
    except SpeculationError as error:
        exit_with_error("replay", " ".join(str(error).splitlines()))
    comparison = None if counterfactual is None else counterfactual.comparison

    def print_text() -> None:
        _print_verdict(verdict)
        if comparison is not None:
            _print_comparison(comparison, wide=output is Output.WIDE)

    print_result(
        "Replay", _verdict_values(verdict, comparison), output, [verdict.engine_id], print_text
    )
    if not verdict.is_same:
        raise typer.Exit(Exit.FAILED)


def _counterfactual_change(
    policy: str, profile: Path | None, constants: list[str]
) -> "CounterfactualChange | None":
    from controller.recording.counterfactual import CounterfactualChange

    changed: dict[str, object] = dict(map(_parse_constant, constants))
    if policy:
        changed["policy"] = policy
    if not changed and profile is None:
        return None
    return CounterfactualChange(changed, None if profile is None else _read_profile(profile))


def _parse_constant(text: str) -> tuple[str, object]:
    from dataclasses import fields

    from controller.core.settings import PlannerSettings
    from controller.recording.segments import RecordingError
    from controller.util.suggestions import suggestion_text

    name, _, value = text.partition("=")
    kinds: dict[str, Any] = {field.name: field.type for field in fields(PlannerSettings)}
    if name not in kinds:
        raise RecordingError(
            f"--planner-constant {text} is not NAME=VALUE with the name of a constant: "
            f"{suggestion_text(name, kinds)}"
        )
    try:
        return name, kinds[name](value)
    except ValueError as error:
        raise RecordingError(f"--planner-constant {text}: {error}") from error


def _read_profile(path: Path) -> "Profile":
    from controller.core.cost.profile import Profile
    from controller.recording.segments import RecordingError

    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"--profile {path} cannot be read: {error}") from error


def _print_verdict(verdict: "ReplayVerdict") -> None:
    from controller.recording.html_page import time_text

    seconds = verdict.ended_at - verdict.began_at
    print_line(
        f"{verdict.engine_id}: {verdict.reports} reports, {verdict.decisions} decisions, "
        f"{verdict.plans} plans in {seconds:.1f} s from {time_text(verdict.began_at)} "
        f"({verdict.segments} segments, {verdict.sessions} sessions)"
    )
    for name, reason in verdict.gaps:
        print_line(f"gap: {name}: {reason}")
    if verdict.is_same:
        print_line(
            f"all {verdict.decisions} decisions are the same, bit by bit, and so is the state of "
            f"the core at {verdict.states} checkpoints"
        )
        return
    first_difference = verdict.first
    assert first_difference is not None
    print_line(
        f"{verdict.differences} differences; the first, at "
        f"{time_text(first_difference.wall_seconds)},"
    )
    print_line(
        f"{first_difference.path.name}, record {first_difference.record}: {first_difference.text}"
    )
    for name, recorded_version, replay_version in verdict.strange:
        print_line(
            f"recorded with {name} {recorded_version}, replayed with {replay_version}: last bits "
            "may differ"
        )


def _print_comparison(comparison: "Comparison", *, wide: bool) -> None:
    print_line(
        f"with the change: another choice in {comparison.differing_share:.1%} of "
        f"{comparison.steps} steps; "
        f"estimated {comparison.other_rate:.1f} tokens/s against {comparison.recorded_rate:.1f} "
        f"({comparison.gain:+.1%}); observed, including probes, {comparison.observed_rate:.1f}"
    )
    print_line(
        "The estimate uses the step times and acceptance that were estimated at that time. In "
        f"{comparison.unseen} of the {comparison.differing} differing steps the other choice "
        "drafts "
        "positions with few or no observations: the estimate is unreliable there."
    )
    if comparison.measured:
        print_line(f"{comparison.measured} steps of a profile measurement are left out")
    if comparison.stretches:
        print_table(_stretches_table(comparison), wide=wide)


def _stretches_table(comparison: "Comparison") -> TextTable:
    from controller.recording.html_page import time_text

    longest = sorted(comparison.stretches, key=lambda s: s.seconds, reverse=True)[:_STRETCHES_SHOWN]
    hidden_count = len(comparison.stretches) + comparison.more_stretches - len(longest)
    title = "Where the choice differs"
    rows = [
        (
            time_text(stretch.wall_seconds), f"{stretch.seconds:.2f}", str(stretch.steps),
            str(stretch.batch_min)
            if stretch.batch_min == stretch.batch_max
            else f"{stretch.batch_min}-{stretch.batch_max}",
            _arm_text(stretch.recorded), _arm_text(stretch.other), stretch.reason,
            f"{stretch.gain:+.1%}",
            f"{stretch.unseen / stretch.steps:.0%}",
        )
        for stretch in sorted(longest, key=lambda s: s.wall_seconds)
    ]  # fmt: skip
    return TextTable(
        f"{title} ({hidden_count} shorter periods are not shown)" if hidden_count else title,
        _STRETCHES,
        rows,
    )


_STRETCHES = (
    TextColumn("from"), TextColumn("seconds", is_right_aligned=True, priority=1),
    TextColumn("steps", is_right_aligned=True, priority=5),
    TextColumn("B", is_right_aligned=True, priority=2),
    TextColumn("recorded"), TextColumn("changed to"), TextColumn("reason", priority=4),
    TextColumn("estimated gain", is_right_aligned=True, priority=1),
    TextColumn("unobserved", is_right_aligned=True, priority=3),
)  # fmt: skip


def _arm_text(arm: "Arm") -> str:
    return f"{arm.drafter} {arm.gamma}"


def _verdict_values(verdict: "ReplayVerdict", comparison: "Comparison | None") -> dict[str, Any]:
    from dataclasses import asdict

    body = asdict(verdict) | {"same": verdict.is_same}
    if verdict.first is not None:
        body["first"]["path"] = str(verdict.first.path)
    if comparison is not None:
        body["otherwise"] = asdict(comparison) | {
            "estimate": True,
            "differing_share": comparison.differing_share,
            "recorded_tokens_per_second": comparison.recorded_rate,
            "other_tokens_per_second": comparison.other_rate,
            "observed_tokens_per_second": comparison.observed_rate,
            "gain": comparison.gain,
        }
    return body


def report(
    recording: RecordingPath,
    file: Annotated[Path, typer.Option("--output", help="HTML file to write.")],
    engine: Engine = "",
    output: FormOption = Output.TABLE,
) -> None:
    """Writes an incident report about a recording: one self-contained HTML file.

    Exit codes: 0 written, 2 bad input.
    """
    from controller.core.errors import SpeculationError
    from controller.recording.incident_report import render_incident_report
    from controller.recording.recording import find_recording
    from controller.recording.replay import replay
    from controller.recording.window import Window
    from controller.util.files import write_atomically

    try:
        window = Window()
        verdict = replay(find_recording(recording, engine), [window])
        text = render_incident_report(window, verdict)
    except SpeculationError as error:
        exit_with_error("report", " ".join(str(error).splitlines()))
    try:
        write_atomically(file, text.encode("utf-8", "replace"))
    except OSError as error:
        exit_with_error("report", f"{file} cannot be written: {error.strerror}")
    steps, plans = len(window.steps), window.plan_count
    print_result(
        "IncidentReport",
        {"path": file, "engine_id": verdict.engine_id, "steps": steps, "plans": plans},
        output,
        [str(file)],
        lambda: print_line(f"{file}: {steps} steps, {plans} plans"),
    )

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
    print_line,
    print_table,
    refuse,
    show_one,
)
from controller.util.exit_codes import Exit
from controller.util.text import TextColumn, TextTable

if TYPE_CHECKING:
    from controller.core.cost.profile import Profile
    from controller.core.engine_spec import Arm
    from controller.recording.counterfactual import Comparison, CounterfactualChange
    from controller.recording.replay import ReplayVerdict

# Number of stretches that are printed: the longest.
_SHOWN = 20

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
    from controller.recording.recording import find
    from controller.recording.replay import replay as decide_again

    try:
        change = _change(policy, profile, planner_constant or [])
        other = None if change is None else Counterfactual(change)
        verdict = decide_again(find(recording, engine), [] if other is None else [other])
    except SpeculationError as error:
        refuse("replay", " ".join(str(error).splitlines()))
    compared = None if other is None else other.found

    def tell() -> None:
        _print(verdict)
        if compared is not None:
            _print_comparison(compared, wide=output is Output.WIDE)

    show_one("Replay", _values(verdict, compared), output, [verdict.engine_id], tell)
    if not verdict.is_same:
        raise typer.Exit(Exit.FAILED)


def _change(
    policy: str, profile: Path | None, constants: list[str]
) -> "CounterfactualChange | None":
    from controller.recording.counterfactual import CounterfactualChange

    given: dict[str, object] = dict(map(_constant, constants))
    if policy:
        given["policy"] = policy
    if not given and profile is None:
        return None
    return CounterfactualChange(given, None if profile is None else _profile(profile))


def _constant(text: str) -> tuple[str, object]:
    from dataclasses import fields

    from controller.core.settings import PlannerSettings
    from controller.recording.segments import RecordingError

    name, _, value = text.partition("=")
    kinds: dict[str, Any] = {field.name: field.type for field in fields(PlannerSettings)}
    if name not in kinds:
        raise RecordingError(
            f"--planner-constant {text} is not NAME=VALUE with one of the names "
            f"{', '.join(sorted(kinds))}"
        )
    try:
        return name, kinds[name](value)
    except ValueError as error:
        raise RecordingError(f"--planner-constant {text}: {error}") from error


def _profile(path: Path) -> "Profile":
    from controller.core.cost.profile import Profile
    from controller.recording.segments import RecordingError

    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"--profile {path} cannot be read: {error}") from error


def _print(verdict: "ReplayVerdict") -> None:
    from controller.recording.html_page import time_text

    seconds = verdict.ended_at - verdict.began_at
    print_line(
        f"{verdict.engine_id}: {verdict.reports} reports, {verdict.decisions} decisions, "
        f"{verdict.plans} plans in {seconds:.1f} s from {time_text(verdict.began_at)} "
        f"({verdict.segments} segments, {verdict.sessions} sessions)"
    )
    for name, why in verdict.gaps:
        print_line(f"gap: {name}: {why}")
    if verdict.is_same:
        print_line(
            f"all {verdict.decisions} decisions are the same, bit by bit, and so is the state of "
            f"the core at {verdict.states} checkpoints"
        )
        return
    first = verdict.first
    assert first is not None
    print_line(f"{verdict.differences} differences; the first, at {time_text(first.wall_seconds)},")
    print_line(f"{first.path.name}, record {first.record}: {first.text}")
    for name, there, here in verdict.strange:
        print_line(f"recorded with {name} {there}, replayed with {here}: last bits may differ")


def _print_comparison(found: "Comparison", *, wide: bool) -> None:
    print_line(
        f"with the change: another choice in {found.differing_share:.1%} of {found.steps} steps; "
        f"estimated {found.other_rate:.1f} tokens/s against {found.recorded_rate:.1f} "
        f"({found.gain:+.1%}); observed, including probes, {found.observed_rate:.1f}"
    )
    print_line(
        "The estimate uses the step times and acceptance that were estimated at that time. In "
        f"{found.unseen} of the {found.differing} differing steps the other choice drafts "
        "positions with few or no observations: the estimate is unreliable there."
    )
    if found.measured:
        print_line(f"{found.measured} steps of a profile measurement are left out")
    if found.stretches:
        print_table(_stretches(found), wide=wide)


def _stretches(found: "Comparison") -> TextTable:
    from controller.recording.html_page import time_text

    longest = sorted(found.stretches, key=lambda s: s.seconds, reverse=True)[:_SHOWN]
    rest = len(found.stretches) + found.more_stretches - len(longest)
    title = "Where the choice differs"
    rows = [
        (
            time_text(at.wall_seconds), f"{at.seconds:.2f}", str(at.steps),
            str(at.batch_min) if at.batch_min == at.batch_max else f"{at.batch_min}-{at.batch_max}",
            _arm(at.recorded), _arm(at.other), at.reason, f"{at.gain:+.1%}",
            f"{at.unseen / at.steps:.0%}",
        )
        for at in sorted(longest, key=lambda s: s.wall_seconds)
    ]  # fmt: skip
    return TextTable(
        f"{title} ({rest} shorter periods are not shown)" if rest else title, _STRETCHES, rows
    )


_STRETCHES = (
    TextColumn("from"), TextColumn("seconds", right=True, priority=1),
    TextColumn("steps", right=True, priority=5), TextColumn("B", right=True, priority=2),
    TextColumn("recorded"), TextColumn("changed to"), TextColumn("reason", priority=4),
    TextColumn("estimated gain", right=True, priority=1),
    TextColumn("unobserved", right=True, priority=3),
)  # fmt: skip


def _arm(arm: "Arm") -> str:
    return f"{arm.drafter} {arm.gamma}"


def _values(verdict: "ReplayVerdict", compared: "Comparison | None") -> dict[str, Any]:
    from dataclasses import asdict

    body = asdict(verdict) | {"same": verdict.is_same}
    if verdict.first is not None:
        body["first"]["path"] = str(verdict.first.path)
    if compared is not None:
        body["otherwise"] = asdict(compared) | {
            "estimate": True,
            "differing_share": compared.differing_share,
            "recorded_tokens_per_second": compared.recorded_rate,
            "other_tokens_per_second": compared.other_rate,
            "observed_tokens_per_second": compared.observed_rate,
            "gain": compared.gain,
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
    from controller.recording.incident_report import render_ticket
    from controller.recording.recording import find
    from controller.recording.replay import replay
    from controller.recording.window import Window
    from controller.util.files import write_whole

    try:
        window = Window()
        verdict = replay(find(recording, engine), [window])
        text = render_ticket(window, verdict)
    except SpeculationError as error:
        refuse("report", " ".join(str(error).splitlines()))
    try:
        write_whole(file, text.encode("utf-8", "replace"))
    except OSError as error:
        refuse("report", f"{file} cannot be written: {error.strerror}")
    steps, plans = len(window.steps), window.plan_count
    show_one(
        "IncidentReport",
        {"path": file, "engine_id": verdict.engine_id, "steps": steps, "plans": plans},
        output,
        [str(file)],
        lambda: print_line(f"{file}: {steps} steps, {plans} plans"),
    )

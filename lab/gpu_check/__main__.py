"""The command line of the check."""

from pathlib import Path
from typing import Annotated

import typer

from lab.gpu_check import page, report
from lab.gpu_check.parts import ALL, DEFAULT_PARTS, PARTS, UnknownPartError, parse_parts
from lab.gpu_check.run import GpuCheckOptions, run
from lab.gpu_check.shapes import QWEN3_8B, SHAPES, SMALL
from lab.harness.errors import HarnessError
from lab.harness.machine import gpus
from lab.harness.processes import end_on_sigterm
from lab.harness.terminal import Terminal

EXIT_FAILED = 1
EXIT_USAGE = 2  # an unknown part, or no GPU
EXIT_PROBLEM = 3  # eager steps, or a drafter that does not learn


def check(
    options: Annotated[
        list[str] | None, typer.Argument(help="Further options for SGLang, after --.")
    ] = None,
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}.")] = QWEN3_8B.name,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="On this processor: tries the check itself out.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="How many pairs of plays are compared.")] = 3,
    profile_seconds: Annotated[
        float, typer.Option(min=1, help="Time for measuring the step costs.")
    ] = 120.0,
    output: Annotated[Path, typer.Option(help="Where the findings and the logs go.")] = Path(
        "build/gpu-check"
    ),
    parts: Annotated[
        str, typer.Option(help=f"Of {', '.join(PARTS)}, or {ALL}; always run in this order.")
    ] = ",".join(DEFAULT_PARTS),
    keep_profile: Annotated[
        Path | None, typer.Option(help="A folder that gets the profile too.")
    ] = None,
) -> None:
    """Runs SGLang with CUDA graphs on a model-shaped target and measures every arm."""
    end_on_sigterm()
    terminal = Terminal()
    if shape not in SHAPES:
        terminal.say(f"--shape {shape!r} is unknown: choose one of {', '.join(SHAPES)}")
        raise typer.Exit(EXIT_FAILED)
    try:
        wanted = parse_parts(parts)
    except UnknownPartError as error:
        terminal.say(str(error))
        raise typer.Exit(EXIT_USAGE) from error
    if not cpu and not gpus():
        terminal.say(
            "no GPU was found (nvidia-smi lists none); `--cpu --shape "
            f"{SMALL.name}` runs the same check on the processor"
        )
        raise typer.Exit(EXIT_USAGE)
    asked = GpuCheckOptions(
        shape=SHAPES[shape],
        on_cpu=cpu,
        repeats=repeats,
        profile_seconds=profile_seconds,
        output=output,
        engine_options=tuple(options or ()),
        keep_profile=keep_profile,
        parts=wanted,
    )
    try:
        found = run(asked, terminal)
    except HarnessError as error:
        terminal.say(f"\nThe check failed: {error}")
        raise typer.Exit(EXIT_FAILED) from error
    (output / "findings.md").write_text(report.markdown(found) + "\n")
    text = page.markdown(found)
    (output / "page.md").write_text(text + "\n")
    terminal.say(f"\n{text}\n\nTo send: {output / 'page.md'}. More: {output / 'findings.md'}")
    if any(found.get(part, {}).get("wrong") for part in ("exact", "learning")):
        raise typer.Exit(EXIT_FAILED)
    if report.problems(found):
        raise typer.Exit(EXIT_PROBLEM)


if __name__ == "__main__":
    typer.run(check)

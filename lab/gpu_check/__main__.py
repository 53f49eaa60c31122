"""The command line of the check."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lab.gpu_check import page
from lab.gpu_check.budget import total_seconds
from lab.gpu_check.check import GpuCheckOptions
from lab.gpu_check.parts import ALL, DEFAULT_PARTS, PARTS, UnknownPartError, parse_parts
from lab.gpu_check.run import choose_scale, planned_parts, run
from lab.gpu_check.shapes import (
    EMULATED,
    QWEN3_8B,
    SCALES,
    SHAPES,
    SMALL,
    Device,
    OnCpu,
    OnEmulatedCuda,
    SglangOptions,
    load_shape,
    parse_scale,
)
from lab.harness.errors import HarnessError
from lab.harness.measured import gpus
from lab.harness.processes import end_on_sigterm
from lab.harness.terminal import EXIT_FAILED, Terminal

# A wrong token, too, ends with EXIT_FAILED.
EXIT_USAGE = 2  # an option that cannot be used, or no GPU
EXIT_PROBLEM = 3  # eager steps, lost requests, or a drafter that does not learn


def check(
    options: SglangOptions = None,
    minutes: Annotated[float, typer.Option(min=0.5, help="Budget of the whole check.")] = 10.0,
    parts: Annotated[
        str,
        typer.Option(
            help=f"What runs, in this order, separated by commas: {', '.join(PARTS)}, or {ALL}."
        ),
    ] = ",".join(DEFAULT_PARTS),
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would run and how long it would take.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            help=f"Sizes of all parts: {', '.join(s.name for s in SCALES)}. "
            "By default, the largest that fits the budget."
        ),
    ] = "",
    shape: Annotated[
        str,
        typer.Option(help=f"Shape of the large models: {', '.join(SHAPES)}, or a JSON file."),
    ] = QWEN3_8B.name,
    graph_sizes: Annotated[
        str,
        typer.Option(help="Batch sizes with CUDA graphs and a column in the cost table: 1,4,16."),
    ] = "",
    startup_seconds: Annotated[
        float, typer.Option(min=1, help="Longest start of one engine.")
    ] = 600.0,
    small_options: Annotated[
        str, typer.Option(help="Further options of SGLang for the small trained models.")
    ] = "",
    output: Annotated[Path, typer.Option(help="Folder for page, result and logs.")] = Path(
        "build/gpu-check"
    ),
    keep_profile: Annotated[
        Path | None, typer.Option(help="Folder that gets the profile of a GPU as well.")
    ] = None,
    cpu: OnCpu = False,
    emulated: OnEmulatedCuda = False,
) -> None:
    """Measures SGLang with CUDA graphs: exact tokens, costs, and steered against other policies."""
    end_on_sigterm()
    terminal = Terminal()
    device = Device.EMULATED if emulated else Device.CPU if cpu else Device.GPU
    try:
        model_shape = EMULATED if emulated else load_shape(shape)
        check_options = GpuCheckOptions(
            shape=model_shape,
            device=device,
            parts=parse_parts(parts),
            seconds=60.0 * minutes,
            output=output,
            scale=parse_scale(scale),
            graph_sizes=() if emulated else parse_sizes(graph_sizes, model_shape.max_batch),
            startup_seconds=startup_seconds,
            engine_options=tuple(options or ()),
            small_options=tuple(shlex.split(small_options)),
            keep_profile=keep_profile if device is Device.GPU else None,
        )
    except (UnknownPartError, HarnessError, ValueError) as error:
        terminal.say(str(error))
        raise typer.Exit(EXIT_USAGE) from error
    if plan:
        show_plan(check_options, terminal)
        return
    if device is Device.GPU and not gpus():
        terminal.say(
            "No GPU was found (nvidia-smi lists none).  On a machine without one, `--plan` prints "
            "what would run, `--emulated` tries the check out through SGLang's CUDA paths, and "
            f"`--cpu --shape {SMALL.name}` through its CPU paths."
        )
        raise typer.Exit(EXIT_USAGE)
    try:
        with terminal.exit_on_error("The check failed"):
            document = run(check_options, terminal)
    except (KeyboardInterrupt, SystemExit):
        terminal.say_stopped(output / "page.md")
        raise
    terminal.say(
        f"\n{page.markdown(document)}\n\nTo send: {output / 'page.md'} and {output / 'result.json'}"
    )
    if document["failed"] or page.wrong_tokens(document):
        raise typer.Exit(EXIT_FAILED)
    if page.problems(document):
        raise typer.Exit(EXIT_PROBLEM)


def parse_sizes(text: str, batch_max: int) -> tuple[int, ...]:
    """Reads batch sizes separated by commas, ascending, up to `batch_max`.  Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 1 <= int(word) <= batch_max for word in words):
        raise ValueError(
            f"--graph-sizes {text!r}: name batch sizes of 1 to {batch_max}, as in 1,4,16"
        )
    return tuple(sorted({int(word) for word in words}))


def show_plan(options: GpuCheckOptions, terminal: Terminal) -> None:
    """Prints counts and estimated seconds of each part."""
    scale = choose_scale(options)
    planned = planned_parts(options, scale)
    terminal.table(
        f"Scale: {scale.name}; budget: {options.seconds / 60:g} minutes",
        ["part", "starts", "captures", "steps", "prompts", "waits, s", "total, s"],
        [
            [
                part.name, str(part.work.launches), str(part.work.captures), str(part.work.passes),
                str(part.work.requests), f"{part.work.wait_seconds:.0f}", f"{part.seconds:.0f}",
            ]
            for part in planned
        ],
    )  # fmt: skip
    planned_seconds = total_seconds(planned)
    terminal.say(f"Together {planned_seconds:.0f} s. Prices: {options.prices.source}.")
    if planned_seconds > options.seconds:
        terminal.say(
            f"The budget is {options.seconds:.0f} s: what does not fit is left out, the last parts "
            "first.  Give more --minutes, fewer --parts or fewer --graph-sizes."
        )


if __name__ == "__main__":
    typer.run(check)

"""The command line of the demo."""

from pathlib import Path
from typing import Annotated

import typer

from lab.demo import report
from lab.demo.run import DemoOptions, run
from lab.demo.stream import FULL, QUICK, SEED, build_stream, halved
from lab.harness.errors import HarnessError
from lab.harness.processes import end_on_sigterm
from lab.harness.terminal import Terminal

EXIT_FAILED = 1
EXIT_NOT_EXACT = 3
_QUICK_STATIC_GAMMA = 2
_PROFILE_SECONDS = 80.0
_QUICK_PROFILE_SECONDS = 14.0


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="A shorter stream, played once, static γ given.")
    ] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Plays of each policy.")] = None,
    static_gamma: Annotated[
        int | None, typer.Option(min=1, help="Static γ; found for the stream if not given.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where result, picture and logs go.")] = Path(
        "build/demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of prompts and lengths.")] = SEED,
) -> None:
    """Plays one stream off, static, with SGLang's adaptive speculation and steered; compares."""
    end_on_sigterm()
    options = DemoOptions(
        stream=halved(build_stream(QUICK, seed)) if quick else build_stream(FULL, seed),
        repeats=repeats or (1 if quick else 3),
        static_gamma=static_gamma or (_QUICK_STATIC_GAMMA if quick else None),
        profile_seconds=_QUICK_PROFILE_SECONDS if quick else _PROFILE_SECONDS,
        output=output,
    )
    terminal = Terminal()
    try:
        outcome = run(options, terminal)
    except HarnessError as error:
        terminal.say(f"\nThe demo failed: {error}")
        raise typer.Exit(EXIT_FAILED) from error
    report.show(outcome, terminal)
    terminal.say(f"\n{output / 'result.json'}  {output / 'demo.png'}  {output / 'logs'}/")
    if not all(outcome.exact(policy) for policy in outcome.policies):
        raise typer.Exit(EXIT_NOT_EXACT)


if __name__ == "__main__":
    typer.run(demo)

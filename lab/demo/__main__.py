"""The command line of the demo."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from lab.demo import report
from lab.demo.run import DemoOptions, run
from lab.harness.processes import end_on_sigterm
from lab.harness.requirements import require
from lab.harness.terminal import Terminal
from lab.paced.traffic import DAY, DAY_SEED, UNSEEN_DAY, UNSEEN_SEED, build_stream

EXIT_NOT_EXACT = 3
_TABLE = "h100-llama3.1-8b"
_FULL_SEEDS = 3


class StreamName(Enum):
    """Names of the streams; lab/paced/traffic.py has their phases."""

    DAY = "day"
    UNSEEN = "unseen"


_PROFILE_SECONDS = {StreamName.DAY: 60.0, StreamName.UNSEEN: 30.0}


def demo(
    pace: Annotated[
        str, typer.Option(help="Whose step times: a published name, a step-cost CSV, a profile.")
    ] = _TABLE,
    dilation: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds for each second of the model; found if not given."),
    ] = None,
    stream: Annotated[StreamName, typer.Option(help="Which stream is played.")] = StreamName.DAY,
    seed: Annotated[int | None, typer.Option(help="Another seed of the stream.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Plays of each policy.")] = 1,
    full: Annotated[
        bool,
        typer.Option("--full", help="Three repeats, and the draft lengths next to the best one."),
    ] = False,
    unpaced: Annotated[bool, typer.Option(help="Prove exact tokens without a pace.")] = True,
    output: Annotated[Path, typer.Option(help="Where result, picture and logs go.")] = Path(
        "build/demo"
    ),
) -> None:
    """Plays a day off, static, with SGLang's adaptive speculation and steered; compares them."""
    require("lab.demo", "matplotlib")
    end_on_sigterm()
    plans, seed = (DAY, DAY_SEED) if stream is StreamName.DAY else (UNSEEN_DAY, UNSEEN_SEED)
    seeds = range(seed, seed + _FULL_SEEDS) if full else [seed] * repeats
    options = DemoOptions(
        table=pace,
        streams=tuple(build_stream(stream.value, plans, stream_seed) for stream_seed in seeds),
        dilation=dilation,
        profile_seconds=_PROFILE_SECONDS[stream],
        output=output,
        neighbours=full,
        unpaced=unpaced,
    )
    terminal = Terminal()
    with terminal.exit_on_error("The demo failed"):
        outcome = run(options, terminal)
    report.show(outcome, terminal)
    terminal.say(f"\n{output / 'result.json'}  {output / 'demo.png'}  {output / 'logs'}/")
    if not outcome.all_exact:
        raise typer.Exit(EXIT_NOT_EXACT)


if __name__ == "__main__":
    typer.run(demo)

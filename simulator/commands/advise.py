"""Implements `controller advise`: which GPUs of a mixed pool should train the drafter."""

from typing import Annotated

import typer

from controller.cli.output import Output, OutputOption, print_line, refuse, show_one
from simulator.gpu_allocation import Demand, InvalidPoolError, Pool, allocate


def advise(
    pool: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME:CARDS:INFERENCE:TRAINING, rates of one card in any common unit "
            "(H100:8:6.76:2.44). Once for each kind."
        ),
    ] = None,
    speedup: Annotated[
        float, typer.Option(help="Of speculation with a drafter that is kept trained.")
    ] = 1.3,
    untrained: Annotated[
        float, typer.Option(help="Of speculation with the drafter as it is; 1 for none.")
    ] = 1.0,
    training: Annotated[
        float, typer.Option(help="Training rate that is needed, in the pools' unit; 0: one card.")
    ] = 0.0,
    share: Annotated[float, typer.Option(help="Of the time that training takes.")] = 1.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Advises which GPUs should train the drafter, and from which speedup it pays off.

    By TIDE, section 5.5: GPUs that are too old for serving are often fast enough for training.

    Exit codes: 0 done, 2 bad input, with one line on standard error.
    """
    if not pool:
        refuse(
            "advise",
            "name at least one kind of GPU: --pool NAME:CARDS:INFERENCE:TRAINING, "
            "for example --pool H100:8:6.76:2.44",
        )
    try:
        pools = [_pool(text) for text in pool]
        demand = Demand(speedup, untrained, training, share)
        found = allocate(pools, demand)
    except InvalidPoolError as error:
        refuse("advise", " ".join(str(error).splitlines()))
    rows = [
        {"name": one.name, "train": count, "serve": one.gpus - count}
        for one, count in zip(pools, found.trains, strict=True)
    ]

    def tell() -> None:
        for row in rows:
            print_line(f"{row['name']}: {row['train']} train, {row['serve']} serve")
        plain = untrained == 1
        against = "no speculation" if plain else f"speculation at {untrained:g}x, untrained"
        print_line(f"throughput: {found.relative:.3f} of all cards serving with {against}")
        print_line(f"pays from a speedup of {found.break_even:.3f} on; {speedup:g} is expected")
        if not found.pays:
            print_line("advice: let all cards serve, and do not train")

    values = {
        "pools": rows, "throughput": found.relative, "break_even_speedup": found.break_even,
        "expected_speedup": speedup, "pays": found.pays,
    }  # fmt: skip
    names = [str(row["name"]) for row in rows if row["train"]]
    show_one("TrainingAdvice", values, output, names, tell)


def _pool(text: str) -> Pool:

    parts = text.split(":")
    try:
        name, gpus, inference, training = parts
        return Pool(name, int(gpus), float(inference), float(training))
    except ValueError as error:
        raise InvalidPoolError(
            f"--pool {text!r}: NAME:CARDS:INFERENCE:TRAINING is needed"
        ) from error

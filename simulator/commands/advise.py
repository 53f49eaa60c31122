"""Implements `controller advise`: which GPUs of a mixed pool should train the drafter."""

from typing import Annotated

import typer

from controller.cli.output import Output, OutputOption, exit_with_error, print_line, print_result
from simulator.gpu_allocation import Demand, GpuPool, InvalidPoolError, allocate


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
        exit_with_error(
            "advise",
            "name at least one kind of GPU: --pool NAME:CARDS:INFERENCE:TRAINING, "
            "for example --pool H100:8:6.76:2.44",
        )
    try:
        pools = [_parse_pool(text) for text in pool]
        demand = Demand(speedup, untrained, training, share)
        allocation = allocate(pools, demand)
    except InvalidPoolError as error:
        exit_with_error("advise", " ".join(str(error).splitlines()))
    rows = [
        {"name": gpu_pool.name, "train": count, "serve": gpu_pool.gpus - count}
        for gpu_pool, count in zip(pools, allocation.training_gpus, strict=True)
    ]

    def print_advice() -> None:
        for row in rows:
            print_line(f"{row['name']}: {row['train']} train, {row['serve']} serve")
        plain = untrained == 1
        baseline = "no speculation" if plain else f"speculation at {untrained:g}x, untrained"
        print_line(
            f"throughput: {allocation.relative_throughput:.3f} of all cards serving with {baseline}"
        )
        print_line(
            f"pays from a speedup of {allocation.break_even_speedup:.3f} on; {speedup:g} is "
            "expected"
        )
        if not allocation.is_worthwhile:
            print_line("advice: let all cards serve, and do not train")

    values = {
        "pools": rows, "throughput": allocation.relative_throughput,
        "break_even_speedup": allocation.break_even_speedup,
        "expected_speedup": speedup, "pays": allocation.is_worthwhile,
    }  # fmt: skip
    names = [str(row["name"]) for row in rows if row["train"]]
    print_result("TrainingAdvice", values, output, names, print_advice)


def _parse_pool(text: str) -> GpuPool:

    parts = text.split(":")
    try:
        name, gpus, inference, training = parts
        return GpuPool(name, int(gpus), float(inference), float(training))
    except ValueError as error:
        raise InvalidPoolError(
            f"--pool {text!r}: NAME:CARDS:INFERENCE:TRAINING is needed"
        ) from error

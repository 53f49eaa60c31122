"""The command line of the lab."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from lab.harness.measured import run_facts, write_result
from lab.harness.processes import end_on_sigterm
from lab.harness.terminal import Terminal
from lab.learning import headline, predictor, sd2, strides, tide, tide_control, tts
from lab.learning.engines import LabSetting
from lab.learning.headline import RESULTS_FOLDER, Headline, store_result

# Each shows one claim of a paper.
HEADLINES: dict[str, Callable[[LabSetting], Headline]] = {
    "tts-length": tts.length,
    "tts-steps": tts.steps,
    "tts-window": tts.window,
    "tts-strides": strides.tts_strides,
    "tts-choice": strides.tts_choice,
    "tts-predictor": predictor.predictor,
    "tide-eq5": tide_control.eq5,
    "tide-domains": tide_control.domains,
    "tide-matrix": tide.matrix,
    "tide-time": tide.training_time,
    **sd2.HEADLINES,
}


def lab(
    claims: Annotated[
        list[str] | None,
        typer.Argument(help=f"Of {', '.join(HEADLINES)}, which are all run if none is named."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small numbers: does it run?")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Repeats of every measurement.")] = 2,
    output: Annotated[Path, typer.Option(help="Where result, report and logs go.")] = Path(
        "build/lab"
    ),
    kept: Annotated[
        bool,
        typer.Option("--store_result", help="Keep the results of claims in docs/results as well."),
    ] = False,
) -> None:
    """Shows what the papers say of drafters that learn, on the real SGLang and small models."""
    end_on_sigterm()
    selected = claims or [*HEADLINES]
    if quick and kept:
        raise typer.BadParameter("--quick shows that it runs; such results are not kept")
    if unknown := sorted(set(selected) - set(HEADLINES)):
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; there are {', '.join(HEADLINES)}")
    terminal, started = Terminal(), time.monotonic()
    document: dict[str, Any] = {**run_facts(), "quick": quick}
    with TemporaryDirectory(prefix="speculation-lab-") as scratch:
        setting = LabSetting(output, Path(scratch), quick, 1 if quick else seeds, terminal)
        for name in selected:
            with terminal.exit_on_error(f"The lab failed in {name}"), terminal.show_progress(name):
                start_time = time.monotonic()
                result = HEADLINES[name](setting)
            result.show(name, terminal)
            if kept:
                store_result(
                    name, result, setting.seeds, time.monotonic() - start_time, RESULTS_FOLDER
                )
            document[name] = asdict(result)
            document["seconds"] = round(time.monotonic() - started, 1)
            # Written after every claim, so that a later failure loses no result.
            write_result(document, output)
            (output / "report.html").write_text(headline.page(document), encoding="utf-8")
    terminal.say(f"\n{output / 'report.html'}  {output / 'result.json'}  {output / 'logs'}/")


if __name__ == "__main__":
    typer.run(lab)

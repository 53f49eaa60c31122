"""`python -m lab.paced.curves`: the survival curves in `traffic`, made again.

A survival curve says how likely the first k of a step's drafts are all accepted: s_1, s_2, ...

With files, it replays recorded requests (SpecDecode-Bench JSONL) one after the other.  With --own,
it measures this repository's code-only EAGLE3 drafter on the real SGLang, on text of the kind that
it was trained on (code) and of a kind that it has never seen (CSV).
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from lab.cpu_engine.engine_command import MODELS, eagle3_flags, engine_command
from lab.cpu_engine.models.prompts import held_out_prompts
from lab.harness.engines import Engine, Workplace, launch_engine
from lab.harness.errors import EngineFailedError, HarnessError
from lab.harness.load_generator import PATIENT_REQUEST_SECONDS, StreamPhase
from lab.harness.processes import end_on_sigterm
from simulator.acceptance_trace import read_requests
from simulator.errors import InvalidInputError

DRAFTS = 8
_DOMAINS = ("code", "csv")
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS, _SEED = 32, 64, 160, 1
_BATCH = 16
_READY_SECONDS = 600.0
EXIT_FAILED = 1


def survival(steps: NDArray[np.uint8]) -> list[float]:
    """Returns s_1 .. s_8 of [steps] accepted drafts, to three digits."""
    return [round(float(np.mean(steps >= k)), 3) for k in range(1, DRAFTS + 1)]


def replay_request(accepted: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[steps] drafts that are accepted when a recorded request is decoded with 8 drafts a step.

    accepted: [positions], drafts that would be accepted if drafting started there.
    """
    steps, position = [], 0
    while position < len(accepted):
        steps.append(min(int(accepted[position]), DRAFTS))
        position += steps[-1] + 1
    return np.array(steps, dtype=np.uint8)


def read_curves(path: Path) -> dict[tuple[str, str], list[float]]:
    """(drafter, which requests) -> survival curve.

    Which: all of them, and the tenths whose steps accept least and most drafts on average.  Raises
    InvalidInputError for what the reader refuses.
    """
    recorded = read_requests(path, "")
    survival_curves: dict[tuple[str, str], list[float]] = {}
    for drafter in recorded[0].accepted:
        requests = sorted(
            (replay_request(request.accepted[drafter]) for request in recorded),
            key=lambda steps: float(steps.mean()),
        )
        tenth = max(1, len(requests) // 10)
        parts = {"all": requests, "least": requests[:tenth], "most": requests[-tenth:]}
        for name, part in parts.items():
            survival_curves[drafter, name] = survival(np.concatenate(part))
    return survival_curves


def measure_survival(prompts: Sequence[Sequence[int]], engine: Engine) -> list[float]:
    """The survival curve of an engine that drafts 8 tokens a step, from SGLang's own counts.

    Raises EngineFailedError when the engine refuses a request or reports no counts.
    """
    stream = [StreamPhase.from_prompts("held out", len(prompts), prompts, _NEW_TOKENS)]
    counts = np.zeros(DRAFTS + 1, dtype=np.int64)
    for answer in engine.play(stream, request_seconds=PATIENT_REQUEST_SECONDS).answers:
        if not answer.accepted_counts:
            raise EngineFailedError("the engine reports no spec_correct_drafts_histogram")
        counts[: len(answer.accepted_counts)] += answer.accepted_counts
    return survival(np.repeat(np.arange(DRAFTS + 1, dtype=np.uint8), counts))


def _measure_own() -> None:
    flags = [*eagle3_flags(MODELS / "draft-code", DRAFTS), "--disable-radix-cache"]
    with TemporaryDirectory(prefix="speculation-curves-") as folder:
        place = Workplace(Path(folder), Path(folder))
        engine = launch_engine(
            "curves", lambda port: engine_command(port, _BATCH, flags), {}, place
        )
        with engine.child:
            engine.wait_ready(_READY_SECONDS)
            for domain in _DOMAINS:
                prompts = held_out_prompts(domain, _PROMPTS, _PROMPT_TOKENS, _SEED)
                _show("draft-code", f"on {domain}", measure_survival(prompts, engine))


def _show(drafter: str, subset: str, curve: Sequence[float]) -> None:
    values = ", ".join(f"{value:.3f}" for value in curve)
    typer.echo(f"{drafter:12} {subset:8} {values}")


def curves(
    files: Annotated[
        list[Path] | None, typer.Argument(help="SpecDecode-Bench JSONL files.")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Measures this repository's code-only drafter.")
    ] = False,
) -> None:
    """Prints survival curves s_1 .. s_8 of drafters, with 8 drafts a step."""
    end_on_sigterm()
    if not files and not own:
        raise typer.BadParameter("name a file, or --own")
    try:
        for file in files or []:
            typer.echo(file.name)
            for (drafter, subset), curve in read_curves(file).items():
                _show(drafter, subset, curve)
        if own:
            _measure_own()
    except (InvalidInputError, HarnessError) as error:
        typer.echo(f"The curves could not be made: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error


if __name__ == "__main__":
    typer.run(curves)

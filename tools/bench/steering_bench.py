"""Measures what an SD² drafter adds to a step, in about two minutes.

    python -m tools.bench.steering_bench

Two real CPU engines serve the shipped SD2 drafter at one draft length, one of them with the
steering left out (unsteered.py); everything else is the same.  They answer the same prompts in
turn; a ratio is that of seconds a step, steered over unsteered, of two answers one after the other.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lab.cpu_engine.engine_command import MODELS
from lab.harness.scripted_sidecar import scripted_sidecar
from tests.support.engine import DEEP, EngineProcess, install_plugin, running_engine
from tests.support.eventually import eventually
from tools.bench.measurement import RATIO, Measurement, command_line, run
from tools.bench.pairs import measure_step_seconds, ratios

_BATCHES = (1, 8)
_GAMMA = 3
_OPTIONS = (
    *DEEP,
    "--speculative-algorithm", "EAGLE3",
    "--speculative-draft-model-path", str(MODELS / "sd2"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """A ratio for each batch."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folders = {kind: place / kind for kind in ("one", "other")}
        for folder in folders.values():
            folder.mkdir()
        left_out = install_plugin(
            place / "plugin", "tools.bench.unsteered:leave_out", name="zz_unsteered"
        )
        with (
            scripted_sidecar(folders["one"]) as steered_sidecar,
            scripted_sidecar(folders["other"]) as unsteered_sidecar,
            running_engine(
                folders["one"], _OPTIONS, {"SPECULATION_SIDECAR": steered_sidecar.target}
            ) as steered,
            running_engine(
                folders["other"],
                _OPTIONS,
                {"SPECULATION_SIDECAR": unsteered_sidecar.target, "PYTHONPATH": str(left_out)},
            ) as unsteered,
        ):
            for sidecar in (steered_sidecar, unsteered_sidecar):
                eventually(lambda s=sidecar: s.introductions, description="an introduction")  # type: ignore[misc]
                sidecar.run(lambda _: (_GAMMA, False))
            for size in _BATCHES:

                def seconds(engine: EngineProcess, size: int = size) -> float:
                    return measure_step_seconds(engine, "code", size, options.tokens)

                yield Measurement(
                    f"a steered step over the same unsteered, gamma = {_GAMMA}, B = {size}",
                    RATIO,
                    ratios(steered, unsteered, seconds, options.repeats),
                )


PARSER = command_line(__doc__, repeats=9, repeats_help="pairs of answers for each figure")
PARSER.add_argument("--tokens", type=int, default=200, help="new tokens of each request")

if __name__ == "__main__":
    run(PARSER, measure)

"""What gamma = 0 costs: `python -m tests.system.bench.asleep_bench` (about 3 minutes).

Two real CPU engines stand beside each other, one without speculation configured, one with EAGLE3,
the plugin and a scripted sidecar that holds it at gamma = 0, the drafter asleep or kept warm.
Both answer the same prompts in turn; a ratio is that of two answers one after the other, tokens/s
of the held engine over those of the plain one.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.support.engine import DEEP, DEEP_EAGLE3, EngineProcess, serving
from tests.support.eventually import eventually
from tests.support.scripted_sidecar import scripted_sidecar
from tests.system.bench.measurement import RATIO, Measurement, run
from tests.system.bench.pairs import ratios, seconds_of

_BATCHES = (1, 8)
_MODES = {"asleep": True, "kept warm": False}


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """A ratio for each mode and batch."""
    with tempfile.TemporaryDirectory() as name, scripted_sidecar(Path(name)) as sidecar:
        held_env = {"SPECULATION_SIDECAR": sidecar.server.target}
        with (
            serving(Path(name) / "plain", DEEP) as plain,
            serving(Path(name) / "held", DEEP_EAGLE3, held_env) as held,
        ):
            eventually(lambda: sidecar.server.introductions, what="an introduction")
            for mode, asleep in _MODES.items():
                sidecar.run(lambda _, asleep=asleep: (0, asleep))  # type: ignore[misc]
                for size in _BATCHES:

                    def seconds(engine: EngineProcess, size: int = size) -> float:
                        return seconds_of(engine, "json", size, options.tokens)

                    yield Measurement(
                        f"gamma = 0, {mode}, over no speculation, B = {size}",
                        RATIO,
                        ratios(plain, held, seconds, options.repeats),
                        at_least=0.97 if asleep else None,
                    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="pairs of answers for each figure")
    parser.add_argument("--tokens", type=int, default=300, help="new tokens of each request")
    run(parser, measure, "tests.system.bench.asleep_bench")


if __name__ == "__main__":
    main()

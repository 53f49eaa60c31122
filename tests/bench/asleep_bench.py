"""What gamma = 0 costs: `python -m tests.bench.asleep_bench` (about 3 minutes, prints JSON).

Two real CPU engines stand beside each other, one without speculation configured, one with EAGLE3,
the plugin and a scripted sidecar that holds it at gamma = 0, the drafter asleep or kept warm.
Both answer the same prompts in turn; a ratio is that of two answers one after the other, tokens/s
of the held engine over those of the plain one.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_shim.cpu.models.prompts import held_out_prompts
from engine_shim.stage.machine import machine
from engine_shim.stage.spread import Spread
from tests.engine_shim.link.eventually import eventually
from tests.engine_shim.sglang.engine import EAGLE3, EngineProcess, serving
from tests.engine_shim.sglang.scripted import scripted_sidecar

_BATCHES = (1, 8)
_PROMPT_TOKENS = 60
_MODES = {"asleep": True, "warm": False}
_QUIET = ["--sleep-on-idle"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="pairs of answers for each figure")
    parser.add_argument("--tokens", type=int, default=300, help="new tokens of each request")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "new_tokens": options.tokens}
    with tempfile.TemporaryDirectory() as name, scripted_sidecar(Path(name)) as sidecar:
        held_env = {"SPECULATION_SIDECAR": sidecar.server.target}
        with (
            serving(Path(name) / "plain", _QUIET, {}) as plain,
            serving(Path(name) / "held", [*EAGLE3, *_QUIET], held_env) as held,
        ):
            eventually(lambda: sidecar.server.introductions, what="an introduction")
            for mode, asleep in _MODES.items():
                sidecar.run(lambda _, asleep=asleep: (0, asleep))  # type: ignore[misc]
                for batch_size in _BATCHES:
                    ratios = _ratios(plain, held, batch_size, options)
                    found[f"{mode}, B = {batch_size}"] = ratios.as_json()
    print(json.dumps(found, indent=2))
    return 0


def _ratios(
    plain: EngineProcess, held: EngineProcess, batch_size: int, options: argparse.Namespace
) -> Spread:
    prompts = held_out_prompts("json", count=batch_size, length_tokens=_PROMPT_TOKENS, seed=5)
    lengths = [options.tokens] * batch_size

    def seconds(engine: EngineProcess) -> float:
        began = time.perf_counter()
        engine.generate(prompts, lengths)
        return time.perf_counter() - began

    seconds(plain), seconds(held)
    ratios = []
    for repeat in range(options.repeats):
        pair = (plain, held) if repeat % 2 else (held, plain)
        took = {id(engine): seconds(engine) for engine in pair}
        ratios.append(took[id(plain)] / took[id(held)])
    return Spread(tuple(ratios))


if __name__ == "__main__":
    raise SystemExit(main())

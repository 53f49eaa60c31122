"""What steering adds to a step: `python -m tests.bench.steering_bench` (about 2 minutes, JSON).

Two real CPU engines serve the shipped steered drafter at one draft length, one of them with the
steering left out (unsteered.py); everything else is the same.  They answer the same prompts in
turn; a ratio is that of seconds a step, steered over unsteered, of two answers one after the other.
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
from tests.engine_shim.sglang.engine import MODELS, EngineProcess, install_plugin, serving
from tests.engine_shim.sglang.scripted import scripted_sidecar

_BATCHES = (1, 8)
_GAMMA = 3
_OPTIONS = (
    "--speculative-algorithm", "EAGLE3",
    "--speculative-draft-model-path", str(MODELS / "steered"), "--sleep-on-idle",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="pairs of answers for each figure")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each request")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "gamma": _GAMMA, "new_tokens": options.tokens}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folders = {kind: place / kind for kind in ("one", "other")}
        for folder in folders.values():
            folder.mkdir()
        left_out = install_plugin(
            place / "plugin", "tests.bench.unsteered:leave_out", name="zz_unsteered"
        )
        with (
            scripted_sidecar(folders["one"]) as one,
            scripted_sidecar(folders["other"]) as other,
            serving(
                folders["one"], _OPTIONS, {"SPECULATION_SIDECAR": one.server.target}
            ) as steered,
            serving(
                folders["other"],
                _OPTIONS,
                {"SPECULATION_SIDECAR": other.server.target, "PYTHONPATH": str(left_out)},
            ) as unsteered,
        ):
            for sidecar in (one, other):
                eventually(lambda s=sidecar: s.server.introductions, what="an introduction")  # type: ignore[misc]
                sidecar.run(lambda _: (_GAMMA, False))
            for batch_size in _BATCHES:
                ratios = _ratios(steered, unsteered, batch_size, options)
                found[f"seconds a step, B = {batch_size}"] = ratios.as_json()
    print(json.dumps(found, indent=2))
    return 0


def _ratios(
    steered: EngineProcess, unsteered: EngineProcess, batch_size: int, options: argparse.Namespace
) -> Spread:
    prompts = held_out_prompts("code", count=batch_size, length_tokens=60, seed=5)
    lengths = [options.tokens] * batch_size

    def step_seconds(engine: EngineProcess) -> float:
        began = time.perf_counter()
        answers = engine.generate(prompts, lengths)
        steps: int = max(answer.meta["spec_verify_ct"] for answer in answers)
        return (time.perf_counter() - began) / steps

    step_seconds(steered), step_seconds(unsteered)
    ratios = []
    for repeat in range(options.repeats):
        pair = (steered, unsteered) if repeat % 2 else (unsteered, steered)
        took = {id(engine): step_seconds(engine) for engine in pair}
        ratios.append(took[id(steered)] / took[id(unsteered)])
    return Spread(tuple(ratios))


if __name__ == "__main__":
    raise SystemExit(main())

"""What collecting training signals costs: `python -m tests.bench.collect_bench` (about 3 minutes).

One real CPU engine with EAGLE3 answers the same prompts in turn with the plan's regime at off and
at collect; a ratio is that of two answers one after the other: the median decode step without over
that while collecting, and tokens/s while collecting over those without.  Prints JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from engine_shim.cpu.models.prompts import held_out_prompts
from engine_shim.stage.machine import machine
from engine_shim.stage.spread import Spread
from tests.engine_shim.link.eventually import eventually
from tests.engine_shim.sglang.engine import EAGLE3, serving
from tests.engine_shim.sglang.scripted import scripted_sidecar

_BATCHES = (1, 8)
_PROMPT_TOKENS = 60
_GAMMA = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of answers for each figure")
    parser.add_argument("--tokens", type=int, default=300, help="new tokens of each request")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "new_tokens": options.tokens, "gamma": _GAMMA}
    with tempfile.TemporaryDirectory() as name, scripted_sidecar(Path(name)) as sidecar:
        sidecar.script = lambda _: (_GAMMA, False)
        variables = {
            "SPECULATION_SIDECAR": sidecar.server.target,
            "SPECULATION_SIGNALS_FOLDER": f"{name}/signals",
        }
        with serving(Path(name) / "engine", EAGLE3, variables) as engine:
            eventually(lambda: sidecar.server.introductions, what="an introduction")

            def play(prompts: list[list[int]], *, collect: bool) -> tuple[float, float]:
                """Tokens/s, and steps/s by the median step."""
                sidecar.collect = collect
                before = sidecar.run(sidecar.script)
                began = time.perf_counter()
                answers = engine.generate(prompts, [options.tokens] * len(prompts))
                seconds = time.perf_counter() - began
                rows = sum(answer.meta["spec_verify_ct"] for answer in answers)
                steps = [
                    report.step_seconds
                    for report in sidecar.reports_since(before, rows)
                    if not report.flags.after_gap
                ]
                return options.tokens * len(prompts) / seconds, 1 / median(steps)

            for size in _BATCHES:
                prompts = held_out_prompts("json", count=size, length_tokens=_PROMPT_TOKENS, seed=5)
                play(prompts, collect=True)
                pairs = []
                for repeat in range(options.repeats):
                    order = (True, False) if repeat % 2 else (False, True)
                    found_now = {collect: play(prompts, collect=collect) for collect in order}
                    pairs.append(
                        [a / b for a, b in zip(found_now[True], found_now[False], strict=True)]
                    )
                tokens, steps = zip(*pairs, strict=True)
                found[f"B = {size}"] = {
                    "tokens/s": Spread(tokens).as_json(),
                    "steps/s": Spread(steps).as_json(),
                }
            state = engine.internal_state()["speculation_controller"]["signals"]
    found["signals"] = {name: state[name] for name in ("signals", "positions", "dropped")}
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

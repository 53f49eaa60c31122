"""What collecting training signals costs: `python -m tests.bench.collect_bench` (3 minutes).

One real CPU engine with EAGLE3 answers the same prompts in turn with the plan's regime at off and
at collect; a ratio is that of two answers one after the other: the median decode step without over
that while collecting, and tokens/s while collecting over those without.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from tests.bench.measurement import RATIO, Measurement, run
from tests.bench.pairs import prompts_of
from tests.engine_shim.link.eventually import eventually
from tests.engine_shim.sglang.engine import EAGLE3, EngineProcess, serving
from tests.engine_shim.sglang.scripted import ScriptedSidecar, scripted_sidecar

_BATCHES = (1, 8)
_GAMMA = 3


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Two ratios for each batch.  Raises RuntimeError where signals were dropped."""
    with tempfile.TemporaryDirectory() as folder, scripted_sidecar(Path(folder)) as sidecar:
        sidecar.script = lambda _: (_GAMMA, False)
        variables = {
            "SPECULATION_SIDECAR": sidecar.server.target,
            "SPECULATION_SIGNALS_FOLDER": f"{folder}/signals",
        }
        with serving(Path(folder) / "engine", EAGLE3, variables) as engine:
            eventually(lambda: sidecar.server.introductions, what="an introduction")
            for size in _BATCHES:
                _play(engine, sidecar, size, options.tokens, collect=True)
                tokens, steps = [], []
                for repeat in range(options.repeats):
                    order = (True, False) if repeat % 2 else (False, True)
                    found = {
                        collect: _play(engine, sidecar, size, options.tokens, collect=collect)
                        for collect in order
                    }
                    tokens.append(found[True][0] / found[False][0])
                    steps.append(found[True][1] / found[False][1])
                name = f"collecting over not, B = {size}"
                yield Measurement(f"{name}, steps/s", RATIO, steps, at_least=0.99)
                yield Measurement(f"{name}, tokens/s", RATIO, tokens)
            dropped = engine.internal_state()["speculation_controller"]["signals"]["dropped"]
    if dropped:
        raise RuntimeError(f"{dropped} signals were dropped: less was done than is claimed")


def _play(
    engine: EngineProcess, sidecar: ScriptedSidecar, size: int, tokens: int, *, collect: bool
) -> tuple[float, float]:
    """Tokens/s, and steps/s by the median step."""
    sidecar.collect = collect
    before = sidecar.run(sidecar.script)
    began = time.perf_counter()
    answers = engine.generate(prompts_of("json", size), [tokens] * size)
    seconds = time.perf_counter() - began
    rows = sum(answer.meta["spec_verify_ct"] for answer in answers)
    steps = [
        report.step_seconds
        for report in sidecar.reports_since(before, rows)
        if not report.flags.after_gap
    ]
    return tokens * size / seconds, 1 / median(steps)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="pairs of answers for each figure")
    parser.add_argument("--tokens", type=int, default=300, help="new tokens of each request")
    run(parser, measure, "tests.bench.collect_bench")


if __name__ == "__main__":
    main()

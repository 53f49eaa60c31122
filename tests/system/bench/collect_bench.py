"""What collecting training signals costs: `python -m tests.system.bench.collect_bench` (5 minutes).

One real CPU engine with EAGLE3 answers prompts; the plan's regime is off for BLOCK steps and
collect for as many, in turn.  A ratio is that of the median step without over that of a block with,
where without is the geometric mean of the blocks before and after it: what the machine does over
seconds cancels.  The drafts are the same in both, so that the ratio is that of the tokens/s too.
"""

import argparse
import math
import tempfile
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final

from speculation.v1.engine_pb2 import StepReport
from tests.support.engine import DEEP_EAGLE3, EngineProcess, serving
from tests.support.eventually import eventually
from tests.support.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from tests.system.bench.measurement import RATIO, Measurement, run
from tests.system.bench.pairs import prompts_of

_BATCHES: Final = (1, 8)
_GAMMA: Final = 3
_BLOCK: Final = 32
# Fewer: the block was cut by an answer's end, or reports came late.
_STEPS_MIN: Final = 20
_WARM_TOKENS: Final = 50


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """A ratio for each batch.  Raises RuntimeError where signals were dropped."""
    with tempfile.TemporaryDirectory() as folder, scripted_sidecar(Path(folder)) as sidecar:

        def alternating(count: int) -> Arm:
            sidecar.collect = count // _BLOCK % 2 == 1
            return _GAMMA, False

        variables = {**sidecar.variables, "SPECULATION_SIGNALS_FOLDER": f"{folder}/signals"}
        with serving(Path(folder) / "engine", DEEP_EAGLE3, variables) as engine:
            eventually(lambda: sidecar.server.introductions, what="an introduction")
            for size in _BATCHES:
                _answer(engine, sidecar, size, _WARM_TOKENS)
                found: list[float] = []
                for _ in range(options.answers):
                    sidecar.run(alternating)
                    reports = _answer(engine, sidecar, size, options.tokens)
                    found += _ratios(reports, sidecar.collecting)
                name = f"collecting over not, B = {size}, steps/s"
                yield Measurement(name, RATIO, found, at_least=0.99)
            signals = engine.internal_state()["speculation_controller"]["signals"]
    if signals["dropped"] or signals["unread"]:
        raise RuntimeError(f"less was done than is claimed: {signals}")


def _answer(
    engine: EngineProcess, sidecar: ScriptedSidecar, size: int, tokens: int
) -> list[StepReport]:
    """The steps of `size` requests at once, without those that something came between."""
    before = len(sidecar.reports)
    answers = engine.generate(prompts_of("json", size), [tokens] * size)
    rows = sum(answer.meta["spec_verify_ct"] for answer in answers)
    reports = sidecar.reports_since(before, rows)
    return [r for r in reports if r.batch_size == size and not r.flags.after_gap]


def _ratios(reports: Sequence[StepReport], collecting: set[int]) -> list[float]:
    """Of each block that collects and has a block on either side that does not."""
    blocks = [
        (collects, [report.step_seconds for report in block])
        for collects, block in groupby(reports, lambda r: r.plan_epoch in collecting)
    ]
    whole = [(collects, median(steps), len(steps) >= _STEPS_MIN) for collects, steps in blocks]
    return [
        math.sqrt(before * after) / during
        for (_, before, a), (collects, during, b), (_, after, c) in zip(
            whole, whole[1:], whole[2:], strict=False
        )
        if collects and a and b and c
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=int, default=15, help="answers for each figure")
    parser.add_argument("--tokens", type=int, default=600, help="new tokens of each request")
    run(parser, measure, "tests.system.bench.collect_bench")


if __name__ == "__main__":
    main()

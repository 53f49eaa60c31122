"""Runs an engine's end of the link as a program, from the tree of any version.

    python engine_program.py ADDRESS [plain]

plain: it introduces no mixture, which a sidecar from before mixtures would refuse.
Each line on its standard input is a number of steps.  After them it answers with one line of JSON:
the source of the last choice, and its draft length.
"""

import inspect
import json
import sys
import time
from functools import partial

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.settings import LinkSettings
from speculation.v1 import engine_pb2
from speculation.v1.engine_pb2 import (
    DRAFTER_KIND_MTP,
    DRAFTER_KIND_NGRAM,
    Drafter,
    EngineSpec,
)


def main() -> None:
    """Runs the engine until its standard input ends."""
    drafters = _drafters(mixture="plain" not in sys.argv)
    spec = EngineSpec(engine_id="of-another-version", drafters=drafters, max_batch_size=64)
    link = EngineLink.start(spec, LinkSettings(sidecar=sys.argv[1]), startup_gamma=1)
    # The oldest link takes the fields of a report one by one.
    takes_fields = len(inspect.signature(link.report).parameters) > 1
    step = 0
    try:
        for line in sys.stdin:
            for _ in range(int(line)):
                step += 1
                choice = link.choose(4)
                counts = [0] * choice.gamma + [4]
                seconds = 0.01 * (1 + 0.08 * choice.gamma)
                if takes_fields:
                    link.report(  # type: ignore[call-arg]
                        *(step, 4, 2048, choice.drafter_index, choice.gamma, counts, seconds, 0),  # type: ignore[arg-type]
                        *(choice.epoch, choice.probe_id, choice.session),
                    )
                else:
                    report = engine_pb2.StepReport(
                        step=step,
                        batch_size=4,
                        kv_tokens=2048,
                        drafter=spec.drafters[choice.drafter_index].name,
                        gamma=choice.gamma,
                        accepted_counts=counts,
                        step_seconds=seconds,
                        plan_epoch=choice.epoch,
                        probe_id=choice.probe_id,
                        plan_session=choice.session,
                    )
                    link.report(partial(_copy_report, report))
                time.sleep(0.002)
            print(json.dumps({"source": choice.source.value, "gamma": choice.gamma}), flush=True)
    finally:
        link.close()


def _copy_report(report: engine_pb2.StepReport, empty: engine_pb2.StepReport) -> None:
    empty.CopyFrom(report)


def _drafters(*, mixture: bool) -> list[Drafter]:
    """All that this version can introduce."""
    gammas = (1, 2, 3, 5, 7)
    drafters = [
        Drafter(name="eagle3", kind=DRAFTER_KIND_MTP, gammas=(0, *gammas)),
        Drafter(name="ngram", kind=DRAFTER_KIND_NGRAM, gammas=gammas),
    ]
    if mixture and hasattr(engine_pb2, "Mixture"):
        drafters.append(
            Drafter(
                name="eagle3+ngram",
                kind=engine_pb2.DRAFTER_KIND_MIXTURE,
                gammas=gammas,
                mixture=engine_pb2.Mixture(main="eagle3", free="ngram"),
            )
        )
    return drafters


if __name__ == "__main__":
    main()

"""An engine whose drafter can learn, under the real sidecar: it learns without an order."""

import itertools
import time
from pathlib import Path

import grpc
import pytest

from lab.cpu_engine.models.prompts import held_out_prompts
from lab.harness.sidecar import temporary_override
from speculation.v1 import plan_pb2, service_pb2, service_pb2_grpc
from tests.support.engine import CODE_ONLY, ONLINE, running_engine
from tests.support.eventually import eventually
from tests.support.sidecar_process import sidecar_process

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

TOKENS = 300
# It ends as soon as it has learnt, which a busy machine delays: the trainer starts late, and
# updates cost more.  What may be lost to finding out grows with time and not with answers.
MOST_SECONDS = 500.0
# Tokens a step: the drafter as loaded comes to 1.1 to 1.2.
LEARNT = 1.45


def test_the_sidecar_finds_out_that_learning_pays(tmp_path: Path) -> None:
    variables = ONLINE | {"SPECULATION_ENGINE_ID": "learner"}
    with sidecar_process(tmp_path / "sidecar") as sidecar:
        address = sidecar.address
        variables["SPECULATION_SIDECAR"] = address
        with (
            running_engine(tmp_path / "engine", CODE_ONLY, variables) as engine,
            grpc.insecure_channel(address) as channel,
        ):
            inspection = service_pb2_grpc.InspectionServiceStub(channel)

            def explained() -> service_pb2.ExplainResponse:
                question = service_pb2.ExplainRequest(engine_id="learner")
                answer: service_pb2.ExplainResponse = inspection.Explain(question, timeout=60)
                return answer

            def introduced() -> bool:
                return bool(inspection.ListEngines(service_pb2.ListEnginesRequest()).engines)

            eventually(introduced, description="the engine introduces itself")
            lengths = []
            end = time.monotonic() + MOST_SECONDS
            # On a busy machine no draft may pay, and then a better drafter shows nowhere.
            with temporary_override(address, "--gamma", "3"):
                for seed in itertools.count():
                    prompts = held_out_prompts("csv", count=4, length_tokens=60, seed=seed)
                    answers = engine.generate(prompts, [TOKENS] * 4)
                    steps = sum(answer.meta["spec_verify_ct"] for answer in answers)
                    lengths.append(4 * TOKENS / steps)
                    answer = explained()
                    sure = answer.updates.gain > 2 * answer.updates.gain_deviation
                    if (sure and lengths[-1] > LEARNT) or time.monotonic() > end:
                        break
    print(f"tokens a step {[round(length, 2) for length in lengths]}: {answer.updates}")
    assert lengths[-1] > LEARNT
    # It is known what they have done, what one costs, and what each stride would come to.
    assert answer.updates.gain > 2 * answer.updates.gain_deviation
    assert answer.updates.lost_seconds < answer.updates.update_seconds * 10
    assert [value.stride for value in answer.updates.strides] == [0, 50, 20, 10, 5, 2, 1]
    chosen = [value.stride for value in answer.updates.strides if value.chosen]
    assert len(chosen) == 1
    online = answer.plan.regime.mode == plan_pb2.REGIME_MODE_ONLINE
    assert online == (answer.plan.regime.stride > 0)

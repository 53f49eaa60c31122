from pathlib import Path

import grpc
import pytest

from controller.core.clock import VirtualClock
from speculation.v1 import service_pb2
from tests.support.service_harness import (
    SteerClient,
    engine_message,
    failure,
    make_profile,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)


async def test_engines_are_listed_with_what_they_said(tmp_path: Path):
    clock = VirtualClock()
    async with running_sidecar(tmp_path, clock) as running:
        assert not (
            await with_timeout(running.inspection.ListEngines(service_pb2.ListEnginesRequest()))
        ).engines
        stream = SteerClient(running, await running.introduce("b"))
        await running.introduce("a")
        last = report_message(2, flags={"after_gap": True}, plan_epoch=1)
        await stream.send(report_message(1), last, report_message(2), dropped=5)
        await stream.rejections()
        clock.advance(1.5)
        answer = await with_timeout(
            running.inspection.ListEngines(service_pb2.ListEnginesRequest())
        )
    a, b = answer.engines
    sent = engine_message("a")
    # What was not said is filled in.
    sent.fingerprint.tensor_parallel_size = sent.fingerprint.data_parallel_size = 1
    sent.capabilities.SetInParent()
    assert a.engine == sent
    assert not a.HasField("last_report")
    assert (a.reports, a.seconds_since_last_report) == (0, 0.0)
    assert (b.reports, b.rejected_reports, b.dropped_reports) == (2, 1, 5)
    assert b.last_report == last
    assert b.seconds_since_last_report == pytest.approx(1.5)
    assert b.plan.epoch >= 1
    assert b.profile_id == ""


async def test_explain_gives_every_choice_with_its_numbers(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        running.sidecar.profiles.add(make_profile())
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1))
        await stream.plan()
        core = running.sidecar.registry.find_by_engine("engine-0").core
        await wait_until(lambda: core.decision.report_count == 1)
        answer = await running.explain(8)
    assert (answer.engine_id, answer.batch_size) == ("engine-0", 8)
    assert [arm.gamma for arm in answer.arms] == [0, 1, 2, 3]
    assert sum(arm.chosen for arm in answer.arms) == 1
    assert [estimate.position for estimate in answer.positions] == [1, 2, 3]
    assert answer.positions[0].exposures > 0
    assert answer.profile_id == make_profile().profile_id


async def test_explain_without_a_batch_size_takes_that_of_the_last_report(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1), report_message(1))
        await stream.rejections()
        assert (await running.explain()).batch_size == 4


@pytest.mark.parametrize(
    ("engine_id", "batch_size", "code", "text"),
    [
        ("nobody", 0, grpc.StatusCode.NOT_FOUND, "introduced: engine-0"),
        ("engine-0", 65_537, grpc.StatusCode.INVALID_ARGUMENT, "batch_size 65537 must be in"),
    ],
)
async def test_a_question_without_an_answer_is_refused(
    tmp_path: Path, engine_id: str, batch_size: int, code: grpc.StatusCode, text: str
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        request = service_pb2.ExplainRequest(engine_id=engine_id, batch_size=batch_size)
        status_code, message = await failure(running.inspection.Explain(request))
    assert status_code is code
    assert text in message

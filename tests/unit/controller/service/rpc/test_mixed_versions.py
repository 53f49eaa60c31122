"""Plans of other sessions, and drafters of kinds that only a later version knows."""

from pathlib import Path

import grpc
import pytest

from controller.core.engine_spec import Capabilities
from controller.service.sessions.session import session_tag
from speculation.v1 import engine_pb2, service_pb2
from tests.support.service_harness import (
    SteerClient,
    engine_message,
    failure,
    report_message,
    running_sidecar,
    secret_of,
    wait_until,
    with_timeout,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def introduction(engine: engine_pb2.EngineSpec) -> service_pb2.IntroduceRequest:
    return service_pb2.IntroduceRequest(engine=engine, engine_secret=secret_of(engine.engine_id))


async def test_plans_carry_a_number_of_their_session_and_not_its_id(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        first, second = [
            await with_timeout(running.speculation.Introduce(introduction(engine_message(name))))
            for name in ("engine-1", "engine-2")
        ]
        stream = SteerClient(running, first.session_id)
        await stream.send(report_message(1))
        plan = await stream.plan()
    assert 0 != first.plan.session != second.plan.session != 0
    assert plan.session == first.plan.session == session_tag(first.session_id)


def test_session_tags_differ_and_are_never_zero():
    tags = {session_tag(f"session-{i}") for i in range(1000)}
    assert len(tags) == 1000
    assert 0 not in tags


@pytest.mark.parametrize("unary", [False, True])
async def test_a_plan_of_another_session_is_not_believed_to_be_one_of_this(
    tmp_path: Path, unary: bool
):
    async with running_sidecar(tmp_path) as running:
        request = introduction(engine_message())
        opened = await with_timeout(running.speculation.Introduce(request))
        session = running.sidecar.registry.find_by_engine("engine-0")
        stream = SteerClient(running, opened.session_id)
        seen = []
        for step, plan_session in enumerate((0, opened.plan.session, opened.plan.session ^ 1), 1):
            report = report_message(step, plan_epoch=4, probe_id=8, plan_session=plan_session)
            if unary:
                asked = service_pb2.DecideRequest(session_id=opened.session_id, report=report)
                await with_timeout(running.speculation.Decide(asked))
            else:
                await stream.send(report)
                await wait_until(lambda step=step: session.newest_step == step)
            assert session.last_report is not None
            seen.append((session.last_report.plan_epoch, session.last_report.probe_id))
    assert seen[:2] == [(4, 8), (4, 8)]
    # A unary call's report is taken for one of the probe that its session has open, if it has one.
    assert seen[2] in {(0, 0), (0, int(unary))}


def of_a_later_version() -> engine_pb2.EngineSpec:
    """An engine with a drafter whose kind is not known here, and with losses."""
    message = engine_message()
    message.drafters.add(name="oracle", kind=77, gammas=[1, 2])
    message.lost.add(capability=engine_pb2.CAPABILITY_DRAFTER, drafter="oracle", reason="gone")
    message.lost.add(capability=engine_pb2.CAPABILITY_SLEEP, reason="gone")
    return message


async def test_a_drafter_of_a_kind_that_is_not_known_is_left_out_with_its_losses(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = introduction(of_a_later_version())
        opened = await with_timeout(running.speculation.Introduce(request))
        session = running.sidecar.registry.find_by_engine("engine-0")
        assert [drafter.name for drafter in session.spec.drafters] == ["mtp"]
        assert [loss.drafter for loss in session.spec.lost] == [""]
        loss = engine_pb2.LostCapability(
            capability=engine_pb2.CAPABILITY_DRAFTER, drafter="oracle", reason="again"
        )
        stream = SteerClient(running, opened.session_id)
        reports = [report_message(1), report_message(2, drafter="oracle")]
        await with_timeout(stream.call.write(service_pb2.SteerRequest(
            session_id=opened.session_id, reports=reports, lost=[loss]
        )))  # fmt: skip
        (rejection,) = await stream.rejections()
    assert (rejection.step, "unknown drafter" in rejection.message) == (2, True)


@pytest.mark.parametrize("part", ["main", "free"])
async def test_a_mixture_of_a_drafter_that_is_not_known_is_left_out_with_it(
    tmp_path: Path, part: str
):
    engine = of_a_later_version()
    mixture = engine_pb2.Mixture(**{"main": "mtp", "free": "mtp", part: "oracle"})
    kind = engine_pb2.DRAFTER_KIND_MIXTURE
    engine.drafters.add(name="mixed", kind=kind, gammas=[1, 2], mixture=mixture)
    engine.lost.add(capability=engine_pb2.CAPABILITY_DRAFTER, drafter="mixed", reason="gone")
    async with running_sidecar(tmp_path) as running:
        await with_timeout(running.speculation.Introduce(introduction(engine)))
        session = running.sidecar.registry.find_by_engine("engine-0")
        assert [drafter.name for drafter in session.spec.drafters] == ["mtp"]
        assert [loss.drafter for loss in session.spec.lost] == [""]
        assert session.unknown_drafters == {"oracle", "mixed"}


async def test_an_engine_whose_learner_is_not_known_learns_nothing(tmp_path: Path):
    engine = of_a_later_version()
    able = engine.capabilities
    able.can_update_online = able.can_collect = able.can_take_versions = True
    able.can_sleep, able.learner = True, "oracle"
    async with running_sidecar(tmp_path) as running:
        await with_timeout(running.speculation.Introduce(introduction(engine)))
        capabilities = running.sidecar.registry.find_by_engine("engine-0").spec.capabilities
    assert capabilities == Capabilities(can_sleep=True)


async def test_a_nameless_drafter_that_is_not_known_takes_nothing_else_away(tmp_path: Path):
    engine = engine_message()
    engine.drafters.add(kind=77)
    engine.capabilities.can_update_online = True
    engine.lost.add(capability=engine_pb2.CAPABILITY_SLEEP, reason="gone")
    async with running_sidecar(tmp_path) as running:
        await with_timeout(running.speculation.Introduce(introduction(engine)))
        spec = running.sidecar.registry.find_by_engine("engine-0").spec
    assert [drafter.name for drafter in spec.drafters] == ["mtp"]
    assert (spec.capabilities.can_update_online, len(spec.lost)) == (True, 1)


async def test_evidence_about_a_drafter_that_is_not_known_is_ignored(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = introduction(of_a_later_version())
        opened = await with_timeout(running.speculation.Introduce(request))
        session = running.sidecar.registry.find_by_engine("engine-0")
        report = report_message(1)
        for name in ("oracle", "mtp"):
            report.proposals.add(drafter=name, accepted_counts=[1, 1])
        await SteerClient(running, opened.session_id).send(report)
        await wait_until(lambda: session.newest_step == 1)
        assert session.last_report is not None
        assert [part.drafter for part in session.last_report.proposals] == ["mtp"]


async def test_a_first_drafter_that_is_not_known_is_refused(tmp_path: Path):
    engine = engine_message()
    engine.drafters[0].kind = 77  # type: ignore[assignment]
    async with running_sidecar(tmp_path) as running:
        code, message = await failure(running.speculation.Introduce(introduction(engine)))
    assert code is INVALID
    assert "kind 77 is unspecified or unknown" in message

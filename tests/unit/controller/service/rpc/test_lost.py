"""An engine tells over its real stream what it has lost, and the sidecar plans without it."""

from typing import Any

import grpc
import pytest

from controller.cli.explain import paragraph_text
from controller.cli.explain_numbers import print_numbers
from controller.cli.output import Output
from controller.cli.top import _SIDECAR, _print_answer
from controller.doctor.sidecar import ask, check_engines
from controller.wire.engines import engine_from_proto, engine_to_proto
from speculation.v1 import engine_pb2, plan_pb2, policy_pb2, service_pb2
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    engine_message,
    failure,
    report_message,
    running_sidecar,
    secret_of,
    session_metrics,
    wait_until,
    with_timeout,
)

GAMMAS = (0, 1, 2, 3)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
DFLASH = engine_pb2.LostCapability(
    capability=engine_pb2.CAPABILITY_DRAFTER,
    drafter="dflash",
    reason="MemoryError: no room",
    lost_at_unix_seconds=1.6e9,
)


def two_drafters(*lost: engine_pb2.LostCapability) -> engine_pb2.EngineSpec:
    message = engine_message()
    message.drafters.add(name="dflash", kind=engine_pb2.DRAFTER_KIND_DFLASH, gammas=GAMMAS[1:])
    message.lost.extend(lost)
    return message


async def introduced(running: RunningSidecar, *lost: engine_pb2.LostCapability) -> Any:
    engine = two_drafters(*lost)
    request = service_pb2.IntroduceRequest(engine=engine, engine_secret=secret_of(engine.engine_id))
    return await with_timeout(running.speculation.Introduce(request))


async def tell(stream: SteerClient, *lost: engine_pb2.LostCapability) -> None:
    await with_timeout(
        stream.call.write(service_pb2.SteerRequest(session_id=stream.session_id, lost=lost))
    )


def drafts(plan: plan_pb2.Plan) -> set[str]:
    """Drafters that a plan has draft something, probes included."""
    rows = {row.drafter for row in plan.rows if row.gamma}
    return rows | {row.probe.drafter for row in plan.rows if row.probe.gamma}


async def test_the_next_plan_does_without_it(tmp_path):
    async with running_sidecar(tmp_path, planner={"lease_seconds": 0.2}) as running:
        opened = await introduced(running)
        stream = SteerClient(running, opened.session_id)
        # Blocks are accepted whole, chains never.
        for step in range(1, 201):
            counts, name = ([0, 0, 4], "dflash") if step % 2 else ([4, 0, 0], "mtp")
            await stream.send(report_message(step, drafter=name, accepted_counts=counts))
        while "dflash" not in drafts(await stream.plan()):
            pass
        await tell(stream, DFLASH)
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.spec.lost)
        epoch = session.plan.epoch
        later = [await stream.plan() for _ in range(20)]
        assert later[-1].epoch > epoch
        assert all("dflash" not in drafts(plan) for plan in later if plan.epoch > epoch)
        assert "lost: drafter dflash" in later[-1].reason_detail


async def test_everything_that_people_look_at_names_it_with_its_reason(tmp_path):
    async with running_sidecar(tmp_path) as running:
        opened = await introduced(running)
        stream = SteerClient(running, opened.session_id)
        await tell(stream, DFLASH, DFLASH)
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.spec.lost)
        await stream.send(report_message(1))
        await wait_until(lambda: session.last_report)
        explained = await running.explain()
        assert list(explained.lost) == [DFLASH]
        assert {arm.drafter for arm in explained.arms if arm.lost} == {"dflash"}
        assert list((await running.status()).engine.lost) == [DFLASH]
        overview = await with_timeout(running.inspection.Overview(service_pb2.OverviewRequest()))
        [line] = overview.engines[0].lost
        assert line.startswith("drafter dflash lost since 2020-09-1")
        assert line.endswith(": MemoryError: no room")
        metrics = session_metrics(session)
        assert metrics["speculation_lost_capability", "drafter dflash"] == 1


async def test_the_commands_print_it(tmp_path, capsys):
    async with running_sidecar(tmp_path) as running:
        await introduced(running, DFLASH)
        answer = await running.explain()
        print_numbers(answer, wide=False)
        for explained in (capsys.readouterr().out, paragraph_text(answer)):
            assert "drafter dflash lost since 2020-09-1" in explained
            assert "MemoryError: no room" in explained
        overview = await with_timeout(running.inspection.Overview(service_pb2.OverviewRequest()))
        _print_answer(_SIDECAR, overview, Output.TABLE)
        assert "engine-0: drafter dflash lost since 2020-09-1" in capsys.readouterr().out
        findings = check_engines(await ask(running.operators, ()), "unix:/somewhere", "")
        (lost_finding,) = [finding for finding in findings if "lost since" in finding.state]
        assert lost_finding.state.endswith("MemoryError: no room")
        assert lost_finding.fix


async def test_an_introduction_may_name_losses(tmp_path):
    async with running_sidecar(tmp_path) as running:
        opened = await introduced(running, DFLASH, DFLASH)
        assert "dflash" not in drafts(opened.plan)
        assert list((await running.explain()).lost) == [DFLASH]


async def test_a_restarted_engine_has_its_drafter_again(tmp_path):
    async with running_sidecar(tmp_path) as running:
        await introduced(running, DFLASH)
        await introduced(running)
        assert not (await running.explain()).lost


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"capability": 1, "drafter": "ngram"}, "'ngram' is reported as lost"),
        ({"capability": 1, "drafter": "mtp", "gammas": [7]}, "draft lengths [7] of drafter 'mtp'"),
        ({"capability": 1}, "a drafter must be named"),
        (
            {"capability": 2, "lost_at_unix_seconds": float("nan")},
            "must be finite and not negative",
        ),
    ],
)
async def test_a_loss_that_cannot_be_is_refused_and_the_stream_goes_on(tmp_path, loss, words):
    message = engine_pb2.LostCapability(**loss)
    async with running_sidecar(tmp_path) as running:
        code, text = await failure(introduced(running, message))
        assert code is INVALID
        assert words in text
        opened = await introduced(running)
        stream = SteerClient(running, opened.session_id)
        await tell(stream, message)
        [rejection] = await stream.rejections()
        assert (rejection.step, rejection.code) == (0, INVALID.value[0])
        assert words in rejection.message
        await tell(stream, DFLASH)
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.spec.lost)


async def test_what_a_newer_engine_loses_is_passed_over(tmp_path):
    async with running_sidecar(tmp_path) as running:
        opened = await introduced(running, engine_pb2.LostCapability(capability=99))  # type: ignore[arg-type]
        assert opened.plan.rows
        assert not (await running.explain()).lost


async def test_a_reason_is_cut_and_made_printable(tmp_path):
    async with running_sidecar(tmp_path) as running:
        loss = engine_pb2.LostCapability(capability=2, reason="a\x1b[2J\n" * 400)  # type: ignore[arg-type]
        await introduced(running, loss)
        [lost_entry] = (await running.explain()).lost
        assert len(lost_entry.reason) == 512
        assert lost_entry.reason.isprintable()


async def test_a_time_in_the_future_becomes_now(tmp_path):
    async with running_sidecar(tmp_path) as running:
        loss = engine_pb2.LostCapability(capability=2, lost_at_unix_seconds=9e12)  # type: ignore[arg-type]
        await introduced(running, loss)
        [lost_entry] = (await running.explain()).lost
        assert lost_entry.lost_at_unix_seconds < 9e12


async def test_too_many_losses_are_refused(tmp_path):
    async with running_sidecar(tmp_path) as running:
        code, text = await failure(introduced(running, *[DFLASH] * 300))
        assert code is INVALID
        assert "300 lost capabilities are reported" in text


async def test_a_measurement_of_what_gets_lost_ends_with_the_reason(tmp_path):
    async with running_sidecar(tmp_path) as running:
        opened = await introduced(running)
        stream = SteerClient(running, opened.session_id)
        measuring = running.profiling.Measure()
        await with_timeout(
            measuring.write(
                service_pb2.MeasureRequest(engine_id="engine-0", drafter="dflash", gamma=3)
            )
        )
        await with_timeout(measuring.read())
        await tell(stream, DFLASH)
        code, text = await failure(measuring.read())
        assert code is INVALID
        assert "lost drafter dflash while it was measured: MemoryError: no room" in text
        assert (await running.status()).plan.reason != plan_pb2.REASON_PROFILING


async def test_a_pin_to_a_lost_drafter_says_that_it_is_lost(tmp_path):
    async with running_sidecar(tmp_path) as running:
        await introduced(running, DFLASH)
        override = policy_pb2.Override(
            override_id="pin",
            scope=policy_pb2.Scope(fleet=True),
            rule=policy_pb2.OverrideRule(drafter="dflash"),
            author="ann",
            reason="because",
        )
        request = policy_pb2.SetOverrideRequest(override=override)
        answer = await with_timeout(running.policy.SetOverride(request))
        assert answer.effects[0].stuck
        assert answer.effects[0].unable == "it has lost drafter dflash: MemoryError: no room"
        detail = (await running.status()).plan.reason_detail
        assert "drafter dflash is pinned but lost: MemoryError: no room" in detail


def test_an_introduction_with_losses_comes_back_as_it_was():
    part = engine_pb2.LostCapability(
        capability=engine_pb2.CAPABILITY_DRAFTER, drafter="mtp", gammas=[1, 3], reason="r"
    )
    every = [
        engine_pb2.LostCapability(capability=kind, reason="gone")
        for kind in engine_pb2.Capability.values()
        if kind not in {engine_pb2.CAPABILITY_UNSPECIFIED, engine_pb2.CAPABILITY_DRAFTER}
    ]
    spec = engine_from_proto(two_drafters(DFLASH, part, *every))
    assert list(engine_to_proto(spec).lost) == [DFLASH, part, *every]
    assert engine_from_proto(engine_to_proto(spec)) == spec

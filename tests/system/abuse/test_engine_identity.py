"""Whoever may introduce an engine does nothing to another one."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from engine_shim.link.plan_follower import Source
from speculation.v1 import (
    policy_pb2,
    policy_pb2_grpc,
    service_pb2,
    service_pb2_grpc,
    training_pb2,
    training_pb2_grpc,
)
from tests.support.eventually import eventually
from tests.support.linked_engine import linked_engine
from tests.support.service_harness import PATIENCE_SECONDS, engine_message, make_profile
from tests.system.abuse.conftest import Besieged

CODE = grpc.StatusCode
HONEST = "honest"
SPECULATION = service_pb2_grpc.SpeculationServiceStub
PROFILING = service_pb2_grpc.ProfilingServiceStub


@pytest.fixture
def channel(besieged: Besieged) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(besieged.sidecar.address) as opened:
        yield opened


@pytest.fixture
def operators(besieged: Besieged) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(besieged.operators) as opened:
        yield opened


def code_of(call: Callable[..., Any], request: Any) -> grpc.StatusCode:
    """OK, or what a call ends with; the first answer of a stream is enough."""
    try:
        answer = call(request, timeout=PATIENCE_SECONDS)
        if hasattr(answer, "__next__"):
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return CODE.OK


def introduction(secret: str = "") -> service_pb2.IntroduceRequest:
    return service_pb2.IntroduceRequest(engine=engine_message(HONEST), engine_secret=secret)


def test_a_duel_for_an_engines_id_is_won_by_the_engine(besieged: Besieged, channel: grpc.Channel):
    lapses = besieged.engine.link.status().lapses
    for number in range(200):
        secret = f"guess {number}" if number % 2 else ""
        assert code_of(SPECULATION(channel).Introduce, introduction(secret)) is CODE.ALREADY_EXISTS
        besieged.engine.run(1)
    assert besieged.engine.link.status().lapses == lapses
    besieged.steers()


def test_a_stranger_neither_measures_an_engine_nor_replaces_its_costs(
    besieged: Besieged, channel: grpc.Channel
):
    stub = PROFILING(channel)
    measure = service_pb2.MeasureRequest(engine_id=HONEST, drafter="eagle3", gamma=1)
    text = make_profile().to_json()
    assert code_of(stub.Measure, iter([measure])) is CODE.PERMISSION_DENIED
    install = service_pb2.InstallProfileRequest(profile_json=text)
    assert code_of(stub.InstallProfile, install) is CODE.PERMISSION_DENIED
    push = service_pb2.PushProfileRequest(profile_json=text)
    assert code_of(stub.PushProfile, push) is CODE.PERMISSION_DENIED


@pytest.mark.parametrize("secret", ["", "a guess"])
def test_a_stranger_does_not_attend_an_engines_training(channel: grpc.Channel, secret: str):
    request = training_pb2.AttendRequest(
        engine_id=HONEST, stored_signals=10**6, engine_secret=secret
    )
    stub = training_pb2_grpc.TrainingServiceStub(channel)
    assert code_of(stub.Attend, iter([request])) is CODE.PERMISSION_DENIED


def test_a_profile_from_the_future_is_refused_to_everybody(operators: grpc.Channel):
    profile = dataclasses.replace(make_profile(), measured_at="2099-01-01T00:00:00+00:00")
    for text in (profile, dataclasses.replace(profile, measured_at="zz")):
        push = service_pb2.PushProfileRequest(profile_json=text.to_json())
        assert code_of(PROFILING(operators).PushProfile, push) is CODE.INVALID_ARGUMENT


def test_what_operators_do_to_an_engine_is_in_the_audit(operators: grpc.Channel):
    text = make_profile(target_model="audited").to_json()
    push = service_pb2.PushProfileRequest(profile_json=text)
    assert code_of(PROFILING(operators).PushProfile, push) is CODE.OK
    measure = service_pb2.MeasureRequest(engine_id=HONEST, drafter="eagle3", gamma=1)
    assert code_of(PROFILING(operators).Measure, iter([measure])) is CODE.OK
    audit = policy_pb2_grpc.PolicyServiceStub(operators).QueryAudit

    def recorded() -> bool:
        answer = audit(policy_pb2.QueryAuditRequest(limit=20), timeout=PATIENCE_SECONDS)
        origins = {record.action: record.origin for record in answer.records}
        mine = f"uid {os.getuid()}, gid {os.getgid()}, pid {os.getpid()} ("
        return all(
            origins.get(action, "").startswith(mine) for action in ("measure", "push_profile")
        )

    eventually(recorded, description="the records")


def test_an_engine_keeps_its_id_when_its_agent_dies(besieged: Besieged):
    with linked_engine(besieged.sidecar.address, "agentless") as engine:
        engine.run(5)
        status = engine.link.status()
        assert status.agent_pid is not None
        taken = engine.link.plan_follower.plans_accepted
        os.kill(status.agent_pid, signal.SIGKILL)

        def steered() -> bool:
            engine.run(5)
            return (
                engine.link.plan_follower.plans_accepted > taken
                and engine.link.status().agent_starts > 1
            )

        eventually(steered, timeout_seconds=60.0, description="a plan by another agent")


def test_an_engine_that_starts_again_has_its_id_again(besieged: Besieged):
    """With another secret, as a new process has one."""
    for _ in range(3):
        with linked_engine(besieged.sidecar.address, "crashing") as engine:

            def steered() -> bool:
                engine.run(5)
                return engine.link.plan_follower.source is Source.PLAN

            eventually(steered, timeout_seconds=60.0, description="a plan")

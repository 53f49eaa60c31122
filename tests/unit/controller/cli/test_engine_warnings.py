"""What an engine's reports show to be wrong with it, from its stream to doctor, explain and log."""

import json
import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from controller.cli import app
from speculation.v1 import engine_pb2, plan_pb2, service_pb2, service_pb2_grpc
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    engine_message,
    report_message,
    secret_of,
)
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process

STEPS = 250


def never_accepted(plan: plan_pb2.Plan) -> Sequence[engine_pb2.StepReport]:
    return [report_message(step, accepted_counts=[4, 0, 0]) for step in range(1, STEPS)]


def another_length(plan: plan_pb2.Plan) -> Sequence[engine_pb2.StepReport]:
    asked = next(row.gamma for row in plan.rows if row.max_batch_size >= 4)
    gamma = 3 if asked != 3 else 1
    counts = [1, *[0] * (gamma - 1), 3]
    return [
        report_message(step, gamma=gamma, accepted_counts=counts, plan_epoch=plan.epoch)
        for step in range(1, STEPS)
    ]


def same_time(plan: plan_pb2.Plan) -> Sequence[engine_pb2.StepReport]:
    return [
        report_message(step, gamma=gamma, accepted_counts=[1, *[0] * (gamma - 1), 3][: gamma + 1])
        if gamma
        else report_message(step, gamma=0, accepted_counts=[4])
        for step in range(1, STEPS)
        for gamma in [step % 4]
    ]


def well(plan: plan_pb2.Plan) -> Sequence[engine_pb2.StepReport]:
    return [report_message(step) for step in range(1, STEPS)]


KINDS = {
    "wrong": (never_accepted, "no-acceptance"),
    "deaf": (another_length, "other-width"),
    "flat": (same_time, "flat-step-time"),
    "fine": (well, ""),
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "lines"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[SidecarProcess]:
    """Steers one engine of each kind; all of their steps are reported, and their streams open."""
    directory: Path = tmp_path_factory.mktemp("s")
    with (
        sidecar_process(directory, log=log) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        calls = []
        for name, (reports_of, _) in KINDS.items():
            request = service_pb2.IntroduceRequest(
                engine=engine_message(name), engine_secret=secret_of(name)
            )
            opened = stub.Introduce(request, timeout=PATIENCE_SECONDS)
            sent: queue.Queue[service_pb2.SteerRequest | None] = queue.Queue()
            sent.put(
                service_pb2.SteerRequest(
                    session_id=opened.session_id, reports=reports_of(opened.plan)
                )
            )
            calls.append(stub.Steer(iter(sent.get, None)))
        inspection = service_pb2_grpc.InspectionServiceStub(channel)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            answer = inspection.ListEngines(
                service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
            )
            if all(engine.reports == STEPS - 1 for engine in answer.engines):
                break
            assert time.monotonic() < deadline, answer
            time.sleep(0.02)
        yield running
        for call in calls:
            call.cancel()


def lines_of(log: Path, event: str) -> list[dict[str, str]]:
    lines = map(json.loads, log.read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def test_the_doctor_warns_of_each_with_causes_and_of_nothing_else(sidecar: SidecarProcess):
    doctor_run = controller("doctor", "--address", sidecar.address, "-o", "json")
    kinds = {kind for _, kind in KINDS.values()} - {""}
    warnings_by_check = {
        it["check"]: it
        for it in json.loads(doctor_run.stdout)["items"]
        if it["check"].split(" of ")[0] in kinds
    }
    assert warnings_by_check.keys() == {
        f"{kind} of {name}" for name, (_, kind) in KINDS.items() if kind
    }
    assert {it["level"] for it in warnings_by_check.values()} == {"warn"}
    assert (
        "1.00 tokens per sequence and step" in warnings_by_check["no-acceptance of wrong"]["found"]
    )
    assert "EAGLE-3 under EAGLE" in warnings_by_check["no-acceptance of wrong"]["fix"]
    assert "the engine verifies gamma" in warnings_by_check["other-width of deaf"]["found"]
    flat = [
        it["found"]
        for it in json.loads(doctor_run.stdout)["items"]
        if it["check"] == "flat-step-time of flat"
    ]
    assert "no longer at gamma 3 than at gamma 0" in flat[0]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("level", [(), ("--numbers",)])
def test_explain_names_it(sidecar: SidecarProcess, name: str, level: tuple[str, ...]):
    result = CliRunner().invoke(app, ("explain", name, *level, "--address", sidecar.address))
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert ("warning: " in words) is bool(KINDS[name][1])
    assert ("drafter mtp has never worked" in words) is (name == "wrong")


def test_top_shows_it_below_the_engines(sidecar: SidecarProcess):
    result = CliRunner().invoke(app, ("top", "--once", "--address", sidecar.address))
    assert result.exit_code == 0, result.output
    assert "wrong: drafter mtp has never worked" in " ".join(result.stdout.split())


def test_the_log_says_it_once(sidecar: SidecarProcess, log: Path):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(lines_of(log, "engine_warning")) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lines = lines_of(log, "engine_warning")
    assert sorted((it["engine"], it["kind"]) for it in lines) == [
        ("deaf", "other-width"), ("flat", "flat-step-time"), ("wrong", "no-acceptance"),
    ]  # fmt: skip
    assert all(it["level"] == "warning" and it["advice"] for it in lines)

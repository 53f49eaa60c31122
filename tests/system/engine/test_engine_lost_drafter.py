"""The real SGLang under the real sidecar, with a second drafter that fails: at start, or later."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from lab.harness.scripted_sidecar import scripted_sidecar
from speculation.v1 import engine_pb2, policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.engine import (
    DFLASH,
    EAGLE3,
    MODES,
    EngineProcess,
    install_plugin,
    running_engine,
)
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import LENGTHS, PROMPTS, play
from tests.support.sidecar_process import PATIENCE_SECONDS, controller, sidecar_process

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SABOTAGE = "tests.system.engine.sabotage"
NOTHING_MORE: Mapping[str, str] = {}
LEARNS = {"SPECULATION_LEARNER": "dflash", "SPECULATION_ONLINE_UPDATES": "1"}


@dataclass(frozen=True)
class Steered:
    """An engine, and what the sidecar that steers it says."""

    engine: EngineProcess
    address: str
    operators: str

    def explain(self) -> service_pb2.ExplainResponse:
        with grpc.insecure_channel(self.address) as channel:
            question = service_pb2.ExplainRequest(engine_id="e")
            answer: service_pb2.ExplainResponse = service_pb2_grpc.InspectionServiceStub(
                channel
            ).Explain(question, timeout=PATIENCE_SECONDS)
        return answer

    def status(self) -> service_pb2.EngineStatus | None:
        with grpc.insecure_channel(self.address) as channel:
            answer = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
                service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
            )
        return answer.engines[0] if answer.engines else None

    def pin(self, drafter: str, gamma: int) -> policy_pb2.SetOverrideResponse:
        override = policy_pb2.Override(
            override_id="pin",
            scope=policy_pb2.Scope(fleet=True),
            rule=policy_pb2.OverrideRule(drafter=drafter, gamma=gamma),
            author="ann",
            reason="a test",
        )
        with grpc.insecure_channel(self.operators) as channel:
            answer: policy_pb2.SetOverrideResponse = policy_pb2_grpc.PolicyServiceStub(
                channel
            ).SetOverride(
                policy_pb2.SetOverrideRequest(override=override), timeout=PATIENCE_SECONDS
            )
        return answer

    def clear(self) -> None:
        with grpc.insecure_channel(self.operators) as channel:
            policy_pb2_grpc.PolicyServiceStub(channel).ClearOverride(
                policy_pb2.ClearOverrideRequest(override_id="pin", author="ann", reason="done"),
                timeout=PATIENCE_SECONDS,
            )

    def ran(self) -> engine_pb2.StepReport:
        """The last step."""
        status = self.status()
        assert status is not None
        return status.last_report

    def play(self, plain: dict[str, list[list[int]]]) -> None:
        """Eight requests; their tokens are plain decoding's."""
        answers = self.engine.generate(PROMPTS, LENGTHS)
        assert [answer.tokens for answer in answers] == plain["batch"]


@contextmanager
def steered(
    folder: Path, sabotage: str, mode: str = "eager", more: Mapping[str, str] = NOTHING_MORE
) -> Iterator[Steered]:
    """more: environment variables of the engine."""
    # After the CPU's stand-in, which prepares the same method.
    plugins = install_plugin(folder / "sabotage", f"{SABOTAGE}:{sabotage}", name="zz_sabotage")
    recording = {"CONTROLLER_RECORD_DIRECTORY": str(folder / "record")}
    log = folder / "sidecar.log"
    with sidecar_process(folder, environment=recording, log=log) as sidecar:
        variables = {
            **MODES[mode],
            **more,
            "SPECULATION_SIDECAR": sidecar.address,
            "SPECULATION_ENGINE_ID": "e",
            "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
            "SABOTAGE_FILE": str(folder / "broken"),
            "PYTHONPATH": str(plugins),
        }
        with running_engine(folder / "engine", EAGLE3, variables) as engine:
            operators = sidecar.address.replace("controller.sock", "controller-operators.sock")
            running = Steered(engine, sidecar.address, operators)
            eventually(running.status, description="the engine introduces itself")
            yield running


def check_learner_loss(lost: Iterable[engine_pb2.LostCapability]) -> None:
    """It goes with the drafter that learns."""
    drafter, learning = lost
    check_loss([drafter])
    assert learning.capability == engine_pb2.CAPABILITY_UPDATE_ONLINE
    assert learning.reason == drafter.reason


def check_loss(lost: Iterable[engine_pb2.LostCapability]) -> None:
    [loss] = lost
    assert (loss.capability, loss.drafter) == (engine_pb2.CAPABILITY_DRAFTER, "dflash")
    assert loss.reason == "MemoryError: sabotaged"
    assert loss.lost_at_unix_seconds > 1.7e9


def test_a_drafter_that_cannot_draft_is_found_before_there_is_traffic(
    plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """And before its graphs are captured, since a capture that fails ends the start."""
    with steered(tmp_path, "break_block_drafter", "overlapped", LEARNS) as running:
        status = running.status()
        assert status is not None
        assert not status.reports
        check_learner_loss(status.engine.lost)
        assert not status.engine.capabilities.can_update_online
        assert "this engine has lost dflash" in running.engine.log.read_text()
        controller_state = running.engine.internal_state()["speculation_controller"]
        assert controller_state["online"] is None
        assert [(loss["drafter"], loss["reason"]) for loss in controller_state["lost"]] == [
            ("dflash", "MemoryError: sabotaged"),
            ("", "MemoryError: sabotaged"),
        ]
        running.play(plain)
        explained = running.explain()
        check_learner_loss(explained.lost)
        assert {arm.drafter for arm in explained.arms if arm.lost} == {"dflash"}


def test_a_drafter_that_fails_in_traffic_is_planned_no_more(
    plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with steered(tmp_path, "break_block_drafter_on_demand", more=LEARNS) as running:
        assert not running.explain().lost
        running.pin("dflash", 3)

        def drafts() -> bool:
            running.play(plain)
            return (running.ran().drafter, running.ran().gamma) == ("dflash", 3)

        eventually(drafts, timeout_seconds=60, description="DFlash drafts")
        (tmp_path / "broken").touch()
        running.play(plain)
        eventually(lambda: running.explain().lost, description="the sidecar hears of it")
        explained = running.explain()
        check_learner_loss(explained.lost)
        online = running.engine.internal_state()["speculation_controller"]["online"]
        assert online["state"] == "MemoryError: sabotaged"
        assert "dflash is pinned but lost: MemoryError: sabotaged" in explained.plan.reason_detail
        assert {row.gamma for row in explained.plan.rows} == {0}
        running.clear()
        for _ in range(3):
            running.play(plain)
            assert "dflash" not in {row.drafter for row in running.explain().plan.rows}
            assert running.ran().drafter == "eagle3"
        words = controller("explain", "e", "--numbers", "--address", running.address).stdout
        assert "drafter dflash lost since" in words
        assert "MemoryError: sabotaged" in words
        assert running.engine.process.poll() is None
    replayed = controller("replay", str(tmp_path / "record"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_the_rehearsal_leaves_no_trace(plain: dict[str, list[list[int]]], tmp_path: Path) -> None:
    """Tokens, the KV cache, the prefix cache and the telemetry are as if it had never been."""
    with steered(tmp_path, "break_block_drafter_on_demand") as running:
        assert "no longer drafts" not in running.engine.log.read_text()
        status = running.status()
        assert status is not None
        assert (status.reports, list(status.engine.lost)) == (0, [])
        assert all(not position.exposures for position in running.explain().positions)
        memory = running.engine.internal_state()["memory_usage"]
        answers = running.engine.generate(PROMPTS, LENGTHS)
        assert [answer.tokens for answer in answers] == plain["batch"]
        assert all(answer.meta["cached_tokens"] == 0 for answer in answers)
        assert running.engine.internal_state()["memory_usage"] == memory
        eventually(lambda: running.ran().step, description="steps are reported")


def test_a_sidecar_that_goes_on_planning_it_harms_nothing(
    plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """As one does that is older than the engine's plugin, and knows no losses."""
    target = f"{SABOTAGE}:break_block_drafter_on_demand"
    plugins = install_plugin(tmp_path / "sabotage", target, name="zz_sabotage")
    with scripted_sidecar(tmp_path) as sidecar:
        sidecar.script = lambda _: (3, False, 1)
        variables = {
            **sidecar.variables,
            "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
            "SABOTAGE_FILE": str(tmp_path / "broken"),
            "PYTHONPATH": str(plugins),
        }
        with running_engine(tmp_path / "engine", EAGLE3, variables) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            (tmp_path / "broken").touch()
            answers, reports = play(engine, sidecar, lambda _: (3, False, 1))
            assert [answer.tokens for answer in answers] == plain["batch"]
            log = engine.log.read_text()
            eventually(
                lambda: any(r.lost for r in sidecar.requests), description="the loss is reported"
            )
    assert {report.drafter for report in reports} == {"eagle3"}
    assert log.count("DFlash no longer drafts; the engine continues with its own drafter") == 1
    assert log.count("this engine has lost dflash") == 1
    reported_losses = [list(request.lost) for request in sidecar.requests if request.lost]
    assert len(reported_losses) == 1
    check_loss(reported_losses[0])

"""What the sidecar's process writes to standard error: JSON lines, on change, never per step."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import PATIENCE_SECONDS, engine_message, report_message
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    with sidecar_process(tmp_path) as running:
        yield running


class UnaryEngine:
    """An engine over the unary call, which is answered step by step."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = service_pb2_grpc.SpeculationServiceStub(channel)
        request = service_pb2.IntroduceRequest(engine=engine_message())
        answer = self._stub.Introduce(request, timeout=PATIENCE_SECONDS)
        self.session_id = answer.session_id
        self._step = 0

    def run(self, steps: int, **changes: Any) -> service_pb2.DecideResponse:
        """The last answer."""
        for _ in range(steps):
            self._step += 1
            report = report_message(self._step, **changes)
            request = service_pb2.DecideRequest(session_id=self.session_id, report=report)
            answer = self._stub.Decide(request, timeout=PATIENCE_SECONDS)
        return answer

    def drop(self, times: int) -> None:
        """Messages of a stream that say that reports were lost."""
        message = service_pb2.SteerRequest(session_id=self.session_id, dropped_reports=2)
        for _ in self._stub.Steer(iter([message] * times), timeout=PATIENCE_SECONDS):
            pass


def override(sidecar: SidecarProcess, *words: str) -> None:
    done = controller("override", *words, "--reason", "test", "--address", sidecar.address)
    assert done.returncode == 0, done.stderr


def test_a_change_is_one_line_with_its_decision_and_steps_are_none(sidecar: SidecarProcess):
    with grpc.insecure_channel(sidecar.address) as channel:
        engine = UnaryEngine(channel)
        engine.run(300)
        override(sidecar, "set", "--fleet", "--gamma", "1", "--id", "pin")
        pinned = engine.run(300)
        override(sidecar, "clear", "pin")
        last = engine.run(300)
    code, lines = sidecar.stop()
    assert code == 0
    # Nothing is written for a step, and everything is JSON with the same fields.
    assert len(lines) < 40
    assert all({"event", "level", "timestamp", "logger"} <= set(line) for line in lines)
    assert engine.session_id not in str(lines)
    changes = [line for line in lines if line["event"] == "plan_changed"]
    decisions = [line["decision"] for line in changes]
    assert len(set(decisions)) == len(decisions)
    assert all(re.fullmatch(r"[0-9a-f]{8}-\d+", decision) for decision in decisions)
    epochs = [int(decision.partition("-")[2]) for decision in decisions]
    assert epochs == sorted(epochs)
    pinned_changes = [line for line in changes if line["overrides"] == ["pin"]]
    assert [(line["gamma"], line["engine"]) for line in pinned_changes] == [(1, "engine-0")]
    assert (
        int(pinned_changes[0]["decision"].partition("-")[2])
        <= pinned.epoch
        < epochs[-1]
        <= last.epoch
    )
    assert {"batch_size", "drafter", "was", "regime", "reason", "detail"} <= set(pinned_changes[0])


def test_a_lost_lease_is_said_when_it_is_lost_and_when_it_is_back(sidecar: SidecarProcess):
    with grpc.insecure_channel(sidecar.address) as channel:
        engine = UnaryEngine(channel)
        engine.run(3, flags={"unsteered": True})  # before it had any plan
        engine.run(5)
        engine.run(20, flags={"unsteered": True})
        engine.run(5)
    _, lines = sidecar.stop()
    lease_events = [line for line in lines if line["event"] in {"lease_lost", "steered_again"}]
    assert [(line["event"], line["step"], line["level"]) for line in lease_events] == [
        ("steered_again", 4, "info"),
        ("lease_lost", 9, "warning"),
        ("steered_again", 29, "info"),
    ]


def test_what_repeats_is_held_back_and_counted(sidecar: SidecarProcess):
    with grpc.insecure_channel(sidecar.address) as channel:
        UnaryEngine(channel).drop(60)
    _, lines = sidecar.stop()
    events = Counter(line["event"] for line in lines)
    assert 10 <= events["reports_dropped"] < 60
    suppressed_count = sum(line.get("suppressed", 0) for line in lines)
    at_the_end = [line["lines"] for line in lines if line["event"] == "log_lines_suppressed"]
    suppressed_count += sum(count for counts in at_the_end for count in counts.values())
    assert events["reports_dropped"] + suppressed_count == 60
    # Nothing else was.
    assert all(set(counts) == {"reports_dropped"} for counts in at_the_end)


def test_a_reader_that_stalls_stalls_nobody_else(tmp_path: Path) -> None:
    """More lines than a pipe holds, and than may wait: engines are steered on."""
    with (
        sidecar_process(tmp_path, environment={"CONTROLLER_MAX_ENGINES": "4000"}) as sidecar,
        grpc.insecure_channel(sidecar.address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        # Its own id is free: no engine was introduced under it.
        for number in range(1, 1501):
            request = service_pb2.IntroduceRequest(engine=engine_message(f"engine-{number}"))
            stub.Introduce(request, timeout=PATIENCE_SECONDS)
        assert UnaryEngine(channel).run(10).epoch
        assert sidecar.process.stderr is not None
        # It is read again: what was lost is reported, and what comes then is there.
        lines = (json.loads(text) for text in sidecar.process.stderr)
        event_counts = Counter[str]()
        for line in lines:
            event_counts[line["event"]] += 1
            if line["event"] == "log_lines_lost":
                break
        assert 1000 < event_counts["engine_introduced"] == 1501 - line["lines"]
        sidecar.process.terminate()
        *_, last = lines
        assert last["event"] == "stopped"

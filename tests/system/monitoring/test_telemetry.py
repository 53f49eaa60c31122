"""OpenTelemetry out of a real sidecar process into a real collector."""

import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from controller.settings.settings import Settings, SettingsError
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.service_harness import (
    ENVIRONMENT,
    PATIENCE_SECONDS,
    engine_message,
    report_message,
)
from tests.support.sidecar_process import sidecar_process
from tests.system.monitoring.collector import Collector, collecting, plain

STEPS = 300
Metadata = tuple[tuple[str, str | bytes], ...]


def play(folder: Path, address: str, metadata: Metadata = ()) -> None:
    """An engine that runs, and an operator who pins it in the middle."""
    with (
        grpc.insecure_channel(address) as channel,
        grpc.insecure_channel(f"unix:{folder}/controller-operators.sock") as operator_socket,
    ):
        engine = service_pb2_grpc.SpeculationServiceStub(channel)
        request = service_pb2.IntroduceRequest(engine=engine_message())
        session_id = engine.Introduce(request, timeout=PATIENCE_SECONDS).session_id
        for step in range(1, STEPS + 1):
            if step == STEPS // 2:
                override(operator_socket, metadata)
            report = report_message(step)
            engine.Decide(
                service_pb2.DecideRequest(session_id=session_id, report=report),
                timeout=PATIENCE_SECONDS,
            )
        message = service_pb2.SteerRequest(session_id=session_id)
        for _ in engine.Steer(iter([message]), timeout=PATIENCE_SECONDS):
            pass


def override(operator_socket: grpc.Channel, metadata: Metadata) -> None:
    stub = policy_pb2_grpc.PolicyServiceStub(operator_socket)
    pin = policy_pb2.Override(
        override_id="pin", scope=policy_pb2.Scope(fleet=True),
        rule=policy_pb2.OverrideRule(gamma=3), author="ann", reason="test",
    )  # fmt: skip
    request = policy_pb2.SetOverrideRequest(override=pin)
    stub.SetOverride(request, timeout=PATIENCE_SECONDS, metadata=metadata)
    with pytest.raises(grpc.RpcError):
        stub.ClearOverride(
            policy_pb2.ClearOverrideRequest(override_id="none", author="ann", reason="test"),
            timeout=PATIENCE_SECONDS,
        )


def ran(
    folder: Path, endpoint: str, metadata: Metadata = (), **settings: str
) -> tuple[int, list[dict[str, Any]]]:
    """(exit code, log lines) of a sidecar that was played with."""
    environment = {"CONTROLLER_OTLP_ENDPOINT": endpoint} | settings
    with sidecar_process(folder, environment=environment) as sidecar:
        play(folder, sidecar.address, metadata)
        return sidecar.stop()


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    collector: Collector
    lines: list[dict[str, Any]]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.collector.spans if span.name.endswith(name)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with collecting() as collector:
        code, lines = ran(
            tmp_path_factory.mktemp("run"),
            collector.endpoint,
            CONTROLLER_OTLP_TRACE_RATIO="1",
            CONTROLLER_OTLP_LOGS="true",
        )
        assert code == 0
        yield Run(collector, lines)


def test_every_decision_that_changes_something_is_a_span(run: Run):
    spans = [plain(span.attributes) for span in run.named("decision")]
    changes = [line for line in run.lines if line["event"] == "plan_changed"]
    assert spans
    assert [span["speculation.decision"] for span in spans] == [c["decision"] for c in changes]
    assert [span["speculation.gamma"] for span in spans] == [c["gamma"] for c in changes]
    (pinned,) = [span for span in spans if span["speculation.overrides"] == ["pin"]]
    assert pinned["speculation.engine"] == "engine-0"
    assert (pinned["speculation.drafter"], pinned["speculation.gamma"]) == ("mtp", 3)
    assert pinned["speculation.epoch"] == int(pinned["speculation.decision"].partition("-")[2])
    for span in run.named("decision"):
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano


def test_what_an_operator_does_is_the_parent_of_the_decisions_it_changes(run: Run):
    (call,) = run.named("/SetOverride")
    below = [span for span in run.named("decision") if span.parent_span_id == call.span_id]
    assert [plain(span.attributes)["speculation.overrides"] for span in below] == [["pin"]]
    assert below[0].trace_id == call.trace_id
    # What was refused is there as well, with its status.
    (refused,) = run.named("/ClearOverride")
    assert plain(refused.attributes)["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]


def test_there_is_no_span_of_a_step_a_report_or_a_stream(run: Run):
    kinds = {span.name.rpartition("/")[2] for span in run.collector.spans}
    assert kinds == {"decision", "SetOverride", "ClearOverride"}
    assert len(run.collector.spans) < STEPS / 4
    assert run.collector.resource["service.name"] == "speculation-controller"


def test_log_lines_go_there_as_they_are_written(run: Run):
    sent = [(record.body.string_value, record.severity_text) for record in run.collector.records]
    written = [(line["event"], line["level"]) for line in run.lines]
    # They arrive sorted by who wrote them; the exporter closes before the last line.
    assert Counter(written) - Counter(sent) == {("stopped", "info"): 1}
    assert Counter(sent) <= Counter(written)
    change = next(r for r in run.collector.records if r.body.string_value == "plan_changed")
    line = next(line for line in run.lines if line["event"] == "plan_changed")
    attributes = plain(change.attributes)
    assert attributes["decision"] == line["decision"]
    assert attributes["gamma"] == line["gamma"]
    pinned_records = [
        r for r in run.collector.records if plain(r.attributes).get("overrides") == "['pin']"
    ]
    (call,) = run.named("/SetOverride")
    assert any(record.trace_id == call.trace_id for record in pinned_records)


def test_nothing_is_sampled_at_ratio_0_but_what_a_caller_has_sampled(tmp_path: Path):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with collecting() as collector:
        callers = (("traceparent", f"00-{trace}-{parent}-01"),)
        code, _ = ran(tmp_path, collector.endpoint, callers, CONTROLLER_OTLP_TRACE_RATIO="0")
    assert code == 0
    assert {span.trace_id.hex() for span in collector.spans} == {trace}
    names = {span.name.rpartition("/")[2]: span for span in collector.spans}
    assert set(names) == {"SetOverride", "decision"}
    assert names["SetOverride"].parent_span_id.hex() == parent
    # Logs are only sent where that is asked for.
    assert collector.records == []


def test_a_collector_that_is_away_hurts_nothing(tmp_path: Path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        # Bound and not listening: refused.
        port = nobody.getsockname()[1]
        code, lines = ran(
            tmp_path, f"http://127.0.0.1:{port}",
            CONTROLLER_OTLP_TRACE_RATIO="1", CONTROLLER_OTLP_LOGS="true",
        )  # fmt: skip
    assert code == 0
    assert "stopped" in {line["event"] for line in lines}
    assert any("Failed to export" in line["event"] for line in lines)
    assert len(lines) < 60


def test_a_collector_that_takes_and_never_answers_hurts_nothing(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, lines = ran(
            tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}",
            CONTROLLER_OTLP_TRACE_RATIO="1",
        )  # fmt: skip
    assert code == 0
    assert "stopped" in {line["event"] for line in lines}


def python(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_of_it_is_loaded_unless_it_is_asked_for():
    program = """
import sys
from controller.service import server
from controller.settings.settings import Settings
assert server._make_tracing(Settings()) is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = python(program)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_without_its_packages_the_start_is_refused(tmp_path: Path):
    program = f"""
import sys
sys.modules["opentelemetry.sdk"] = None
sys.argv[1:] = ["serve", "--address", "unix:{tmp_path}/s", "--metrics-port", "0"]
import os
os.environ["CONTROLLER_OTLP_ENDPOINT"] = "http://127.0.0.1:4317"
from controller.cli import main
main()
"""
    done = python(program)
    assert done.returncode == 1
    assert "pip install 'speculation-controller[otel]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://collector", "ftp://a:1"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str):
    with pytest.raises(SettingsError, match=r"otlp_endpoint: .*http://HOST:PORT"):
        Settings.load({"otlp_endpoint": endpoint})

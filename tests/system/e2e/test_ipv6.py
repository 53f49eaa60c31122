"""A sidecar process where only IPv6 is spoken, and one whose open ports take both families."""

import http.client
import json
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from lab.harness.processes import free_port
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.service_harness import ENVIRONMENT, health_stub
from tests.support.sidecar_process import CONTROLLER, PATIENCE_SECONDS, sidecar_process


def status_of(host: str, port: int, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
    connection.request("GET", path)
    return connection.getresponse().status


def is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        answer = health_stub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS
        )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*CONTROLLER, *words], env=ENVIRONMENT, capture_output=True, text=True, check=False,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip


def test_everything_is_reached_on_the_loopback_address_of_ipv6(tmp_path: Path):
    tcp, metrics, page, health = (free_port() for _ in range(4))
    flags = (
        *("--tcp", f"[::1]:{tcp}", "--metrics-host", "[::1]", "--metrics-port", str(metrics)),
        *("--page-host", "::1", "--page-port", str(page)),
        *("--health-host", "::1", "--health-port", str(health)),
    )
    with sidecar_process(tmp_path, *flags):
        assert status_of("::1", metrics, "/metrics") == 200
        assert status_of("::1", page, "/") == 200
        assert is_serving(f"[::1]:{health}")
        for port in (tcp, metrics, page, health):
            with pytest.raises(OSError):
                http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS).connect()
        link = EngineLink.start(
            engine_spec(), LinkSettings(sidecar=f"[::1]:{tcp}"), startup_gamma=1
        )
        try:
            eventually(
                lambda: link.choose(4).source is Source.PLAN, description="steered by a plan"
            )
            listed = run("engines", "--address", f"[::1]:{tcp}", "-o", "name")
        finally:
            link.close()
    assert len(listed.stdout.split()) == 1, listed


def test_what_is_open_takes_both_families_and_the_doctor_finds_it(tmp_path: Path):
    metrics, health = free_port(), free_port()
    file = tmp_path / "controller.yaml"
    file.write_text(
        f"address: unix:{tmp_path}/controller.sock\nhealth_port: {health}\n"
        f'metrics_host: "::"\nmetrics_port: {metrics}\n'
    )
    flags = ("--config", str(file), "--metrics-port", str(metrics))
    with sidecar_process(tmp_path, *flags):
        for host in ("127.0.0.1", "::1"):
            assert status_of(host, metrics, "/metrics") == 200
        assert is_serving(f"127.0.0.1:{health}")
        assert is_serving(f"[::1]:{health}")
        process = run("doctor", "--config", str(file), "--engine-url", "", "-o", "json")
    checks = {check["check"]: check for check in json.loads(process.stdout)["items"]}
    assert checks["health port"]["level"] == "ok", process

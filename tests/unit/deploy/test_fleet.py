"""What the fleet's overlay adds: Redis, TLS, Secrets, the operator's objects; run for real."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2

from lab.harness.processes import free_port
from tests.support.credentials import make_authority, token_line
from tests.support.prometheus_server import ALERTS, JOB, promtool
from tests.support.redis_server import RedisServer
from tests.support.service_harness import ENVIRONMENT, PATIENCE_SECONDS, health_stub
from tests.support.sidecar_process import controller, wait_until_serving
from tests.unit.deploy.manifests import (
    KUBERNETES,
    ROOT,
    containers,
    mounts,
    one,
    pod,
    settings_file,
    variables,
)

SECRETS = "/var/run/secrets/speculation"


def projected() -> dict[str, tuple[str, str]]:
    """(Secret, key) of every file that the sidecar is given."""
    (volume,) = [v for v in pod("fleet")["volumes"] if v["name"] == "speculation-secrets"]
    assert volume["projected"]["defaultMode"] == 0o440
    return {
        item["path"]: (source["secret"]["name"], item["key"])
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }


def test_the_sidecar_runs_on_its_settings_and_secrets(tmp_path: Path):
    sidecar = containers("fleet")["controller"]
    assert mounts(sidecar)["speculation-secrets"]["mountPath"] == SECRETS
    make_authority(tmp_path, ["localhost"])
    contents = {
        "redis-password": "pa55\n",
        "tls.crt": (tmp_path / "localhost.pem").read_text(),
        "tls.key": (tmp_path / "localhost.key").read_text(),
        "access": token_line("read,steer,override", "s-secret", "ann"),
    }
    assert contents.keys() == projected().keys()
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "token").write_text("s-secret")
    file = settings_file("fleet", tmp_path)
    text = file.read_text()
    ports = {port["name"]: free_port() for port in sidecar["ports"]}
    for port in sidecar["ports"]:
        text = text.replace(str(port["containerPort"]), str(ports[port["name"]]))
    for place in (SECRETS, "/etc/speculation-policy", "/run/speculation", "/var/lib/speculation"):
        assert place in text
        text = text.replace(place, str(tmp_path))
    file.write_text(text.replace('"::"', '"::1"').replace("[::]", "[::1]"))
    assert variables(sidecar)["CONTROLLER_REDIS_URL"] == "from a Secret"
    with RedisServer(tmp_path / "redis") as redis:
        with redis.client() as client:
            client.config_set("requirepass", "pa55")
        environment = {
            "CONTROLLER_CONFIG": str(file),
            "CONTROLLER_REDIS_URL": redis.url,
        }
        command = [sys.executable, "-m", *sidecar["command"]]
        command[2] = "controller.cli"
        with subprocess.Popen(
            command, env=ENVIRONMENT | environment, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                wait_until_serving(f"unix:{tmp_path}/controller.sock", process)
                with grpc.insecure_channel(f"127.0.0.1:{ports['spec-health']}") as channel:
                    answer = health_stub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS
                    )
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                set_ = controller(
                    "override", "set", "--fleet", "--gamma", "1", "--reason", "a test",
                    "--allow-no-effect", "--address", f"localhost:{ports['grpc']}",
                    environment={
                        "CONTROLLER_TOKEN_FILE": str(tmp_path / "token"),
                        "CONTROLLER_CA": str(tmp_path / "ca.pem"),
                    },
                )  # fmt: skip
                assert set_.returncode == 0, set_.stderr
                with redis.client("pa55") as client:
                    assert client.keys("*:entry:*")
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=60)
                assert process.returncode == 0, errors
            finally:
                process.kill()


def test_the_commands_of_the_page_make_the_secrets_that_are_asked_for():
    page = (ROOT / "docs" / "deploy.md").read_text()
    secret_keys: set[tuple[str, str]] = set()
    for line in re.findall(r"^kubectl create secret .*", page, re.MULTILINE):
        _, _, _, kind, name, *options = shlex.split(line)
        option_values = dict(option.split("=", 1) for option in options)
        if kind == "tls":
            assert option_values.keys() == {"--cert", "--key"}
            secret_keys |= {(name, "tls.crt"), (name, "tls.key")}
        # --from-literal=KEY=VALUE, --from-file=KEY=FILE
        secret_keys |= {
            (name, value.partition("=")[0]) for key, value in option_values.items() if "from" in key
        }
    (source,) = [
        item["valueFrom"]["secretKeyRef"]
        for item in containers("fleet")["controller"]["env"]
        if "valueFrom" in item
    ]
    assert secret_keys == {*projected().values(), (source["name"], source["key"])}


def test_prometheus_finds_the_metrics_under_the_name_that_the_rules_use():
    (endpoint,) = one("fleet", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in containers("fleet")["controller"]["ports"]}
    assert {"targetLabel": "job", "replacement": JOB} in endpoint["relabelings"]


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_kube_prometheus_stack_selects_the_operators_objects(kind: str):
    # What its values select by as they are, `release: NAME`, and the name that its manual uses.
    assert one("fleet", kind)["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_the_prometheus_rule_is_the_rules(tmp_path: Path):
    groups = one("fleet", "PrometheusRule")["spec"]
    assert groups == yaml.safe_load(ALERTS.read_text())
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(groups))
    count = sum(len(group["rules"]) for group in groups["groups"])
    assert f"{count} rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", rules)


@pytest.mark.parametrize("stale", [False, True])
def test_a_prometheus_rule_that_says_something_else_is_noticed(tmp_path: Path, stale: bool):
    file = tmp_path / "rule.yaml"
    text = (KUBERNETES / "monitoring" / "prometheus-rule.yaml").read_text()
    file.write_text(text.replace("for: 1m", "for: 2m", 1) if stale else text)
    done = subprocess.run(
        [sys.executable, "scripts/prometheus_rule.py", "--check", "--file", str(file)],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == int(stale)
    assert ("is not what the rules say" in done.stdout) == stale


def test_the_alerts_lead_to_wherever_the_runbooks_are_published(tmp_path: Path):
    file = tmp_path / "rule.yaml"
    subprocess.run(
        [sys.executable, "scripts/prometheus_rule.py", "--file", str(file),
         "--runbooks", "https://wiki.example/alerts"],
        cwd=ROOT, env=dict(os.environ), check=True,
    )  # fmt: skip
    groups = yaml.safe_load(file.read_text())["spec"]["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        address = f"https://wiki.example/alerts#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == address

"""The Helm chart, rendered by Helm: the component's pod again, and values that are checked."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import controller
from controller.settings.policy_file import read_policy
from controller.settings.settings import Settings
from engine_shim.sglang.api.versions import TESTED
from tests.support.prometheus_server import ALERTS
from tests.unit.deploy.manifests import ROOT, Manifest, containers, one, pod, program
from tests.unit.deploy.test_component import VERSIONS, VOLUMES, by_name

CHART = ROOT / "deploy" / "helm" / "speculation-controller"
SCHEMA = Path(__file__).parent / "pod_monitor_schema.json"
# Every way to install it that has a template of its own.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "monitored": {"monitoring": {"enabled": True, "release": "prom"}},
    "kept": {"state": {"claim": "kept"}, "engine": {"replicas": 1}},
    "vllm": {"engine": {"kind": "vllm", "args": ["/models/target"], "modelsClaim": ""}},
    "bare": {"engine": {"create": False}, "profile": {"enabled": False}},
}

each_way = pytest.mark.parametrize("way", WAYS)


def helm(*words: str | Path, values: Any = None) -> "subprocess.CompletedProcess[str]":
    command = [program("helm"), *map(str, words)]
    if values is not None:
        command += ["--values", "-"]
    return subprocess.run(
        command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


@cache
def rendered(way: str) -> tuple[Manifest, ...]:
    done = helm("template", "prod", CHART, values=WAYS[way])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item)


def of_kind(way: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in rendered(way) if manifest["kind"] == kind]


def pod_of(way: str) -> Manifest:
    (deployment,) = of_kind(way, "Deployment")
    pod_spec: Manifest = deployment["spec"]["template"]["spec"]
    return pod_spec


def settings_map(way: str) -> dict[str, str]:
    (config_map,) = (
        m for m in of_kind(way, "ConfigMap") if not m["metadata"]["name"].endswith("-policy")
    )
    data: dict[str, str] = config_map["data"]
    return data


def test_the_linter_finds_no_fault():
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout


@each_way
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(way: str, version: str):
    assert rendered(way)
    for manifest in rendered(way):
        if "monitoring.coreos.com" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_pod_is_the_one_of_the_manifests():
    ours, theirs = pod_of("default"), pod("fleet")
    for name, container in by_name(ours["initContainers"]).items():
        wanted = dict(containers("single")[name]) | {"imagePullPolicy": "IfNotPresent"}
        assert container == wanted
    # Names of ConfigMaps are the release's.
    volumes = by_name(ours["volumes"])
    assert VOLUMES | {"models", "cache", "memory"} == volumes.keys()
    assert volumes["speculation-socket"] == by_name(theirs["volumes"])["speculation-socket"]
    assert ours["securityContext"] == theirs["securityContext"]
    own = {"env", "args", "imagePullPolicy", "volumeMounts", "command"}
    (engine,) = ours["containers"]
    wanted = containers("single")["sglang"]
    assert {k: v for k, v in engine.items() if k not in own} == {
        k: v for k, v in wanted.items() if k not in own
    }
    assert sorted(engine["args"]) == sorted(wanted["args"])
    variables = {item["name"]: item["value"] for item in wanted["env"]}
    assert {item["name"] for item in engine["env"]} == variables.keys()
    assert engine["image"] == f"sglang-speculation:{TESTED[-1]}-{controller.__version__}"


@each_way
def test_what_is_named_exists(way: str):
    names = {(m["kind"], m["metadata"]["name"]) for m in rendered(way)}
    assert len(names) == len(rendered(way))
    for deployment in of_kind(way, "Deployment"):
        template = deployment["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
        mounted = {
            mount["name"]
            for container in (*template["spec"]["containers"], *template["spec"]["initContainers"])
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
        for kind, selector_path in (
            ("Service", ("selector",)),
            ("PodDisruptionBudget", ("selector", "matchLabels")),
            ("NetworkPolicy", ("podSelector", "matchLabels")),
            ("PodMonitor", ("selector", "matchLabels")),
        ):
            for manifest in of_kind(way, kind):
                selector = manifest["spec"]
                for key in selector_path:
                    selector = selector[key]
                assert selector.items() <= labels


@each_way
def test_the_sidecar_takes_its_settings_and_policy(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "controller.yaml"
    file.write_text(settings_map(way)["controller.yaml"])
    monkeypatch.setenv("CONTROLLER_CONFIG", str(file))
    assert Settings.load().health_port == 9465
    (policy,) = (m for m in of_kind(way, "ConfigMap") if m["metadata"]["name"].endswith("-policy"))
    path = tmp_path / "policy.yaml"
    path.write_text(policy["data"]["policy.yaml"])
    assert read_policy(path)[0] == ()


def test_settings_and_policies_of_the_values_reach_the_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policies = [
        {"name": "a", "fleet": True, "reason": "r", "schedule": [{"batch": "1-8", "gamma": 3}]},
        {"name": "b", "model": "m", "reason": "r", "at_most": 5, "batch": 4},
    ]
    values = {"settings": {"planner": {"probe_share": 0.01}}, "policies": policies}
    done = helm("template", "prod", CHART, values=values)
    assert done.returncode == 0, done.stderr
    maps = {m["metadata"]["name"]: m["data"] for m in yaml.safe_load_all(done.stdout)
            if m and m["kind"] == "ConfigMap"}  # fmt: skip
    file = tmp_path / "controller.yaml"
    file.write_text(maps["prod-speculation"]["controller.yaml"])
    monkeypatch.setenv("CONTROLLER_CONFIG", str(file))
    assert Settings.load().planner.probe_share == 0.01
    path = tmp_path / "policy.yaml"
    path.write_text(maps["prod-speculation-policy"]["policy.yaml"])
    assert [o.override_id for o in read_policy(path)[0]] == ["policy:a:1", "policy:b"]


def test_the_engine_of_vllm_is_asked_where_it_listens():
    (engine,) = pod_of("vllm")["containers"]
    assert engine["ports"] == [{"name": "http", "containerPort": 8000}]
    step = by_name(pod_of("vllm")["initContainers"])["profile"]
    assert by_name(step["env"])["ENGINE_URL"]["value"] == "http://localhost:8000"
    assert "models" not in by_name(pod_of("vllm")["volumes"])
    done = helm("template", "prod", CHART, values={"engine": {"kind": "vllm"}})
    assert "engine.args are those of SGLang" in done.stderr


def test_an_engine_of_pods_with_ipv6_addresses_only_binds_one():
    done = helm("template", "prod", CHART, values={"engine": {"host": "::"}})
    (deployment,) = [m for m in yaml.safe_load_all(done.stdout) if m and m["kind"] == "Deployment"]
    (engine,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--host=::" in engine["args"]
    refused = helm("template", "prod", CHART, values={"engine": {"host": "[::]:80"}})
    assert refused.returncode != 0


def test_a_claim_for_the_state_belongs_to_one_pod():
    (deployment,) = of_kind("kept", "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    volume = by_name(pod_of("kept")["volumes"])["speculation-state"]
    assert volume == {
        "name": "speculation-state", "persistentVolumeClaim": {"claimName": "kept"}
    }  # fmt: skip


def test_what_the_operator_of_prometheus_gets_is_the_same():
    (monitor,) = of_kind("monitored", "PodMonitor")
    jsonschema.validate(monitor, json.loads(SCHEMA.read_text()))
    assert monitor["spec"] == one("fleet", "PodMonitor")["spec"]
    (rule,) = of_kind("monitored", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert rule["metadata"]["labels"]["release"] == "prom"
    assert not of_kind("default", "PrometheusRule")
    values = {"monitoring": {"enabled": True, "runbooks": "https://wiki.example/a"}}
    done = helm("template", "prod", CHART, values=values)
    assert "https://docs.example" not in done.stdout
    assert "runbook_url: https://wiki.example/a#speculationsidecardown" in done.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"imag": {}}, "imag"),
        ({"engine": {"kind": "trt"}}, "kind"),
        ({"engine": {"env": {"A": 1}}}, "env"),
        ({"engine": {"resources": {"limits": {"memory": "1Gi"}}, "replicas": "two"}}, "replicas"),
        ({"settings": {"metrics_port": 1}}, "metrics_port"),
        ({"policies": [{"name": "a", "reason": "r", "gamma": 1}]}, "policies"),
        ({"policies": [{"name": "a", "reason": "r", "fleet": True, "at_mots": 1}]}, "at_mots"),
        ({"policies": [{"name": "a", "reason": "r", "fleet": True, "gamma": 65}]}, "gamma"),
        ({"monitoring": {"runbooks": "docs/alerts.md"}}, "runbooks"),
        ({"resources": {"limits": {"memory": None}}}, "memory"),
    ],
)
def test_values_that_the_chart_does_not_know_are_refused(values: Any, message: str):
    done = helm("template", "prod", CHART, values=values)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_schema_knows_every_value_and_no_other():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)

    def same(values: Any, subschema: Any, place: str) -> None:
        if "properties" in subschema and subschema.get("additionalProperties") is False:
            assert values.keys() == subschema["properties"].keys() - {"global"}, place
            for key, value in values.items():
                same(value, subschema["properties"][key], f"{place}.{key}")

    same(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")


def test_a_chart_of_ones_own_includes_the_parts(tmp_path: Path):
    """As docs/own-deployment.md shows it."""
    page = (ROOT / "docs" / "own-deployment.md").read_text()
    mine = tmp_path / "mine"
    (mine / "templates").mkdir(parents=True)
    (mine / "charts").mkdir()
    (mine / "charts" / "speculation-controller").symlink_to(CHART)
    dependencies = page.partition("# Chart.yaml of your chart\n")[2].partition("```")[0]
    (mine / "Chart.yaml").write_text(f"apiVersion: v2\nname: mine\nversion: 0.1.0\n{dependencies}")
    assert yaml.safe_load(dependencies)["dependencies"][0]["version"] == controller.__version__
    parts = page.partition("# your Deployment, StatefulSet or LeaderWorkerSet\n")[2]
    (mine / "templates" / "set.yaml").write_text(
        "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: mine}\nspec:\n"
        "  serviceName: mine\n  selector: {matchLabels: {app: mine}}\n  template:\n"
        + parts.partition("```")[0]
        .replace("      labels:\n", "      labels:\n        app: mine\n")
        .replace("        - name: engine\n", "        - name: engine\n          image: mine\n")
    )
    values = yaml.safe_load(page.partition("# values.yaml of your chart\n")[2].partition("```")[0])
    mine_only = values["speculation-controller"]
    assert mine_only == {"engine": {"create": False, "kind": "sglang"}}
    mine_only["engine"]["kind"] = "vllm"
    mine_only["image"] = {"repository": "registry.example/s"}
    done = helm("template", "prod", mine, values=values)
    assert done.returncode == 0, done.stderr
    manifests = [item for item in yaml.safe_load_all(done.stdout) if item]
    (workload,) = (item for item in manifests if item["kind"] == "StatefulSet")
    for version in VERSIONS:
        kubernetes_validate.validate(workload, version, strict=True)
    spec = workload["spec"]["template"]["spec"]
    init_containers = by_name(spec["initContainers"])
    assert init_containers["controller"]["image"] == f"registry.example/s:{controller.__version__}"
    assert (
        by_name(init_containers["profile"]["env"])["ENGINE_URL"]["value"] == "http://localhost:8000"
    )
    assert by_name(spec["volumes"]).keys() == VOLUMES
    names = {item["metadata"]["name"] for item in manifests if item["kind"] == "ConfigMap"}
    wanted = {v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v}
    assert names == wanted == {"prod-speculation", "prod-speculation-policy"}


def test_its_version_is_the_one_of_this_tree():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == controller.__version__


@pytest.mark.parametrize("stale", [False, True])
def test_a_shared_file_that_differs_is_noticed(tmp_path: Path, stale: bool):
    for path in (CHART / "files").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if stale:
        (tmp_path / "pod.yaml").write_text("{}")
    done = subprocess.run(
        [sys.executable, "scripts/helm_files.py", "--check", "--folder", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == int(stale)
    assert ("pod.yaml of the chart differ" in done.stdout) == stale

"""What every overlay promises, read from what kubectl renders."""

import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest

import controller
from controller.settings.settings import Settings, SettingsError
from engine_shim.sglang.api.settings import PluginSettings
from engine_shim.sglang.api.versions import TESTED
from tests.unit.deploy.command_lines import parsed
from tests.unit.deploy.manifests import (
    OVERLAYS,
    ROOT,
    containers,
    mounts,
    objects,
    one,
    pod,
    rendered,
    settings_file,
    variables,
)

# Native sidecars came with 1.29.
OLDEST = "1.29"
# The first wait of a kubelet before it starts a container again.
BACK_OFF_SECONDS = 10

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)


def settings_of(
    overlay: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Settings, dict[str, str]]:
    """What `controller serve` runs with in the pod."""
    container = containers(overlay)["controller"]
    environment = variables(container)
    mount = mounts(container)["speculation-settings"]["mountPath"]
    assert environment["CONTROLLER_CONFIG"] == f"{mount}/controller.yaml"
    environment["CONTROLLER_CONFIG"] = str(settings_file(overlay, folder))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert container["command"] == ["controller", "serve"]
    return Settings.load(), environment


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_kubernetes_knows_every_field(overlay: str, version: str):
    own = [m for m in rendered(overlay) if "monitoring.coreos.com" not in m["apiVersion"]]
    kinds = {manifest["kind"] for manifest in own}
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    for manifest in own:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_prometheus_operator_knows_every_field(overlay: str):
    monitors = objects(overlay, "PodMonitor")
    assert len(monitors) == (overlay == "fleet")
    schema = json.loads((Path(__file__).parent / "pod_monitor_schema.json").read_text())
    for monitor in monitors:
        jsonschema.validate(monitor, schema)
        assert monitor["spec"]["selector"]["matchLabels"].items() <= (
            one(overlay, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
        )


def test_the_sidecar_is_native_and_the_engine_is_not_held_up_by_its_restarts(overlay: str):
    sidecar, profile = pod(overlay)["initContainers"]
    assert (sidecar["name"], profile["name"]) == ("controller", "profile")
    assert sidecar["restartPolicy"] == profile["restartPolicy"] == "Always"
    assert "readinessProbe" not in sidecar
    # It ends with the engine's start if it has to succeed before that.
    assert "startupProbe" not in profile
    # `kubectl logs POD` shows the engine.
    assert [container["name"] for container in pod(overlay)["containers"]] == ["sglang"]


def test_nobody_is_root_and_nothing_can_be_written_but_volumes(overlay: str):
    spec = pod(overlay)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for flag in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        assert flag not in spec
    for container in containers(overlay).values():
        own = container["securityContext"]
        assert own["runAsNonRoot"] is True
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert (own | spec["securityContext"])["runAsUser"] > 0
        assert "privileged" not in own


def test_the_probes_ask_the_port_that_the_settings_name(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    sidecar = containers(overlay)["controller"]
    for probe in ("startupProbe", "livenessProbe"):
        # kubectl may leave out the empty service: it is the process that is asked for.
        assert sidecar[probe]["grpc"].get("service", "") == ""
        assert sidecar[probe]["grpc"]["port"] == settings.health_port
    ports = {port["name"]: port["containerPort"] for port in sidecar["ports"]}
    wanted = {"spec-metrics": settings.metrics_port, "spec-health": settings.health_port}
    if settings.tcp is not None:
        wanted["grpc"] = int(settings.tcp.rpartition(":")[2])
    assert ports == wanted
    # Both families: a cluster's pods may have IPv6 addresses only.
    hosts = {listener.name: listener.host for listener in settings.listeners}
    assert set(hosts.values()) == {"::"}, hosts
    engine = containers(overlay)["sglang"]
    assert {port["name"]: port["containerPort"] for port in engine["ports"]} == {"http": 30000}
    assert "--port=30000" in engine["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"]["port"] == "http"


def test_a_setting_that_is_unknown_would_be_noticed(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings_of(overlay, tmp_path, monkeypatch)
    file = tmp_path / "controller.yaml"
    file.write_text(file.read_text() + "metric_port: 1\n")
    with pytest.raises(SettingsError, match="metric_port is not a setting"):
        Settings.load()


def test_the_shim_takes_every_variable_of_the_engine(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    environment = variables(containers(overlay)["sglang"])
    assert "SPECULATION_GAMMAS" in environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert PluginSettings.load().sidecar == settings.address


def test_all_containers_have_the_same_socket_in_the_same_place(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    for container in containers(overlay).values():
        place = mounts(container)["speculation-socket"]["mountPath"]
        assert place == str(settings.socket_path.parent)
    assert variables(containers(overlay)["profile"])["CONTROLLER_ADDRESS"] == settings.address
    (volume,) = [v for v in pod(overlay)["volumes"] if v["name"] == "speculation-socket"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Mi"}
    assert mounts(containers(overlay)["sglang"])["speculation-socket"]["readOnly"] is True


def test_what_the_sidecar_writes_lies_on_the_state_volume(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    place = Path(mounts(containers(overlay)["controller"])["speculation-state"]["mountPath"])
    written = [settings.state_directory, settings.profile_directory]
    for path in written:
        assert path is not None
        assert place in path.parents
    # An unfinished measurement lies beside a measured profile, and a sidecar takes it for none.
    script = containers(overlay)["profile"]["args"][0]
    measured = re.search(r"mkdir -p (\S+) && cd \1 ", script)
    assert measured is not None
    assert place in Path(measured[1]).parents
    assert Path(measured[1]) not in written
    (volume,) = [v for v in pod(overlay)["volumes"] if v["name"] == "speculation-state"]
    kind = "persistentVolumeClaim" if overlay == "single" else "emptyDir"
    assert set(volume) == {"name", kind}


def test_the_policy_is_read_where_its_map_is_mounted_and_may_be_missing(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    mount = mounts(containers(overlay)["controller"])["speculation-policy"]
    assert settings.policy == Path(mount["mountPath"]) / "policy.yaml"
    # A file that is mounted by subPath would never change.
    assert "subPath" not in mount
    (volume,) = [v for v in pod(overlay)["volumes"] if v["name"] == "speculation-policy"]
    assert volume["configMap"] == {"name": "speculation-policy", "optional": True}


def test_the_startup_step_is_a_command_that_exists_and_has_time(overlay: str):
    step = containers(overlay)["profile"]
    assert step["command"] == ["/bin/sh", "-c"]
    (line,) = re.findall(r"controller profile .*(?= &)", step["args"][0])
    options = parsed(line.replace('"$ENGINE_URL"', variables(step)["ENGINE_URL"]).split())
    assert options["engine_url"] == "http://localhost:30000"
    probe = step["readinessProbe"]
    settled = probe["exec"]["command"][-1]
    assert f"settled={settled}\n" in step["args"][0]
    assert settled.startswith(mounts(step)["speculation-socket"]["mountPath"])
    (attempts,) = re.findall(r'"\$attempts" = (\d)', step["args"][0])
    longest = int(attempts) * (options["wait_seconds"] + 2 * options["budget"])
    assert one(overlay, "Deployment")["spec"]["progressDeadlineSeconds"] > longest


def test_there_is_time_to_stop_and_to_come_back(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    engine = containers(overlay)["sglang"]
    before_stop = int(engine["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert (
        pod(overlay)["terminationGracePeriodSeconds"] >= before_stop + settings.drain_seconds + 60
    )
    assert settings.last_lease_seconds >= BACK_OFF_SECONDS + 5


def test_requests_and_limits_are_given(overlay: str):
    for container in containers(overlay).values():
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]
        assert "cpu" not in resources["limits"]  # throttled, it would be late with plans
    limits = containers(overlay)["sglang"]["resources"]["limits"]
    assert ("nvidia.com/gpu" in limits) == (overlay != "demo")


def test_images_are_pinned_to_the_versions_of_this_tree(overlay: str):
    wanted = {"controller": f"speculation-controller:{controller.__version__}"}
    wanted["profile"] = wanted["controller"]
    kind = "speculation-demo:" if overlay == "demo" else f"sglang-speculation:{TESTED[-1]}-"
    wanted["sglang"] = f"{kind}{controller.__version__}"
    assert {name: container["image"] for name, container in containers(overlay).items()} == wanted


def test_volumes_are_mounted_and_mounts_have_volumes(overlay: str):
    mounted = {name for container in containers(overlay).values() for name in mounts(container)}
    assert mounted == {volume["name"] for volume in pod(overlay)["volumes"]}


def test_what_is_named_exists(overlay: str):
    names = {(m["kind"], m["metadata"]["name"]) for m in rendered(overlay)}
    for volume in pod(overlay)["volumes"]:
        if "configMap" in volume and not volume["configMap"].get("optional"):
            assert ("ConfigMap", volume["configMap"]["name"]) in names
        claim = volume.get("persistentVolumeClaim", {}).get("claimName", "models")
        assert claim == "models" or ("PersistentVolumeClaim", claim) in names
    labels = one(overlay, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert one(overlay, "Service")["spec"]["selector"].items() <= labels.items()
    for kind, name in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        assert one(overlay, kind)["spec"][name]["matchLabels"].items() <= labels.items()
    if overlay == "demo":
        folders = [
            a.partition("=")[2] for a in containers(overlay)["sglang"]["args"] if "-path" in a
        ]
        assert len(folders) == 2
        for folder in folders:
            assert (ROOT / "lab/cpu_engine" / folder.replace("/models/", "models/")).is_dir()


def test_only_who_must_gets_in_and_out(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    policy = one(overlay, "NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    into = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    out = {port["port"]: rule["to"] for rule in policy["egress"] for port in rule["ports"]}
    operators = {int(settings.tcp.rpartition(":")[2])} if settings.tcp else set()
    assert into.keys() == {30000, settings.metrics_port} | operators
    assert out.keys() == {53} | ({6379, 26379} if overlay == "fleet" else set())
    for peers in (*into.values(), *out.values()):
        assert peers
    # The port has administrative routes: no pod gets in by being in some namespace.
    for peer in into[30000]:
        assert peer["podSelector"]["matchLabels"] == {"speculation-client": "true"}
    (prometheus,) = into[settings.metrics_port]
    assert prometheus["podSelector"]["matchLabels"]
    assert prometheus["namespaceSelector"]["matchLabels"]


def test_the_page_has_a_port_of_its_own_wherever_it_is_documented(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _ = settings_of(overlay, tmp_path, monkeypatch)
    named = [
        int(port)
        for page in ("README.md", "docs/page.md")
        for port in re.findall(r"--page-port (\d+)", (ROOT / page).read_text())
    ]
    assert len(named) >= 2
    taken = {listener.port for listener in settings.listeners}
    assert not taken & set(named)

"""The components on workloads that others wrote: what is added, and that nothing else changes."""

import copy
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kubernetes_validate
import pytest
import yaml

from controller.settings.settings import Settings
from engine_shim.link.settings import LinkSettings
from tests.unit.deploy.manifests import KUBERNETES, ROOT, Manifest, containers, kustomize, program

FOREIGN = Path(__file__).parent / "foreign"
VERSIONS = ("1.29", kubernetes_validate.latest_version())
LABEL = "speculation-controller/engine"
VOLUMES = {
    "speculation-socket", "speculation-operators", "speculation-settings", "speculation-policy",
    "speculation-state",
}  # fmt: skip
KINDS = ("deployment", "statefulset", "leaderworkerset")

each_kind = pytest.mark.parametrize("kind", KINDS)


def written(kind: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOREIGN / f"{kind}.yaml").read_text()))


def build(objects: list[Manifest], *components: str, **more: Any) -> tuple[Manifest, ...]:
    """Renders a kustomization of these objects, as their owner would write it."""
    with TemporaryDirectory(dir=ROOT) as name:
        folder = Path(name)
        (folder / "mine.yaml").write_text(yaml.safe_dump_all(objects))
        kustomization = {
            "resources": ["mine.yaml"],
            "components": [
                os.path.relpath(KUBERNETES / "components" / component, folder)
                for component in components
            ],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization | more))
        return kustomize(folder)


@cache
def built(kind: str) -> tuple[Manifest, ...]:
    objects = written(kind)
    return build(objects, "sidecar", objects[0]["metadata"]["labels"][LABEL])


def template(workload: Manifest) -> Manifest:
    """The pod template that the engine's server runs from."""
    spec = workload["spec"]
    if workload["kind"] == "LeaderWorkerSet":
        leader_template: Manifest = spec["leaderWorkerTemplate"]["leaderTemplate"]
        return leader_template
    return dict(spec["template"])


def by_name(items: list[Manifest]) -> dict[str, Manifest]:
    items_by_name = {item["name"]: item for item in items}
    assert len(items_by_name) == len(items)
    return items_by_name


def without_component(workload: Manifest) -> Manifest:
    """Takes away what the component is known to add."""
    rest = copy.deepcopy(workload)
    pod_template = template(rest)
    del pod_template["metadata"]["labels"]["speculation-controller/sidecar"]
    pod = pod_template["spec"]
    pod["initContainers"] = [
        item for item in pod["initContainers"] if item["name"] not in {"controller", "profile"}
    ]
    pod["volumes"] = [item for item in pod["volumes"] if item["name"] not in VOLUMES]
    pod["securityContext"]["supplementalGroups"].remove(10001)
    engines = [pod["containers"][0]]
    if workload["kind"] == "LeaderWorkerSet":
        worker = rest["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        engines.append(worker["containers"][0])
    for engine in engines:
        engine["env"] = [item for item in engine["env"] if item["name"] != "SPECULATION_SIDECAR"]
        mounts = engine.get("volumeMounts", [])
        engine["volumeMounts"] = [item for item in mounts if item["name"] not in VOLUMES]
    pruned: Manifest = _pruned(rest)
    return pruned


def _pruned(value: Any) -> Any:
    """Leaves out what is empty."""
    if isinstance(value, dict):
        pairs = {key: _pruned(item) for key, item in value.items()}
        # An emptyDir is empty on purpose.
        return {key: item for key, item in pairs.items() if item or key == "emptyDir"}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


@each_kind
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(kind: str, version: str):
    for manifest in built(kind):
        if manifest["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(manifest, version, strict=True)
            continue
        # Its own schema is in no package; its pod templates are Kubernetes'.
        for pod_template in manifest["spec"]["leaderWorkerTemplate"].values():
            if isinstance(pod_template, dict):
                pod = {"apiVersion": "v1", "kind": "Pod", **pod_template}
                kubernetes_validate.validate(pod, version, strict=True)


@each_kind
def test_what_was_there_stays_as_it_was(kind: str):
    workload, *others = written(kind)
    after = {item["metadata"]["name"]: item for item in built(kind)}
    assert set(after) == {workload["metadata"]["name"], "speculation-controller"} | {
        other["metadata"]["name"] for other in others
    }
    for other in others:
        assert after[other["metadata"]["name"]] == other
    assert without_component(after[workload["metadata"]["name"]]) == _pruned(workload)


@each_kind
def test_the_engine_stays_first_and_the_sidecar_starts_before_it(kind: str):
    before, after = (template(items[0])["spec"] for items in (written(kind), ordered(kind)))
    names = [container["name"] for container in after["containers"]]
    assert names == [container["name"] for container in before["containers"]]
    start = [container["name"] for container in after["initContainers"]]
    own = [container["name"] for container in before.get("initContainers", [])]
    assert start == [*own, "controller", "profile"]
    for name in ("controller", "profile"):
        assert by_name(after["initContainers"])[name]["restartPolicy"] == "Always"


def ordered(kind: str) -> list[Manifest]:
    """The rendered objects, the workload first."""
    name = written(kind)[0]["metadata"]["name"]
    return sorted(built(kind), key=lambda item: item["metadata"]["name"] != name)


@each_kind
def test_shim_sidecar_and_profile_mean_the_same_socket(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pod = template(ordered(kind)[0])["spec"]
    settings = next(item for item in built(kind) if item["kind"] == "ConfigMap")["data"]
    file = tmp_path / "controller.yaml"
    file.write_text(settings["controller.yaml"])
    monkeypatch.setenv("CONTROLLER_CONFIG", str(file))
    address = Settings.load().address
    (sidecar,) = (item for item in pod["initContainers"] if item["name"] == "controller")
    operators = by_name(sidecar["env"])["CONTROLLER_OPERATORS_DIRECTORY"]["value"]
    engine = pod["containers"][0]
    for item in engine["env"]:
        if item["name"].startswith("SPECULATION_"):
            monkeypatch.setenv(item["name"], item["value"])
    assert LinkSettings.load().sidecar == address
    step = by_name(pod["initContainers"])["profile"]
    assert by_name(step["env"])["CONTROLLER_ADDRESS"]["value"] == address
    # The operators' socket is for the added containers alone, whatever user the engine is.
    for container in pod["initContainers"][-2:]:
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "speculation-operators")
        assert mount["mountPath"] == operators
    for container in (*pod["containers"], *pod["initContainers"][:-2]):
        mounts = container.get("volumeMounts", [])
        assert "speculation-operators" not in {mount["name"] for mount in mounts}
    for container in (engine, *pod["initContainers"][-2:]):
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "speculation-socket")
        assert f"unix:{mount['mountPath']}/controller.sock" == address
    assert by_name(pod["volumes"]).keys() >= VOLUMES


@pytest.mark.parametrize(
    ("kind", "port"), [("deployment", 30000), ("statefulset", 8000), ("leaderworkerset", 30000)]
)
def test_the_measurement_asks_the_engine_where_it_listens(kind: str, port: int):
    step = by_name(template(ordered(kind)[0])["spec"]["initContainers"])["profile"]
    assert by_name(step["env"])["ENGINE_URL"]["value"] == f"http://localhost:{port}"


@each_kind
def test_names_and_images_of_the_owner_reach_what_was_added(kind: str):
    objects = written(kind)
    engine = objects[0]["metadata"]["labels"][LABEL]
    image = {"name": "speculation-controller", "newName": "registry.example/s", "newTag": "7"}
    after = build(
        objects, "sidecar", engine, namePrefix="blue-", nameSuffix="-b", namespace="prod",
        images=[image],
        configMapGenerator=[{"name": "speculation-policy", "literals": ["policy.yaml="]}],
    )  # fmt: skip
    name = f"blue-{objects[0]['metadata']['name']}-b"
    (workload,) = (item for item in after if item["metadata"]["name"] == name)
    pod = template(workload)["spec"]
    for container in pod["initContainers"][-2:]:
        assert container["image"] == "registry.example/s:7"
    asked = {
        volume["configMap"]["name"]
        for volume in pod["volumes"]
        if volume["name"] in VOLUMES and "configMap" in volume
    }
    config_map_names = {item["metadata"]["name"] for item in after if item["kind"] == "ConfigMap"}
    assert asked == config_map_names
    assert len(config_map_names) == 2


def test_an_image_can_be_set_in_a_running_pod():
    """The command of docs/own-deployment.md, on a pod that no server holds."""
    page = (ROOT / "docs" / "own-deployment.md").read_text()
    command = "kubectl set image pod/POD controller=IMAGE profile=IMAGE"
    assert command in page
    pod = template(ordered("deployment")[0])
    manifest = {"apiVersion": "v1", "kind": "Pod", **pod}
    manifest["metadata"] = manifest["metadata"] | {"name": "llama-1"}
    words = command.replace("IMAGE", "registry.example/s:8").split()[3:]
    done = subprocess.run(
        [program("kubectl"), "set", "image", "--local", "-f", "-", "-o", "yaml", *words[1:]],
        input=yaml.safe_dump(manifest), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    changed = yaml.safe_load(done.stdout)["spec"]
    images = {name: c["image"] for name, c in by_name(changed["initContainers"]).items()}
    assert images == {
        "download": "downloader:1",
        "controller": "registry.example/s:8",
        "profile": "registry.example/s:8",
    }
    engines = [{name: c["image"] for name, c in by_name(items).items()} for items in
               (changed["containers"], pod["spec"]["containers"])]  # fmt: skip
    assert engines[0] == engines[1]


def test_every_rank_of_an_engine_is_switched_on():
    sets = ordered("leaderworkerset")[0]["spec"]["leaderWorkerTemplate"]
    worker = sets["workerTemplate"]["spec"]
    assert by_name(worker["containers"][0]["env"]).keys() == {"SPECULATION_SIDECAR"}
    # Only the first rank talks to the sidecar, so only the leader has one.
    assert worker.keys() == {"containers"}


def test_the_engine_gets_the_socket_s_group_whatever_its_own_are():
    for kind, groups in (("deployment", [10001]), ("statefulset", [3000, 3001, 10001])):
        pod = template(ordered(kind)[0])["spec"]
        assert pod["securityContext"]["supplementalGroups"] == groups
        # Volumes of the owner keep theirs.
        assert pod["securityContext"].get("fsGroup") == (None if kind == "deployment" else 2000)
        for container in pod["initContainers"][-2:]:
            assert container["securityContext"]["runAsUser"] == 10001
            assert container["securityContext"]["runAsGroup"] == 10001


def test_a_set_without_a_template_of_its_leader_is_refused():
    (workload,) = written("leaderworkerset")
    del workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    after = {item["kind"]: item for item in build([workload], "sidecar", "sglang")}
    # The server refuses it, too: a container without name and image.
    pod = {"apiVersion": "v1", "kind": "Pod", **template(after["LeaderWorkerSet"])}
    with pytest.raises(kubernetes_validate.ValidationError, match="name"):
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


def test_an_engine_that_is_not_the_first_container_can_be_named():
    """As docs/own-deployment.md shows it: the sidecar's component, and a patch of one's own."""
    workload = written("deployment")[0]
    workload["spec"]["template"]["spec"]["containers"].reverse()
    patch = yaml.safe_load(page_snippet("an engine that is not the first container"))
    patch["metadata"]["name"] = workload["metadata"]["name"]
    patch["spec"]["template"]["spec"]["containers"][0]["name"] = "engine"
    after = build([workload], "sidecar", patches=[{"patch": yaml.safe_dump(patch)}])
    (deployment,) = (item for item in after if item["kind"] == "Deployment")
    after_patch = by_name(deployment["spec"]["template"]["spec"]["containers"])
    by_component = by_name(template(ordered("deployment")[0])["spec"]["containers"])
    assert after_patch["access-log"] == by_component["access-log"]
    for field in ("env", "volumeMounts"):
        patched_items, wanted = (items["engine"][field] for items in (after_patch, by_component))
        assert by_name(patched_items) == by_name(wanted)


def page_snippet(name: str) -> str:
    """The YAML of docs/own-deployment.md behind the comment with this name."""
    page = (ROOT / "docs" / "own-deployment.md").read_text()
    _, _, rest = page.partition(f"<!-- {name} -->\n```yaml\n")
    assert rest, name
    return rest.partition("```")[0]


def test_the_kustomization_of_the_page_works():
    kustomization = yaml.safe_load(page_snippet("own kustomization"))
    names = [Path(component).name for component in kustomization["components"]]
    assert names == ["sidecar", "sglang"]
    assert "images" in kustomization
    del kustomization["resources"], kustomization["components"]
    generators = kustomization.pop("configMapGenerator")
    for generator in generators:
        files = generator.pop("files", [])
        generator["literals"] = [f"{file}=x: 1" for file in files]
    (own,) = kustomization.pop("patches")
    assert own == {"path": "settings.yaml"}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "speculation-controller"},
        "data": {"controller.yaml": "x: 1"},
    }
    objects = written("deployment")
    patches = [{"patch": yaml.safe_dump(settings)}]
    after = build(objects, *names, configMapGenerator=generators, patches=patches, **kustomization)
    (deployment,) = (
        item for item in after if item["metadata"]["name"] == objects[0]["metadata"]["name"]
    )
    image = by_name(deployment["spec"]["template"]["spec"]["initContainers"])["controller"]["image"]
    assert image.startswith("registry.example/")
    maps = {item["metadata"]["name"]: item["data"] for item in after if item["kind"] == "ConfigMap"}
    assert maps.keys() == {"speculation-controller", "speculation-policy"}
    assert maps["speculation-controller"] == {"controller.yaml": "x: 1"}
    assert maps["speculation-policy"] == {"policy.yaml": "x: 1"}


def test_a_version_of_kustomize_without_replacements_is_not_enough():
    """The oldest kubectl that the page names has them; the one here is newer."""
    kubectl_version = subprocess.run(
        [program("kubectl"), "version", "--client"], capture_output=True, text=True, check=True
    ).stdout
    assert "Kustomize Version: v5" in kubectl_version


def test_vllm_gets_what_sglang_gets():
    """The two components differ in the engine's name and port only."""
    folders = [KUBERNETES / "components" / name for name in ("sglang", "vllm")]
    texts = [
        "".join(path.read_text() for path in sorted(folder.iterdir())).lower() for folder in folders
    ]
    assert texts[0].replace("sglang", "vllm").replace(":30000", ":8000") == texts[1]


def test_the_base_is_such_a_workload_too():
    added = by_name(template(ordered("deployment")[0])["spec"]["initContainers"])
    for name in ("controller", "profile"):
        assert containers("demo")[name] == added[name]

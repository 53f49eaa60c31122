"""The overlays as kubectl renders them, and what the tests ask of a pod."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("single", "fleet", "demo")

Manifest = dict[str, Any]


def program(name: str) -> str:
    """Returns the path of kubectl or helm; a test that needs one fails without it."""
    sibling_path = Path(sys.executable).parent / name
    program_path = str(sibling_path) if sibling_path.exists() else shutil.which(name)
    assert program_path is not None, f"{name} is missing: `make setup` installs it"
    return program_path


def kustomize(folder: Path) -> tuple[Manifest, ...]:
    """Returns every object of a kustomization."""
    command = [program("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    # What kustomize deprecates, it reports there.
    assert done.stderr == ""
    return tuple(yaml.safe_load_all(done.stdout))


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """Every object of it."""
    return kustomize(KUBERNETES / "overlays" / overlay)


def objects(overlay: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in rendered(overlay) if manifest["kind"] == kind]


def one(overlay: str, kind: str) -> Manifest:
    (manifest,) = objects(overlay, kind)
    return manifest


def pod(overlay: str) -> Manifest:
    """The pod's spec."""
    spec: Manifest = one(overlay, "Deployment")["spec"]["template"]["spec"]
    return spec


def containers(overlay: str) -> dict[str, Manifest]:
    """By name; the native sidecar among them."""
    spec = pod(overlay)
    return {
        container["name"]: container for container in (*spec["initContainers"], *spec["containers"])
    }


def variables(container: Manifest) -> dict[str, str]:
    """Those with a value, and "from a Secret" for the others."""
    return {item["name"]: item.get("value", "from a Secret") for item in container.get("env", [])}


def mounts(container: Manifest) -> dict[str, Manifest]:
    """By volume."""
    return {mount["name"]: mount for mount in container["volumeMounts"]}


def settings_file(overlay: str, folder: Path) -> Path:
    """What the sidecar reads."""
    path = folder / "controller.yaml"
    path.write_text(one(overlay, "ConfigMap")["data"]["controller.yaml"])
    return path

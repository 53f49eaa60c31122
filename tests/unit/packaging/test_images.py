"""The Dockerfiles' steps in a bare Debian, because images cannot be built where there is no Docker.

The base image is the one difference: Debian's own Python 3.11 instead of that of the official
image and, in place of SGLang's image, the metadata of the packages that it has.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from dockerfile_parse import DockerfileParser
from grpc_health.v1 import health_pb2

from tests.support.eventually import eventually
from tests.support.service_harness import PATIENCE_SECONDS, health_stub
from tests.unit.deploy.manifests import ROOT

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot and debootstrap need root"),
]

PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
# In a directory that the PATH of the steps lacks.
CHROOT = shutil.which("chroot") or "chroot"
SITE = Path("usr/local/lib/python3.11/dist-packages")
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")


@dataclass
class Stage:
    """One FROM of a Dockerfile, up to the next one."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(path: Path) -> list[Stage]:
    with path.open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    image_stages: list[Stage] = []
    for item in structure:
        if item["instruction"] == "FROM":
            base, _, name = item["value"].partition(" AS ")
            image_stages.append(Stage(base, name))
        elif image_stages and item["instruction"] != "COMMENT":
            image_stages[-1].steps.append((item["instruction"], item["value"]))
    return image_stages


class Root:
    """A root directory that the steps of a stage run in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.user = "0:0"
        # Debian's Python asks for it; pip's own settings are those of this machine.
        self.environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        } | {name: value for name, value in os.environ.items() if name.startswith("PIP_INDEX")}

    def command(self, *words: str) -> list[str]:
        """Words run inside as the stage's user."""
        return [CHROOT, f"--userspec={self.user}", str(self.path), *words]

    def run(self, *words: str, shell: str = "") -> str:
        inside = ("/bin/bash", "-o", "pipefail", "-c", shell) if shell else words
        done = subprocess.run(
            self.command(*inside), env=self.environment, capture_output=True, text=True,
            check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def build(self, stage: Stage, others: dict[str, "Root"]) -> None:
        """Runs the steps of a stage.  others: roots of earlier stages, by name."""
        for instruction, value in stage.steps:
            if instruction == "COPY":
                assert value == ". /source"
                copy_context(self.path / "source")
            elif instruction == "RUN":
                mounts = re.findall(r"--mount=(\S+)", value)
                for mount in mounts:
                    self._bind(dict(part.split("=", 1) for part in mount.split(",")), others)
                self.run(shell=re.sub(r"--mount=\S+\s*", "", value))
                for mount in mounts:
                    target = dict(part.split("=", 1) for part in mount.split(","))["target"]
                    shutil.rmtree(self.path / target.lstrip("/"))
            elif instruction == "ENV":
                self.environment |= dict(part.split("=", 1) for part in value.split())
            elif instruction == "USER":
                self.user = value
            else:
                assert instruction in {"ENTRYPOINT", "CMD", "SHELL", "ARG"}, instruction

    def _bind(self, mount: dict[str, str], others: dict[str, "Root"]) -> None:
        assert mount["type"] == "bind"
        outside = others[mount["from"]].path if "from" in mount else ROOT
        source = outside / mount["source"].lstrip("/")
        shutil.copytree(source, self.path / mount["target"].lstrip("/"))


def copy_context(target: Path) -> None:
    """What .dockerignore leaves of this tree."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    target.mkdir()
    for pattern in (line[1:] for line in lines if line.startswith("!")):
        for path in ROOT.glob(pattern):
            if path.is_dir():
                unwanted = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, target / path.name, ignore=unwanted)
            else:
                shutil.copy(path, target)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A minimal Debian with Python and pip."""
    path = tmp_path_factory.mktemp("bare") / "root"
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", path, targets[0]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # How this machine reaches its package index.
    shutil.copy(Path("/") / CERTIFICATES, path / CERTIFICATES)
    for name in ("etc/resolv.conf", "etc/hosts", "etc/pip.conf"):
        if (Path("/") / name).exists():
            shutil.copy(Path("/") / name, path / name)
    # Debian's is 3.11.2; from 3.11.3 on, as in the image, redis does not need it.
    Root(path).run("pip", "install", "--no-cache-dir", "async-timeout")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def root(bare: Path) -> Iterator[Root]:
    yield from copied(bare)


@pytest.fixture
def builder(bare: Path) -> Iterator[Root]:
    yield from copied(bare)


def copied(bare: Path) -> Iterator[Root]:
    """At a short path: that of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="root-") as folder:
        path = Path(folder) / "root"
        subprocess.run(["cp", "-a", "--reflink=auto", bare, path], check=True)
        yield Root(path)


def megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e6


def test_the_sidecars_image_installs_serves_and_stops(root: Root, builder: Root):
    build, final = stages(ROOT / "deploy" / "docker" / "sidecar.Dockerfile")
    builder.build(build, {})
    root.build(final, {build.name: builder})
    assert not (root.path / "source").exists()
    page = (ROOT / "docs" / "deploy.md").read_text()
    (documented_megabytes,) = re.findall(r"it installs (\d+) MB of packages", page)
    assert megabytes(root.path / SITE) == pytest.approx(float(documented_megabytes), rel=0.1)
    steps = dict(final.steps)
    assert (steps["ENTRYPOINT"], steps["CMD"]) == ('["controller"]', '["serve"]')
    place = root.path / "run" / "speculation"
    place.mkdir()
    user, group = map(int, root.user.split(":"))
    os.chown(place, user, group)
    root.environment["CONTROLLER_METRICS_PORT"] = "0"
    command = root.command("controller", "serve")
    with subprocess.Popen(
        command, env=root.environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            socket = place / "controller.sock"
            eventually(socket.exists, timeout_seconds=PATIENCE_SECONDS, description="the socket")
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                answer = health_stub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS, wait_for_ready=True
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert socket.stat().st_uid == user
            assert "no override is in force" in root.run("controller", "override", "list")
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, errors
        finally:
            process.kill()


def test_sglangs_image_gets_shim_and_trainer_and_keeps_every_package(
    root: Root, builder: Root, sglang_environment: Path
):
    build, final = stages(ROOT / "deploy" / "docker" / "sglang.Dockerfile")
    assert final.base == "${SGLANG_IMAGE}"
    (packages,) = (sglang_environment.parents[1] / "lib").glob("python3*/site-packages")
    shutil.copytree(packages, root.path / SITE, dirs_exist_ok=True)

    def there() -> dict[str, str]:
        lines = root.run("pip", "list", "--format=freeze").splitlines()
        return dict(line.split("==") for line in lines)

    before = there()
    assert "sglang" in before
    builder.build(build, {})
    root.build(final, {build.name: builder})
    root.user = "0:0"
    after = there()
    assert before.items() <= after.items()
    added = after.keys() - before.keys()
    assert {"speculation-controller-shim", "speculation-controller-trainer"} <= added
    entry_points_text = root.run(
        "python3", "-c",
        "from importlib.metadata import entry_points\n"
        "print([e.value for e in entry_points(group='sglang.srt.plugins')])",
    )  # fmt: skip
    assert "engine_shim" in entry_points_text

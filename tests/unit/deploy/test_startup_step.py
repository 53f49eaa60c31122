"""The pod's startup step as it is rendered, against a real sidecar, and who may open the socket."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from controller.core.cost.profile import Profile
from controller.util.sockets import operators_path
from tests.support.clockwork_engine import ClockworkEngine
from tests.support.eventually import eventually
from tests.support.service_harness import ENVIRONMENT
from tests.support.sidecar_process import PATIENCE_SECONDS, sidecar_process
from tests.unit.deploy.commands import commands_on_path
from tests.unit.deploy.manifests import containers, pod, variables


class Step:
    """The container's process, with its places moved into a folder."""

    def __init__(self, folder: Path, url: str, *, wait_seconds: int = 60) -> None:
        self._folder = folder
        step = containers("single")["profile"]
        script: str = step["args"][0]
        for place in ("/run/speculation", "/var/lib/speculation"):
            script = script.replace(place, str(folder))
        # Quicker: a measurement of two seconds, and less patience with an engine that is away.
        assert "--wait-seconds 1800 --budget 45" in script
        script = script.replace(
            "--wait-seconds 1800 --budget 45",
            f"--wait-seconds {wait_seconds} --budget 2 --batch-sizes 1,2",
        )
        settled = step["readinessProbe"]["exec"]["command"][-1]
        self.settled = Path(settled.replace("/run/speculation", str(folder)))
        self._command = [*step["command"], script]
        self._environment = (
            ENVIRONMENT
            | variables(step)
            | {"ENGINE_URL": url, "CONTROLLER_ADDRESS": f"unix:{folder}/controller.sock"}
        )

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[bytes]"]:
        bin_ = self._folder / "bin"
        path = commands_on_path(bin_) if not bin_.exists() else f"{bin_}:{os.environ['PATH']}"
        with (
            (self._folder / "step.log").open("ab") as log,
            subprocess.Popen(
                self._command, env=self._environment | {"PATH": path}, stdout=log, stderr=log,
                start_new_session=True,
            ) as process,
        ):  # fmt: skip
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):  # it left no process behind
                    os.killpg(process.pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return (self._folder / "step.log").read_text()

    def wait_until_settled(self) -> None:
        eventually(self.settled.exists, timeout_seconds=PATIENCE_SECONDS, description="settled")


def ended(process: "subprocess.Popen[bytes]") -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE_SECONDS)


def test_it_measures_once_and_rests_and_a_restart_of_it_measures_nothing(tmp_path: Path):
    kept = tmp_path / "profiles"
    with (
        sidecar_process(tmp_path, "--profile-directory", str(kept)) as sidecar,
        ClockworkEngine(sidecar.address) as engine,
    ):
        step = Step(tmp_path, engine.url)
        with step.running() as process:
            step.wait_until_settled()
            (profile,) = kept.glob("*.json")
            assert Profile.from_json(profile.read_text()).cells
            assert process.poll() is None
            assert ended(process) == 0
        steps = len(engine.executed_steps)
        with step.running() as process:
            assert process.poll() is None
            assert ended(process) in {0, -signal.SIGTERM}  # or before it had set its trap
        # The pod is another one: the mark is gone, and the sidecar has the profile.
        step.settled.unlink()
        for measured in (tmp_path / "measured").rglob("*.json"):
            measured.unlink()
        with step.running() as process:
            step.wait_until_settled()
            assert "the profile store has this engine's profile" in step.log
        assert len(engine.executed_steps) == steps


def test_an_engine_that_cannot_be_measured_is_not_held_up(tmp_path: Path):
    step = Step(tmp_path, "http://127.0.0.1:1", wait_seconds=0)
    with step.running() as process:
        step.wait_until_settled()
        assert step.log.count("controller profile: no sidecar") == 3
        assert process.poll() is None


def test_it_stops_at_once_while_it_waits(tmp_path: Path):
    step = Step(tmp_path, "http://127.0.0.1:1")
    with step.running() as process:
        eventually(lambda: "waiting for the sidecar" in step.log, timeout_seconds=PATIENCE_SECONDS)
        assert ended(process) == 0
        assert not step.settled.exists()


CONNECT = """
import os, socket, sys
path, user, own_group, group = sys.argv[1], *map(int, sys.argv[2:])
os.setgroups([group])
os.setgid(own_group)
os.setuid(user)
try:
    socket.socket(socket.AF_UNIX).connect(path)
except PermissionError:
    print("refused")
else:
    print("open")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes other users' places")
@pytest.mark.parametrize("has_fs_group", [True, False])
def test_the_engine_may_open_the_socket_and_not_the_operators_one(
    tmp_path: Path, has_fs_group: bool
):
    spec = pod("single")
    own, group = spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]
    assert spec["securityContext"]["supplementalGroups"] == [group]
    engine = containers("single")["sglang"]["securityContext"]
    place = tmp_path / "run"
    place.mkdir()
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o755)
    # As the kubelet makes an emptyDir of a pod with an fsGroup, or of one without.
    os.chown(place, 0, group if has_fs_group else 0)
    place.chmod(0o2777 if has_fs_group else 0o777)

    def connects(path: Path, user: int, own_group: int) -> bool:
        command = [sys.executable, "-c", CONNECT, str(path), *map(str, (user, own_group, group))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout in {"open\n", "refused\n"}
        return done.stdout == "open\n"

    with sidecar_process(place):
        sock = place / "controller.sock"
        operators = operators_path(sock)
        for path in (sock, operators):
            # The container's own group, which the kernel takes where the folder has none to give.
            own_group = containers("single")["controller"]["securityContext"]["runAsGroup"]
            os.chown(path, own, -1 if has_fs_group else own_group)
        assert sock.stat().st_gid == group
        assert connects(sock, engine["runAsUser"], engine["runAsGroup"])
        assert not connects(operators, engine["runAsUser"], engine["runAsGroup"])
        assert connects(operators, own, spec["securityContext"]["runAsGroup"])

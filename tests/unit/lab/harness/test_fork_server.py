"""Programs that are forked from a process that has imported what they need."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lab.harness.fork_server import ForkedProcess, ForkServer
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[4]
PATIENCE_SECONDS = 60.0
PROGRAM = """
import json, os, sys
import preloaded, found_late
print(json.dumps({
    "name": __name__,
    "argv": sys.argv[1:],
    "variables": {name: os.environ.get(name) for name in ("ASKED", "OWN")},
    "folder": os.getcwd(),
    "preloaded": preloaded.PID,
    "late": found_late.__file__,
    "group": os.getpgid(0),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
}))
sys.exit(int(sys.argv[1]))
"""
MODULES = {
    "preloaded": "import os\nPID = os.getpid()\n",
    "program": PROGRAM,
    "sleeping": "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n",
    "failing": "raise ValueError('it fails')\n",
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def server(modules: Path) -> Iterator[ForkServer]:
    made = ForkServer("preloaded", variables(modules) | {"OWN": "the server's"})
    yield made
    made.close()


def variables(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *folders]))}


def start(
    server: ForkServer, folder: Path, modules: Path, module: str, *arguments: str
) -> tuple[ForkedProcess, Path]:
    """The program and where its output goes."""
    (folder / "late").mkdir(exist_ok=True)
    (folder / "late" / "found_late.py").touch()
    environment = variables(modules, folder / "late") | {"ASKED": "for"}
    log = folder / "log"
    with log.open("wb") as output:
        process = server.start(module, arguments, environment, folder, output.fileno())
    return process, log


def test_a_program_is_as_if_started_by_itself_but_for_its_imports(
    server: ForkServer, modules: Path, tmp_path: Path
) -> None:
    process, log = start(server, tmp_path, modules, "program", "3", "more")
    assert process.wait(PATIENCE_SECONDS) == process.poll() == 3
    found = json.loads(log.read_text())
    assert found["name"] == "__main__"
    assert found["argv"] == ["3", "more"]
    assert found["variables"] == {"ASKED": "for", "OWN": None}
    assert found["folder"] == str(tmp_path)
    assert found["preloaded"] != process.pid
    assert found["late"] == str(tmp_path / "late" / "found_late.py")
    assert found["group"] == process.pid
    # In, out, errors, and the folder that is listed.
    assert len(found["descriptors"]) == 4


def test_a_program_leads_its_session_as_soon_as_its_id_is_known(
    server: ForkServer, modules: Path, tmp_path: Path
) -> None:
    for _ in range(10):
        process, _log = start(server, tmp_path, modules, "sleeping")
        session = os.getsid(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        assert session == process.pid
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_an_exception_is_in_its_output_and_gives_status_1(
    server: ForkServer, modules: Path, tmp_path: Path
) -> None:
    process, log = start(server, tmp_path, modules, "failing")
    assert process.wait(PATIENCE_SECONDS) == 1
    assert "ValueError: it fails" in log.read_text()


def test_a_program_can_be_waited_for_and_killed(
    server: ForkServer, modules: Path, tmp_path: Path
) -> None:
    process, log = start(server, tmp_path, modules, "sleeping")
    eventually(log.read_text, within=PATIENCE_SECONDS, what="it runs")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_programs_end_with_their_server(modules: Path, tmp_path: Path) -> None:
    server = ForkServer("preloaded", variables(modules))
    process, log = start(server, tmp_path, modules, "sleeping")
    eventually(log.read_text, within=PATIENCE_SECONDS, what="it runs")
    server.close()
    eventually(lambda: not psutil.pid_exists(process.pid), within=PATIENCE_SECONDS, what="it ends")
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_what_cannot_be_imported_is_said(modules: Path, tmp_path: Path) -> None:
    server = ForkServer("no_such_module", variables(modules))
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        start(server, tmp_path, modules, "program", "0")
    server.close()

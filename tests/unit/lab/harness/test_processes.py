import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lab.harness.errors import EngineFailedError
from lab.harness.processes import Child, free_port
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[4]


def child(tmp_path: Path, code: str, **environment: str | None) -> Child:
    return Child("the child", [sys.executable, "-c", code], tmp_path / "logs/x.log", environment)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} was never written")


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def test_a_child_that_dies_is_an_error_with_the_end_of_its_log(tmp_path):
    code = "print('first'); print('no such model'); raise SystemExit(3)"
    says = pytest.raises(EngineFailedError, match=r"status 3(?s:.*)no such model")
    with child(tmp_path, code) as dead, says:
        dead.wait_until(lambda: False, timeout_seconds=120)


_WITH_GRANDCHILD = """
import signal, subprocess, sys, time
{before}
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(grandchild.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"])
def test_what_the_child_started_ends_with_it(tmp_path, before):
    with child(tmp_path, _WITH_GRANDCHILD.format(before=before)) as parent:
        grandchild = int(wait_for(parent.log))
        assert is_alive(grandchild)
    deadline = time.monotonic() + 120
    while is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(grandchild)
    assert not is_alive(parent.pid)


def test_a_child_that_does_not_listen_is_made_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.harness.processes._TERM_SECONDS", 0.3)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); time.sleep(60)"
    )
    with child(tmp_path, code) as deaf:
        wait_for(deaf.log)
    assert not is_alive(deaf.pid)


def test_children_end_when_an_error_leaves_the_context(tmp_path):
    with pytest.raises(KeyboardInterrupt), child(tmp_path, "import time; time.sleep(60)") as one:
        raise KeyboardInterrupt
    assert not is_alive(one.pid)


_STOPPED_WHILE_IT_STARTS_A_CHILD = """
import os, signal, subprocess, sys
from pathlib import Path
from lab.harness.processes import Child, end_on_sigterm

def popen(*arguments, **options):
    process = subprocess.Popen(*arguments, **options)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.{signal})
    return process

end_on_sigterm()
with Child("x", [sys.executable, "-c", "import time; time.sleep(60)"], Path({log!r}), popen=popen):
    print("not stopped")
"""


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT"])
def test_a_child_that_was_just_starting_when_its_parent_was_told_to_stop_ends(tmp_path, sent):
    code = _STOPPED_WHILE_IT_STARTS_A_CHILD.format(signal=sent, log=str(tmp_path / "x.log"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "not stopped" not in done.stdout
    assert not is_alive(int(done.stdout))


_PARENT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lab.harness.fork_server import ForkServer
from lab.harness.processes import Child, free_port

def popen(command, *, env, stdout, **options):
    return server.start(command[2], command[3:], env, Path.cwd(), stdout.fileno())

log = Path(sys.argv[1])
if {forked}:
    server = ForkServer("preloaded", {{"PYTHONPATH": {paths!r}}})
    start = lambda: Child("the child", [sys.executable, "-m", "family"], log, popen=popen)
else:
    start = lambda: Child("the child", [sys.executable, "-m", "family"], log)
# A thread that ends while its child runs.
with ThreadPoolExecutor(1) as pool:
    child = pool.submit(start).result()
{then}
"""
_FAMILY = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), grandchild.pid, flush=True)
time.sleep(600)
"""
PATIENCE_SECONDS = 120.0


def family(tmp_path: Path, then: str, *, forked: bool) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A process with a child and a grandchild, and the ids of these two."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "family.py").write_text(_FAMILY)
    (modules / "preloaded.py").touch()
    paths = os.pathsep.join([str(ROOT), str(modules)])
    code = _PARENT.format(forked=forked, paths=paths, then=then)
    log = tmp_path / "family.log"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(log)], env={**os.environ, "PYTHONPATH": paths}
    )
    return parent, [int(word) for word in wait_for(log).split()]


@pytest.mark.parametrize("forked", [False, True])
def test_nothing_outlives_a_parent_that_is_killed(tmp_path, forked):
    parent, pids = family(tmp_path, "time.sleep(600)", forked=forked)
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    eventually(
        lambda: not any(map(is_alive, pids)),
        timeout_seconds=PATIENCE_SECONDS,
        description="both end",
    )


def test_nothing_outlives_a_parent_that_leaves_it_behind(tmp_path):
    parent, pids = family(tmp_path, f"wait = Path({str(tmp_path / 'go')!r})\n"
                          "while not wait.exists(): time.sleep(0.01)", forked=False)  # fmt: skip
    assert all(is_alive(pid) for pid in pids)
    (tmp_path / "go").touch()
    assert parent.wait(PATIENCE_SECONDS) == 0
    eventually(
        lambda: not any(map(is_alive, pids)),
        timeout_seconds=PATIENCE_SECONDS,
        description="both end",
    )


def test_no_port_is_drawn_twice_before_it_is_listened_on():
    state = random.getstate()
    try:
        ports = []
        for _ in range(300):
            random.seed(7)
            ports.append(free_port())
    finally:
        random.setstate(state)
    assert len(set(ports)) == len(ports)

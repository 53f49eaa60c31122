import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from lab.harness.errors import EngineFailedError, HarnessError
from lab.harness.orphan_guard import OrphanGuard
from lab.harness.processes import Child, answers_http, preferred
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


def test_a_child_that_is_never_ready_is_an_error_that_names_the_log(tmp_path):
    code = "import time; print('loading', flush=True); time.sleep(60)"
    with child(tmp_path, code) as slow:
        wait_for(slow.log)
        with pytest.raises(EngineFailedError, match=r"was not ready after 0 s(?s:.*)loading"):
            slow.wait_until(lambda: False, timeout_seconds=0.3)


def test_a_command_that_ends_badly_is_an_error(tmp_path):
    says = pytest.raises(EngineFailedError, match=r"status 1(?s:.*)bad grid")
    with child(tmp_path, "raise SystemExit('bad grid')") as command, says:
        command.wait(120)


def test_a_command_that_takes_too_long_is_an_error(tmp_path):
    says = pytest.raises(EngineFailedError, match="was not done after")
    with child(tmp_path, "import time; time.sleep(60)") as command, says:
        command.wait(0.1)


def test_a_command_that_ends_well_is_waited_for(tmp_path):
    ticks: list[int] = []
    with child(tmp_path, "import time; time.sleep(0.3); print('a'); print('b')") as command:
        command.wait(120, lambda: ticks.append(1))
        assert ticks
        assert command.last_line() == "b"


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


def test_the_environment_is_added_to_and_taken_from(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATION_GAMMAS", "0,3")
    code = "import os; print(os.environ.get('SPECULATION_GAMMAS'), os.environ['NEW'])"
    with child(tmp_path, code, SPECULATION_GAMMAS=None, NEW="here") as command:
        command.wait(120)
        assert command.last_line() == "None here"


def test_http_readiness_is_a_200_and_nothing_else():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert answers_http(f"{url}/health")
        assert not answers_http(f"{url}/starting")
        server.shutdown()
    assert not answers_http(f"{url}/health")


def test_a_stopped_child_may_be_stopped_again(tmp_path):
    one = child(tmp_path, "pass")
    one.stop()
    one.terminate()
    one.stop()
    assert not is_alive(one.pid)


def test_terminate_does_not_wait(tmp_path):
    with child(tmp_path, "import time; print(1, flush=True); time.sleep(60)") as one:
        wait_for(one.log)
        one.terminate()
        with pytest.raises(EngineFailedError, match=f"status {-signal.SIGTERM}"):
            one.wait(120)


def test_a_child_is_preferred_where_the_machine_permits_it(tmp_path):
    with child(tmp_path, "import time; time.sleep(60)") as running:
        before = os.getpriority(os.PRIO_PROCESS, running.pid)
        permitted = running.prefer()
        after = os.getpriority(os.PRIO_PROCESS, running.pid)
    assert after == (-10 if permitted else before)


def test_this_process_is_preferred_for_a_while_only():
    seen = []

    @preferred()
    def fail() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        raise HarnessError("an engine did not start")

    before = os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.raises(HarnessError):
        fail()
    assert seen[0] in {-10, before}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_process_that_has_ended_is_not_preferred(tmp_path):
    with child(tmp_path, "pass") as ended:
        ended.wait(60)
    assert not ended.prefer()


_PARENT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lab.harness.fork_server import ForkServer
from lab.harness.processes import Child

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
    eventually(lambda: not any(map(is_alive, pids)), within=PATIENCE_SECONDS, what="both end")


def test_nothing_outlives_a_parent_that_leaves_it_behind(tmp_path):
    parent, pids = family(tmp_path, f"wait = Path({str(tmp_path / 'go')!r})\n"
                          "while not wait.exists(): time.sleep(0.01)", forked=False)  # fmt: skip
    assert all(is_alive(pid) for pid in pids)
    (tmp_path / "go").touch()
    assert parent.wait(PATIENCE_SECONDS) == 0
    eventually(lambda: not any(map(is_alive, pids)), within=PATIENCE_SECONDS, what="both end")


def test_the_guard_leaves_alone_what_it_was_told_to_forget():
    guard = OrphanGuard()
    sleeps = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
    for one in sleeps:
        guard.watch(one.pid)
    guard.forget(sleeps[1].pid)
    guard.close()
    assert sleeps[0].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert sleeps[1].poll() is None
    sleeps[1].kill()
    sleeps[1].wait()

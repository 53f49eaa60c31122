"""Tests that hang where pytest-timeout cannot help are ended and named."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.hang_guard import HangGuard

ROOT = Path(__file__).parents[3]
CONFTEST = """
from tests.support import hang_guard

hang_guard.GRACE_SECONDS = 2.0


def pytest_configure(config):
    hang_guard.guard(config)
"""
CAUGHT = """
import time

def test_hangs():
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            pass
"""
# The interpreter is held as well, so that no handler of a signal ever runs.
IN_C = """
import ctypes

def test_hangs():
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""
TEARDOWN = """
import time
import pytest

@pytest.fixture
def stuck():
    yield
    while True:
        time.sleep(0.1)

def test_hangs(stuck):
    assert False
"""
FORK = """
import multiprocessing

def test_forks():
    multiprocessing.get_context("fork").Process(target=print).start()
"""
LONG = """
import time
from pathlib import Path

def test_is_long():
    Path("runs").touch() or time.sleep(600)
"""
# Of the process that gives tests to workers: it has heard which one runs.
HEARD = """
from pathlib import Path
import pytest


class Heard:
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logstart(self):
        Path("heard").touch()


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Heard())
"""


def start(
    folder: Path, text: str, *options: str, timeout: int = 60, more: str = ""
) -> subprocess.Popen[str]:
    (folder / "conftest.py").write_text(CONFTEST + more)
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.Popen(
        [*command, "--timeout", str(timeout), "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=120)[0]
    finally:
        process.kill()


@pytest.mark.parametrize("text", [CAUGHT, IN_C, TEARDOWN], ids=["caught", "in C", "teardown"])
def test_a_worker_that_hangs_is_ended_and_its_test_fails_by_name(tmp_path: Path, text: str):
    with start(tmp_path, text, "-n", "1", timeout=1) as process:
        output = end(process)
    assert "Timeout (0:00:0" in output
    assert 'test_it.py", line' in output
    assert "crashed while running 'test_it.py::test_hangs'" in output
    assert process.returncode == 1


def test_without_workers_the_run_ends_with_the_stack(tmp_path: Path):
    with start(tmp_path, CAUGHT, timeout=1) as process:
        output = end(process)
    assert "in test_hangs" in output
    assert process.returncode == 1


def test_a_run_that_is_ended_names_what_ran_and_shows_where(tmp_path: Path):
    with start(tmp_path, LONG, "-n", "1", timeout=600, more=HEARD) as process:
        eventually((tmp_path / "runs").exists, description="the test runs")
        eventually((tmp_path / "heard").exists, description="the run knows that it does")
        process.terminate()
        output = end(process)
    assert " s: test_it.py::test_is_long" in output
    assert 'test_it.py", line 6 in test_is_long' in output
    assert process.returncode == -signal.SIGTERM


def test_a_fork_of_the_tests_process_is_refused(tmp_path: Path):
    with start(tmp_path, FORK) as process:
        output = end(process)
    assert "a test forks its own process" in output
    assert process.returncode == 1


def test_what_cannot_be_collected_is_said_and_ends_nothing(tmp_path: Path):
    ends_late = "\n\ndef pytest_sessionfinish():\n    __import__('time').sleep(2)\n"
    with start(tmp_path, "raise ValueError('no test')", more=ends_late) as process:
        output = end(process)
    assert "ValueError: no test" in output
    assert process.returncode == pytest.ExitCode.INTERRUPTED


def test_this_run_is_guarded(request: pytest.FixtureRequest):
    assert any(isinstance(p, HangGuard) for p in request.config.pluginmanager.get_plugins())

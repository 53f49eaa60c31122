"""Supervision with real processes: small scripts stand where the agent stands."""

import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from engine_shim.link.errors import LinkStartError
from engine_shim.link.supervisor import AgentSupervisor
from tests.support.eventually import eventually

PREAMBLE = """
import os, socket, sys
fd = int(sys.argv[sys.argv.index("--fd") + 1])
peer = socket.socket(fileno=fd)
hello = peer.recv(100)
"""
ECHO = PREAMBLE + "peer.send(hello + b' from %d' % os.getpid()); peer.recv(1)"
STUBBORN = PREAMBLE + "import time; peer.send(b'up'); time.sleep(600)"
DEAD_ON_ARRIVAL = "raise SystemExit(7)"


def supervising(script: str) -> AgentSupervisor:
    return AgentSupervisor((sys.executable, "-c", script), b"hello")


def greeting(peer: socket.socket) -> bytes:
    def read() -> bytes:
        try:
            return peer.recv(100)
        except BlockingIOError:
            return b""

    return eventually(read)


def test_the_first_packet_on_every_new_socket_is_the_introduction():
    supervisor = supervising(ECHO)
    supervisor.start()
    try:
        for _ in range(2):
            peer = eventually(supervisor.take_socket)
            pid = int(greeting(peer).removeprefix(b"hello from "))
            assert pid == supervisor.agent_pid
            assert supervisor.take_socket() is None
            peer.close()  # the script ends; the next one is started
        assert supervisor.starts >= 2
    finally:
        supervisor.stop()


def test_an_agent_that_cannot_be_started_for_any_reason_is_an_error_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(*_: object, **__: object) -> None:
        raise subprocess.SubprocessError("no process can be prepared")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(LinkStartError, match="no process can be prepared"):
        supervising(ECHO).start()


def test_a_killed_agent_is_replaced():
    supervisor = supervising(STUBBORN)
    supervisor.start()
    try:
        with eventually(supervisor.take_socket) as first:
            assert greeting(first) == b"up"
            assert supervisor.agent_pid is not None
            os.kill(supervisor.agent_pid, 9)
            with eventually(supervisor.take_socket) as second:
                assert greeting(second) == b"up"
                assert first.recv(100) == b""
    finally:
        supervisor.stop()


def test_an_agent_that_dies_at_once_is_started_with_growing_pauses_and_leaks_nothing():
    before = psutil.Process().num_fds()
    supervisor = supervising(DEAD_ON_ARRIVAL)
    supervisor.start()
    eventually(lambda: supervisor.starts >= 3)
    supervisor.stop()
    assert supervisor.take_socket() is None
    # On a busy machine the supervisor ends later than it is waited for.
    eventually(lambda: psutil.Process().num_fds() <= before)


def test_a_stubborn_agent_is_killed_on_stop():
    before = set(threading.enumerate())
    supervisor = supervising(STUBBORN)
    supervisor.start()
    with eventually(supervisor.take_socket) as peer:
        assert greeting(peer) == b"up"
    pid = supervisor.agent_pid
    assert pid is not None
    supervisor.stop()
    eventually(lambda: not psutil.pid_exists(pid))
    eventually(lambda: not set(threading.enumerate()) - before)


def test_a_command_that_cannot_be_run_is_refused():
    supervisor = AgentSupervisor(("/nowhere/agent",), b"hello")
    with pytest.raises(LinkStartError, match="/nowhere/agent"):
        supervisor.start()


def test_the_agent_holds_no_descriptor_but_its_own():
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    supervisor = supervising(PREAMBLE + "peer.send(repr(os.listdir('/proc/self/fd')).encode())")
    try:
        supervisor.start()
        with eventually(supervisor.take_socket) as peer:
            # stdin, stdout, stderr, the socket, and the one that lists the folder
            assert len(eval(greeting(peer))) == 5
    finally:
        supervisor.stop()
        os.close(read_end)
        os.close(write_end)


def test_a_fork_waits_for_no_lock_that_the_thread_has_taken_before():
    """The thread is not in the fork, and would never give the lock back."""
    supervisor = supervising(ECHO)
    with supervisor._stopping._cond:  # type: ignore[attr-defined]  # as the thread has it
        giving_up = threading.Thread(target=supervisor.abandon_after_fork, daemon=True)
        giving_up.start()
        giving_up.join(60.0)
        assert not giving_up.is_alive()

"""Ports that nothing else on the machine takes by itself."""

import socket
from pathlib import Path

import pytest

from lab.harness import processes
from lab.harness.processes import free_port


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_a_port_in_use_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(processes, "_PORTS", range(taken - 2, taken + 2))
        assert taken not in {free_port() for _ in range(50)}


def test_none_is_free(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(processes, "_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"no port from {taken} to {taken} is free"):
            free_port()


def test_no_connection_of_the_machine_takes_one():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(processes._PORTS) < lowest

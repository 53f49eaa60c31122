"""Hosts of this machine, by their address."""

import pytest

from controller.util.sockets import is_loopback, is_loopback_host
from tests.support.addresses import ELSEWHERE, LOOPBACK


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_addresses(address: str):
    assert is_loopback(address)
    assert is_loopback_host(address.rpartition(":")[0])


@pytest.mark.parametrize("address", ELSEWHERE)
def test_addresses_that_only_look_like_it(address: str):
    assert not is_loopback(address)


@pytest.mark.parametrize(
    "host", ["", "127.1", "127.evil.example", "[::1", "::1]", "[127.0.0.1]", "::1%lo", "0.0.0.0"]
)
def test_hosts_that_only_look_like_it(host: str):
    assert not is_loopback_host(host)

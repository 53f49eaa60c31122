"""Finds settings whose addresses conflict: the sidecar cannot listen on both."""

import contextlib
import ipaddress
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_IP: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP address to listen on.

    name: the setting that has its port.  host: an address, without brackets, or a name.  port: 0
    means any free port.
    """

    name: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """Returns HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def port_conflicts(listeners: Sequence[Listener]) -> Iterator[tuple[str, str, str]]:
    """Yields (name, name, error text) for listeners with the same port on overlapping hosts.

    Names are not resolved: a name other than localhost may be any address of this machine.
    """
    for first, second in itertools.combinations(listeners, 2):
        if first.port == second.port != 0 and _hosts_overlap(first.host, second.host):
            text = (
                f"{first.name} and {second.name}: both would listen on port {first.port}, on "
                f"{first.address} and {second.address}; change one of them"
            )
            yield first.name, second.name, text


def _hosts_overlap(first_host: str, second_host: str) -> bool:
    first_addresses, second_addresses = _addresses(first_host), _addresses(second_host)
    if not first_addresses or not second_addresses:
        return True
    return any(_accepts_connections_to(a, b) for a in first_addresses for b in second_addresses)


def _addresses(host: str) -> list[_IP]:
    """Returns the host's addresses; [] for a name that would have to be resolved."""
    if host == "localhost":
        return [ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")]
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_address(host)]
    return []


def _accepts_connections_to(listening: _IP, called: _IP) -> bool:
    """Whether a socket on one of them accepts connections to the other."""
    # Sockets on [::] accept IPv4 too, and gRPC's on 0.0.0.0 accept IPv6.
    return listening == called or listening.is_unspecified or called.is_unspecified

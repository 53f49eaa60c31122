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


def clashes(listeners: Sequence[Listener]) -> Iterator[tuple[str, str, str]]:
    """Yields (name, name, error text) for listeners with the same port on overlapping hosts.

    Names are not resolved: a name other than localhost may be any address of this machine.
    """
    for one, other in itertools.combinations(listeners, 2):
        if one.port == other.port != 0 and _overlap(one.host, other.host):
            text = (
                f"{one.name} and {other.name}: both would listen on port {one.port}, on "
                f"{one.address} and {other.address}; change one of them"
            )
            yield one.name, other.name, text


def _overlap(one: str, other: str) -> bool:
    here, there = _addresses(one), _addresses(other)
    if not here or not there:
        return True
    return any(_same(a, b) for a in here for b in there)


def _addresses(host: str) -> list[_IP]:
    """Returns the host's addresses; [] for a name that would have to be resolved."""
    if host == "localhost":
        return [ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")]
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_address(host)]
    return []


def _same(a: _IP, b: _IP) -> bool:
    """Whether a socket on one of them accepts connections to the other."""
    # Sockets on [::] accept IPv4 too, and gRPC's on 0.0.0.0 accept IPv6.
    return a == b or a.is_unspecified or b.is_unspecified

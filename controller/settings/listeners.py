"""Finds addresses of the settings that a sidecar cannot listen at together."""

import contextlib
import ipaddress
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_IP: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP address to listen at.

    name: the setting that has its port.  host: an address, without brackets, or a name.  port: 0
    means any free one.
    """

    name: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def clashes(listeners: Sequence[Listener]) -> Iterator[tuple[str, str, str]]:
    """Yields both names of listeners with one port on overlapping hosts, and an error text.

    No name is resolved: a name other than localhost may be any address of this machine.
    """
    for one, other in itertools.combinations(listeners, 2):
        if one.port == other.port != 0 and _overlap(one.host, other.host):
            text = (
                f"{one.name} and {other.name}: both would listen on port {one.port}, at "
                f"{one.address} and {other.address}; change one of them"
            )
            yield one.name, other.name, text


def _overlap(one: str, other: str) -> bool:
    here, there = _addresses(one), _addresses(other)
    if not here or not there:
        return True
    return any(_same(a, b) for a in here for b in there)


def _addresses(host: str) -> list[_IP]:
    """Returns the host's addresses; none for a name that would have to be resolved."""
    if host == "localhost":
        return [ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")]
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_address(host)]
    return []


def _same(a: _IP, b: _IP) -> bool:
    """Tells whether a socket at one of them accepts connections to the other."""
    # Sockets at [::] take IPv4 as well, and gRPC's at 0.0.0.0 take IPv6.
    return a == b or a.is_unspecified or b.is_unspecified

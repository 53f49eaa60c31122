"""Tells whether traffic to a sidecar's address stays on this machine."""

import ipaddress
import re
from typing import Final

# A bracketed IPv6 address, or a name or an IPv4 address; then the port.
_HOST_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):[0-9]{1,5}")


def is_on_this_machine(address: str) -> bool:
    """Whether an address is a unix socket, or HOST:PORT with `localhost` or a loopback address.

    No other name is resolved.  Other forms that gRPC accepts (dns:///HOST, ipv4:ADDRESS,ADDRESS, or
    ::1:PORT, which it reads as an address without a port) do not count.
    """
    if address.startswith("unix:"):
        return True
    found = _HOST_PORT.fullmatch(address)
    if found is None:
        return False
    six, other = found.groups()
    if other and other.lower() == "localhost":
        return True
    try:
        host = ipaddress.IPv6Address(six) if six else ipaddress.IPv4Address(other)
    except ValueError:
        return False
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped or host).is_loopback

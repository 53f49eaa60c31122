"""Tells whether traffic to a sidecar's address stays on this machine."""

import ipaddress
import re
from typing import Final

# A bracketed IPv6 address, or a name or an IPv4 address; then the port.
_HOST_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):[0-9]{1,5}")


def is_local_address(address: str) -> bool:
    """Whether an address is a unix socket, or HOST:PORT with `localhost` or a loopback address.

    No other name is resolved.  Other forms that gRPC accepts (dns:///HOST, ipv4:ADDRESS,ADDRESS, or
    ::1:PORT, which it reads as an address without a port) do not count.
    """
    if address.startswith("unix:"):
        return True
    address_match = _HOST_PORT.fullmatch(address)
    if address_match is None:
        return False
    ipv6_text, name_or_ipv4 = address_match.groups()
    if name_or_ipv4 and name_or_ipv4.lower() == "localhost":
        return True
    try:
        host = (
            ipaddress.IPv6Address(ipv6_text) if ipv6_text else ipaddress.IPv4Address(name_or_ipv4)
        )
    except ValueError:
        return False
    mapped_ipv4 = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped_ipv4 or host).is_loopback

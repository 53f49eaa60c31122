"""Tells which hosts are this machine's to itself, by address and never by how a name looks."""

import ipaddress
import re

# A bracketed IPv6 address, or a name or an IPv4 address; then the port.
_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):[0-9]{1,5}")


def is_loopback_host(host: str) -> bool:
    """Whether a host is `localhost` or a loopback address; no other name is resolved.

    host: without a port; IPv6 addresses may have brackets.  One with a zone is not loopback.
    """
    if host.lower() == "localhost":
        return True
    try:
        if host.startswith("[") and host.endswith("]"):
            return _is_loopback(ipaddress.IPv6Address(host[1:-1]))
        return _is_loopback(ipaddress.ip_address(host))
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Whether an address is HOST:PORT with a loopback host.

    Other forms that gRPC takes (dns:///HOST, ipv4:ADDRESS,ADDRESS, or ::1:PORT, which it takes for
    an address without a port) are not: what they lead to is not in the text.
    """
    found = _HOST_PORT.fullmatch(address)
    if found is None:
        return False
    six, other = found.groups()
    return is_loopback_host(f"[{six}]" if six else other)


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped.is_loopback
    return address.is_loopback

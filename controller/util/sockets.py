"""Derives the sockets of a sidecar from its address, and explains who may open them.

Loopback hosts are recognized by their address; names other than localhost are not resolved.
"""

import ipaddress
import os
import re
import stat
from pathlib import Path

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/]+):\d{1,5}")
# Other address forms that gRPC accepts.
_SCHEMES = ("unix-abstract:", "dns:", "ipv4:", "ipv6:")
_OPERATORS = "-operators"
# A bracketed IPv6 address, or a name or an IPv4 address; then the port.
_PLAIN_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):[0-9]{1,5}")


def sidecar_address(text: str) -> str:
    """Returns a sidecar's address in gRPC's form; an absolute path is a unix socket.

    Raises ValueError for a text that is not an address.
    """
    if text.startswith("/"):
        return f"unix:{text}"
    if text.startswith("unix:") and socket_path(text) != Path():
        return text
    if text.startswith(_SCHEMES) or _HOST_PORT.fullmatch(text):
        return text
    raise ValueError(f"{text!r} is not an address: it must be unix:PATH, /PATH or HOST:PORT")


def socket_path(address: str) -> Path:
    """Returns the path of a unix: address."""
    return Path(address.removeprefix("unix:").removeprefix("//"))


def permission_denied_reason(address: str) -> str:
    """Explains why this process may not open a sidecar's unix socket, and which user may.

    Returns "" if it may, for other addresses, and if there is no socket.
    """
    if not address.startswith("unix:"):
        return ""
    # The operators' socket may be a symbolic link.
    path = Path(os.path.realpath(socket_path(address)))
    for directory in reversed(path.parents):
        if not directory.exists():
            return ""
        if not os.access(directory, os.X_OK):
            return _denied_text(directory, stat.S_IXUSR)
    if not path.exists() or os.access(path, os.W_OK):
        return ""
    return _denied_text(path, stat.S_IWUSR)


def _denied_text(path: Path, right: int) -> str:
    """Explains a mode.  right: the needed bit of the owner; the group's bit is `right >> 3`."""
    status = path.stat()
    permitted = [f"as uid {status.st_uid}"] if status.st_mode & right else []
    if status.st_mode & (right >> 3):
        permitted.append(f"in group {status.st_gid}")
    fix = (
        f"run this command {' or '.join(permitted)}"
        if permitted
        else "change its mode, which allows no user"
    )
    return (
        f"permission denied: {path} has mode {stat.filemode(status.st_mode)}, uid {status.st_uid} "
        f"and gid {status.st_gid}, and this command runs as uid {os.geteuid()}, gid "
        f"{os.getegid()}; "
        f"{fix}"
    )


def operators_path(path: Path) -> Path:
    """Returns NAME-operators.sock for NAME.sock, and the operators' socket itself unchanged.

    It may be a symbolic link into `operators_directory`, if the sidecar has that setting.
    """
    if path.stem.endswith(_OPERATORS):
        return path
    return path.with_name(f"{path.stem}{_OPERATORS}{path.suffix}")


def operators_address(address: str) -> str:
    """Returns the operators' address: the socket next to the unix socket; on TCP, the same."""
    if not address.startswith("unix:"):
        return address
    return f"unix:{operators_path(socket_path(address))}"


def reading_addresses(address: str) -> tuple[str, ...]:
    """Returns the addresses for calls that only read, in order of preference.

    The operators' socket comes first if this process may open it, because it stays usable while
    other callers exhaust the limits of the engines' socket.
    """
    operators = operators_address(address)
    if operators == address or not os.access(socket_path(operators), os.W_OK):
        return (address,)
    return (operators, address)


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

    Other forms that gRPC accepts (dns:///HOST, ipv4:ADDRESS,ADDRESS, or ::1:PORT, which it reads as
    an address without a port) are not: the text does not say which host they lead to.
    """
    match = _PLAIN_HOST_PORT.fullmatch(address)
    if match is None:
        return False
    ipv6_host, name_or_ipv4 = match.groups()
    return is_loopback_host(f"[{ipv6_host}]" if ipv6_host else name_or_ipv4)


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped.is_loopback
    return address.is_loopback

"""A TCP port for a server that starts some time later."""

import random
import socket

# Below what Linux gives away by itself (32768 and up), and below what SGLang takes (22000 to
# 29999): a port from there can be in use by the time the server wants it.
_PORTS = range(10_000, 20_000)


def free_port() -> int:
    """A port of this host that nobody listens on now, and that is unlikely to be taken soon."""
    for port in random.sample(_PORTS, k=len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")

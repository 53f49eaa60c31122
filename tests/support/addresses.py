"""Addresses of sidecars on this machine, and others that only look like it."""

LOOPBACK = (
    "127.0.0.1:9466", "127.9.8.7:1", "localhost:9466", "LocalHost:1", "[::1]:9466",
    "[::ffff:127.0.0.1]:1",
)  # fmt: skip
ELSEWHERE = (
    "127.evil.example:443", "127.0.0.1.evil.example:1", "localhost.evil.example:1", "127.1:1",
    "evil.localhost:1", "0177.0.0.1:1", "2130706433:1", "0.0.0.0:1", "10.0.0.1:1", "pod:1",
    # gRPC takes the first for an address without a port.
    "::1:443", "[::1]evil:1", "[::1%lo]:1", "[::]:1", "[fe80::1]:1", "[::ffff:10.0.0.1]:1",
    "[127.0.0.1]:1", "unix.evil.example:1", "unix-abstract:x", "dns:///localhost:1",
    "dns://10.0.0.1/localhost:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "ipv6:[::1]:1",
)  # fmt: skip

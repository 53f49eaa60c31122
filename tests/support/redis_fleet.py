"""Real servers as people run them: with users, with TLS and client certificates, as a cluster.

All listen on 127.0.0.1 and ::1, in plain text and with TLS, and have these passwords.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import redis

from lab.harness.processes import free_port
from tests.support.credentials import make_authority
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer

USER, WATCHER = "ctl@fleet", "watch:er"
# By user; "" is the default user.
PASSWORDS = {"": "p@ss:w/r d%41?#é", USER: "s3cret&x=y+z"}
# Of Sentinels that do not have the passwords of Redis.
SENTINEL_PASSWORDS = {"": "0wn/p@ss", WATCHER: "an:other"}
BOTH_FAMILIES = ("--bind", "127.0.0.1", "::1", "--protected-mode", "no")
# A Sentinel of a test never takes a primary for down.
_NEVER_MS = 86_400_000


@dataclass(frozen=True)
class Ports:
    """Where one server listens."""

    plain: int
    tls: int

    @classmethod
    def free(cls) -> Self:
        return cls(free_port(), free_port())


@dataclass(frozen=True)
class Fleet:
    """folder: has ca.pem, localhost.pem and .key, client.pem and .key, both.pem, redis.sock.

    strict: its TLS port wants a client certificate; so does that of the cluster.  sentinels: "open"
    ones, those with the "same" passwords as Redis, and those with their "own".  They watch the
    services `plain`, `tls` and `strict`.
    """

    folder: Path
    main: Ports
    strict: Ports
    cluster: Ports
    sentinels: dict[str, Ports]


def tls_options(folder: Path, port: int, clients: str = "optional") -> tuple[str, ...]:
    """What gives a server a port with TLS.  clients: "no", "optional" or "yes"."""
    return (
        "--tls-port", str(port), "--tls-auth-clients", clients,
        "--tls-cert-file", f"{folder}/localhost.pem", "--tls-key-file", f"{folder}/localhost.key",
        "--tls-ca-cert-file", f"{folder}/ca.pem",
    )  # fmt: skip


def guard(client: redis.Redis, passwords: dict[str, str]) -> None:
    """Gives a server its users; the default one last, which ends the access of unnamed users."""
    for user, password in sorted(passwords.items(), reverse=True):
        client.execute_command(
            "ACL", "SETUSER", user or "default", "on", "resetpass", f">{password}", "~*", "&*",
            "+@all",
        )  # fmt: skip


def sentinel_conf(folder: Path, services: dict[str, int]) -> None:
    """Writes the configuration of a Sentinel: the port of each service's primary."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"dir {folder}"]
    for name, port in services.items():
        lines += [
            f"sentinel monitor {name} 127.0.0.1 {port} 1",
            f"sentinel down-after-milliseconds {name} {_NEVER_MS}",
        ]
    (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    make_authority(folder, ["localhost", "client"], ["127.0.0.1", "::1"])
    key_pair = (folder / "client.pem").read_text() + (folder / "client.key").read_text()
    (folder / "both.pem").write_text(key_pair)
    kinds = ("open", "same", "own")
    servers = Fleet(
        folder, Ports.free(), Ports.free(), Ports.free(), {kind: Ports.free() for kind in kinds}
    )

    def server(name: str, ports: Ports, clients: str, *extra_options: str) -> RedisServer:
        options = (*BOTH_FAMILIES, *tls_options(folder, ports.tls, clients), *extra_options)
        kind = "sentinel" if name.startswith("sentinel") else "server"
        return RedisServer(folder / name, *options, port=ports.plain, kind=kind)

    with contextlib.ExitStack() as stack:
        bus = ("--cluster-port", str(free_port()))
        options = ("--cluster-enabled", "yes", "--tls-cluster", "yes", *bus)
        cluster = stack.enter_context(server("cluster", servers.cluster, "yes", *options))
        with cluster.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        socket = ("--unixsocket", f"{folder}/redis.sock")
        main_server = stack.enter_context(server("one", servers.main, "optional", *socket))
        strict = stack.enter_context(server("strict", servers.strict, "yes"))
        for kind, ports in servers.sentinels.items():
            services = {
                "plain": servers.main.plain,
                "tls": servers.main.tls,
                "strict": servers.strict.tls,
            }
            sentinel_conf(folder / f"sentinel-{kind}", services)
            sentinel = stack.enter_context(server(f"sentinel-{kind}", ports, "optional"))
            with sentinel.client() as client:
                if kind == "same":
                    guard(client, {"": PASSWORDS[USER]})
                    second_password = f">{PASSWORDS['']}"
                    client.execute_command("ACL", "SETUSER", "default", second_password)
                if kind == "own":
                    guard(client, SENTINEL_PASSWORDS)
        state = ("CLUSTER", "INFO")
        with cluster.client() as client:
            eventually(lambda: re.search(r"state\W+ok", str(client.execute_command(*state))))
        for running in (cluster, main_server, strict):
            with running.client() as client:
                guard(client, PASSWORDS)
        yield servers

"""Every way to name a Redis and what opens it, combined pairwise, against real servers."""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from controller.store.redis_access import RedisAccess
from controller.store.redis_client import close, connect
from lab.harness.ports import free_port
from tests.support.redis_fleet import PASSWORDS, SENTINEL_PASSWORDS, USER, WATCHER, Fleet, fleet

# What may be combined; "-" where the form has no such thing.
FACTORS: Mapping[str, tuple[str, ...]] = {
    "form": (
        "redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster",
        "rediss+cluster",
    ),
    "host": ("-", "127.0.0.1", "[::1]", "localhost", "none there,[::1]"),
    "user": ("default", "URL", "query", "setting", "file"),
    "password": ("URL", "query", "setting", "file"),
    "sentinel": ("-", "open", "same", "setting", "file", "query", "user setting", "user file"),
    "ca": ("-", "query", "setting"),
    "certificate": ("-", "none", "query", "settings", "one file"),
    "database": ("-", "unnamed", "path", "query"),
}  # fmt: skip
Row = tuple[str, ...]


def possible(row: Row) -> bool:
    """Whether there is such a combination."""
    way = dict(zip(FACTORS, row, strict=True))
    base, _, kind = way["form"].partition("+")
    tls = base == "rediss"
    # Ports of the cluster with TLS want a certificate.
    certified = way["certificate"] != "none" or kind != "cluster"
    return (
        (way["host"] == "-") == (base == "unix")
        and ("," not in way["host"] or kind != "")
        and (way["sentinel"] != "-") == (kind == "sentinel")
        and (way["ca"] != "-") == (way["certificate"] != "-") == tls
        and certified
        and (way["database"] == "-") == (kind == "cluster")
        and (way["database"] != "path" or base != "unix")
    )


def all_pairs() -> list[Row]:
    """Rows, the fewer the better, that have every pair of values that is possible."""
    chance = random.Random(7)
    columns = list(itertools.combinations(range(len(FACTORS)), 2))
    rows = [row for row in itertools.product(*FACTORS.values()) if possible(row)]
    missing = {(a, row[a], b, row[b]) for row in rows for a, b in columns}
    found: list[Row] = []
    while missing:
        a, one, b, other = min(missing)
        fitting = [row for row in rows if row[a] == one and row[b] == other]
        tried = chance.sample(fitting, min(20, len(fitting)))
        best = max(tried, key=lambda row: sum((a, row[a], b, row[b]) in missing for a, b in columns))
        missing -= {(a, best[a], b, best[b]) for a, b in columns}
        found.append(best)
    return found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@dataclass
class Given:
    """What a user writes: the parts of a URL, and settings."""

    folder: Path
    account: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def give(self, where: str, name: str, option: str, value: str) -> None:
        """Names a value in one place.  name: of the setting.  option: of the query."""
        if where == "URL":
            self.account[option] = value
        elif where == "query":
            self.query[option] = value
        elif where == "setting":
            self.settings[name] = value
        else:
            path = self.folder / name
            path.write_text(f"{value}\n")
            self.settings[f"{name}_file"] = path

    def url(self, form: str, place: str) -> str:
        # In the way of a user: all of it percent-encoded, or a space as a plus sign in the query.
        user, password = (quote(self.account.get(name, ""), "") for name in ("username", "password"))
        before = f"{user}:{password}@" if password else f"{user}@" if user else ""
        query = "&".join(f"{name}={quote_plus(value)}" for name, value in self.query.items())
        return f"{form}://{before}{place}?{query}"


@pytest.mark.parametrize("row", all_pairs(), ids=" ".join)
async def test_a_redis_is_opened_however_it_is_named(servers: Fleet, row: Row, tmp_path: Path):
    way = dict(zip(FACTORS, row, strict=True))
    base, _, kind = way["form"].partition("+")
    given = Given(tmp_path)
    user = "" if way["user"] == "default" else USER
    if user:
        given.give(way["user"], "user", "username", user)
    given.give(way["password"], "password", "password", PASSWORDS[user])
    watcher = give_sentinels(given, way["sentinel"])
    give_certificates(given, servers.folder, way["ca"], way["certificate"])
    if way["database"] == "query":
        given.query["db"] = "3"
    place = where(servers, way) + ("3" if way["database"] == "path" else "")

    client = connect(given.url(way["form"], place), 30.0, access=RedisAccess(**given.settings))
    try:
        assert await client.acl_whoami() == (user or "default")
        await client.set("{x}", "value")
        assert await client.get("{x}") == b"value"
        if kind != "cluster":
            here = 3 if way["database"] in {"path", "query"} else 0
            assert str((await client.client_info())["db"]) == str(here)
        if kind == "sentinel":
            (asked, *_) = client.connection_pool.sentinel_manager.sentinels
            assert await asked.acl_whoami() == (watcher or "default")
    finally:
        await close(client)


def where(servers: Fleet, way: Mapping[str, str]) -> str:
    """Hosts and path, up to the database."""
    base, _, kind = way["form"].partition("+")
    if base == "unix":
        return f"{servers.folder}/redis.sock"
    strict = way["certificate"] not in {"-", "none"}
    ports = servers.cluster if kind == "cluster" else servers.strict if strict else servers.one
    if kind == "sentinel":
        named = way["sentinel"] if way["sentinel"] in {"open", "same"} else "own"
        ports = servers.sentinels[named]
    port = ports.tls if base == "rediss" else ports.plain
    hosts = way["host"].replace("none there", f"127.0.0.1:{free_port()}")
    service = ("strict" if strict else "tls") if base == "rediss" else "plain"
    return f"{hosts}:{port}/" + (f"{service}/" if kind == "sentinel" else "")


def give_sentinels(given: Given, way: str) -> str:
    """Gives the Sentinels' password; returns their user."""
    if way in {"-", "open", "same"}:
        return ""
    watcher = WATCHER if way.startswith("user ") else ""
    source = way.removeprefix("user ")
    given.give(source, "sentinel_password", "sentinel_password", SENTINEL_PASSWORDS[watcher])
    if watcher:
        given.give(source, "sentinel_user", "sentinel_username", watcher)
    return watcher


def give_certificates(given: Given, folder: Path, ca: str, certificate: str) -> None:
    if ca == "query":
        given.query["ssl_ca_certs"] = str(folder / "ca.pem")
    elif ca == "setting":
        given.settings["ca"] = folder / "ca.pem"
    if certificate == "query":
        given.query["ssl_certfile"] = str(folder / "client.pem")
        given.query["ssl_keyfile"] = str(folder / "client.key")
    elif certificate == "settings":
        given.settings["client_certificate"] = folder / "client.pem"
        given.settings["client_key"] = folder / "client.key"
    elif certificate == "one file":
        given.settings["client_certificate"] = folder / "both.pem"

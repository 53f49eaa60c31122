"""Every way to name a Redis and what opens it, combined pairwise, against real servers."""

import asyncio
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from controller.doctor import dependencies
from controller.doctor.dependencies import check_redis
from controller.doctor.finding import Level
from controller.settings.settings import Settings
from controller.store.interface import PROFILES, Actor, StoreUnavailableError
from controller.store.redis_client import close, connect
from controller.store.redis_errors import REDIS_ERRORS, error_text
from controller.store.redis_store import RedisStore
from controller.store.redis_url import RedisAccess
from lab.harness.processes import free_port
from tests.support.credentials import make_authority
from tests.support.redis_fleet import PASSWORDS, SENTINEL_PASSWORDS, USER, WATCHER, Fleet, fleet
from tests.support.store_tasks import run_store_tasks

DOCS = Path(__file__).parents[4] / "docs"
ADMIN = RedisAccess(password=PASSWORDS[""])
NODES = {"target_nodes": "primaries"}
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
    "sentinel_tls": ("-", "as Redis", "yes", "no"),
    "ca": ("-", "query", "setting"),
    "certificate": ("-", "none", "query", "settings", "one file"),
    "database": ("-", "unnamed", "path", "query"),
}  # fmt: skip
Row = tuple[str, ...]


def possible(row: Row) -> bool:
    """Whether there is such a combination."""
    way = dict(zip(FACTORS, row, strict=True))
    base, _, kind = way["form"].partition("+")
    tls = base == "rediss" or way["sentinel_tls"] == "yes"
    # Ports of the cluster with TLS want a certificate.
    certified = way["certificate"] != "none" or kind != "cluster"
    return (
        (way["host"] == "-") == (base == "unix")
        and ("," not in way["host"] or kind != "")
        and (way["sentinel"] != "-") == (way["sentinel_tls"] != "-") == (kind == "sentinel")
        and (way["ca"] != "-") == (way["certificate"] != "-") == tls
        and certified
        and (way["database"] == "-") == (kind == "cluster")
        and (way["database"] != "path" or base != "unix")
    )


def pairs(row: Row) -> set[tuple[int, str, int, str]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


def all_pairs() -> list[Row]:
    """Rows, the fewer the better, that have every pair of values that is possible."""
    chance = random.Random(7)
    rows = [row for row in itertools.product(*FACTORS.values()) if possible(row)]
    missing = set[tuple[int, str, int, str]]().union(*map(pairs, rows))
    chosen_rows: list[Row] = []
    while missing:
        a, one, b, other = min(missing)
        fitting = [row for row in rows if row[a] == one and row[b] == other]
        tried = chance.sample(fitting, min(20, len(fitting)))
        chosen_rows.append(max(tried, key=lambda row: len(missing & pairs(row))))
        missing -= pairs(chosen_rows[-1])
    return chosen_rows


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
        user, password = (
            quote(self.account.get(name, ""), "") for name in ("username", "password")
        )
        before = f"{user}:{password}@" if password else f"{user}@" if user else ""
        query = "&".join(f"{name}={quote_plus(value)}" for name, value in self.query.items())
        return f"{form}://{before}{place}?{query}"


@pytest.mark.parametrize("row", all_pairs(), ids=" ".join)
async def test_a_redis_is_opened_however_it_is_named(servers: Fleet, row: Row, tmp_path: Path):
    way = dict(zip(FACTORS, row, strict=True))
    kind = way["form"].partition("+")[2]
    user_input = Given(tmp_path)
    user = "" if way["user"] == "default" else USER
    if user:
        user_input.give(way["user"], "user", "username", user)
    user_input.give(way["password"], "password", "password", PASSWORDS[user])
    watcher = give_sentinels(user_input, way["sentinel"])
    give_certificates(user_input, servers.folder, way["ca"], way["certificate"])
    if way["sentinel_tls"] in {"yes", "no"}:
        user_input.query["sentinel_tls"] = way["sentinel_tls"]
    if way["database"] == "query":
        user_input.query["db"] = "3"
    place = where(servers, way) + ("3" if way["database"] == "path" else "")

    client = connect(
        user_input.url(way["form"], place), 30.0, access=RedisAccess(**user_input.settings)
    )
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
    ports = servers.cluster if kind == "cluster" else servers.strict if strict else servers.main
    if kind == "sentinel":
        named = way["sentinel"] if way["sentinel"] in {"open", "same"} else "own"
        ports = servers.sentinels[named]
    # Ports of Sentinels, or of Redis.
    asks_with_tls = way["sentinel_tls"] == "yes" or (
        base == "rediss" and way["sentinel_tls"] != "no"
    )
    port = ports.tls if asks_with_tls else ports.plain
    hosts = way["host"].replace("none there", f"127.0.0.1:{free_port()}")
    service = ("strict" if strict else "tls") if base == "rediss" else "plain"
    return f"{hosts}:{port}/" + (f"{service}/" if kind == "sentinel" else "")


def give_sentinels(user_input: Given, way: str) -> str:
    """Gives the Sentinels' password; returns their user."""
    if way in {"-", "open", "same"}:
        return ""
    watcher = WATCHER if way.startswith("user ") else ""
    source = way.removeprefix("user ")
    user_input.give(source, "sentinel_password", "sentinel_password", SENTINEL_PASSWORDS[watcher])
    if watcher:
        user_input.give(source, "sentinel_user", "sentinel_username", watcher)
    return watcher


def give_certificates(user_input: Given, folder: Path, ca: str, certificate: str) -> None:
    if ca == "query":
        user_input.query["ssl_ca_certs"] = str(folder / "ca.pem")
    elif ca == "setting":
        user_input.settings["ca"] = folder / "ca.pem"
    if certificate == "query":
        user_input.query["ssl_certfile"] = str(folder / "client.pem")
        user_input.query["ssl_keyfile"] = str(folder / "client.key")
    elif certificate == "settings":
        user_input.settings["client_certificate"] = folder / "client.pem"
        user_input.settings["client_key"] = folder / "client.key"
    elif certificate == "one file":
        user_input.settings["client_certificate"] = folder / "both.pem"


@dataclass(frozen=True)
class Failing:
    """A Redis that cannot be used.

    url: with ONE, TLS, STRICT, NOBODY, SENTINEL and SENTINEL_TLS for ports, and SECRET and
    SENTINEL_SECRET for passwords; settings also with FOLDER.
    message: in its words.  advice: a setting that its words name.
    """

    name: str
    url: str
    message: str
    advice: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@pytest.fixture
def patient_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its few seconds may end before the reason has come."""
    monkeypatch.setattr(dependencies, "_ANSWER_SECONDS", 60.0)


CA = {"ca": Path("FOLDER/ca.pem")}
FAILING = (
    Failing("no password", "redis://127.0.0.1:ONE", "NOAUTH", "redis_password"),
    Failing("wrong password", "redis://:hunter2@127.0.0.1:ONE", "WRONGPASS", "redis_password"),
    Failing("wrong user", "redis://ann:SECRET@127.0.0.1:ONE", "WRONGPASS", "redis_user"),
    Failing("nobody", "redis://127.0.0.1:NOBODY", "Connection refused", "redis_url"),
    Failing("no such name", "redis://no-such-name.invalid", "cannot be reached", "redis_url"),
    Failing("no database", "redis://:SECRET@127.0.0.1:ONE/99", "out of range", "redis_url"),
    Failing("TLS there", "redis://127.0.0.1:TLS", "closed the connection", "TLS"),
    Failing("another authority", "rediss://127.0.0.1:TLS", "not trusted", "redis_ca"),
    Failing(
        "no certificate", "rediss://127.0.0.1:STRICT", "a client certificate",
        "redis_client_certificate", CA,
    ),
    Failing("no CA file", "rediss://127.0.0.1:TLS", "CA file /no/ca.pem: No such file", "CA file",
            {"ca": Path("/no/ca.pem")}),
    Failing("not a CA file", "rediss://127.0.0.1:TLS", "it contains no certificate", "CA file",
            {"ca": Path("FOLDER/client.key")}),
    Failing("no CA folder", "rediss://127.0.0.1:TLS?ssl_ca_path=%2Fno", "no such folder",
            "ssl_ca_path"),
    Failing("certificate without its key", "rediss://127.0.0.1:TLS", "it contains no private key",
            "redis_client_key", {"client_certificate": Path("FOLDER/client.pem")}),
    Failing("another's key", "rediss://127.0.0.1:TLS", "key values mismatch", "TLS files",
            {"client_certificate": Path("FOLDER/client.pem"),
             "client_key": Path("FOLDER/localhost.key")}),
    Failing("no password file", "redis://127.0.0.1:ONE", "password file /no/pw: No such file",
            "password file", {"password_file": Path("/no/pw")}),
    Failing("no cluster", "redis+cluster://:SECRET@127.0.0.1:ONE", "is not a cluster",
            "redis_url"),
    Failing("a Sentinel", "redis://:SENTINEL_SECRET@127.0.0.1:SENTINEL", "unknown command",
            "redis+sentinel"),
    Failing("no Sentinel", "redis+sentinel://:SECRET@127.0.0.1:ONE/plain", "is not a Sentinel",
            "redis_url"),
    Failing("Sentinel without its password", "redis+sentinel://127.0.0.1:SENTINEL/plain",
            "NOAUTH", "redis_sentinel_password"),
    Failing("Sentinel with another one", "redis+sentinel://:SECRET@127.0.0.1:SENTINEL/plain",
            "WRONGPASS", "redis_sentinel_password"),
    Failing("no such service", "redis+sentinel://127.0.0.1:SENTINEL/other",
            "watches plain, strict, tls, not 'other'", "redis_url",
            {"sentinel_password": "SENTINEL_SECRET"}),
    Failing("Sentinel of another authority", "rediss+sentinel://127.0.0.1:SENTINEL_TLS/tls",
            "not trusted", "redis_ca"),
    Failing("the primary's password behind Sentinel", "redis+sentinel://127.0.0.1:SENTINEL/plain",
            "NOAUTH", "redis_password", {"sentinel_password": "SENTINEL_SECRET"}),
)  # fmt: skip


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.name)
async def test_a_redis_that_fails_is_told_in_words_with_what_to_do(
    servers: Fleet, case: Failing, patient_doctor: None
):
    own = servers.sentinels["own"]
    values = {
        "SENTINEL_SECRET": SENTINEL_PASSWORDS[""], "SENTINEL_TLS": own.tls, "SENTINEL": own.plain,
        "SECRET": PASSWORDS[""], "FOLDER": servers.folder, "ONE": servers.main.plain,
        "TLS": servers.main.tls, "STRICT": servers.strict.tls, "NOBODY": free_port(),
    }  # fmt: skip

    def filled(text: str, quoted: Any) -> str:
        for name, value in values.items():
            text = text.replace(name, quoted(str(value)))
        return text

    settings = {name: type(value)(filled(str(value), str)) for name, value in case.settings.items()}
    url = filled(case.url, lambda text: quote(text, "/" if text.startswith("/") else ""))
    with capture_logs() as lines:
        store = RedisStore(url, timeout_seconds=30.0, access=RedisAccess(**settings))
        await store.open(lambda: None)
        await store.close()
    (line,) = [line for line in lines if line["event"] == "store_away"]
    for words in (line["error"], store.health.detail):
        assert case.message in words
        assert case.advice in words
        assert not any(secret in words for secret in (*PASSWORDS.values(), "hunter2"))
        assert "redis.asyncio" not in words
        assert "Error(" not in words
    settings = {f"redis_{name}": value for name, value in settings.items()}
    finding = await check_redis(Settings(redis_url=SecretStr(url), **settings))
    assert finding.level is Level.FAIL
    for words in (case.message, case.advice):
        assert words in f"{finding.state} {finding.fix}"


@pytest.mark.parametrize(
    "form", ["{}", "{}\n", "{}\r\n", "\ufeff{}\r\n"], ids=["bare", "line", "Windows", "mark"]
)
async def test_a_password_file_is_read_however_it_was_written(
    servers: Fleet, tmp_path: Path, form: str
):
    path = tmp_path / "password"
    path.write_text(form.format(PASSWORDS[""]), newline="")
    url = f"redis://127.0.0.1:{servers.main.plain}"
    client = connect(url, 30.0, access=RedisAccess(password_file=path))
    try:
        assert await client.ping()
    finally:
        await close(client)


async def test_line_breaks_at_the_end_of_a_setting_are_no_part_of_it(
    servers: Fleet, patient_doctor: None
):
    """As `echo PASSWORD | base64` puts one into a Secret, or `|` into YAML."""
    url = SecretStr(f"redis://127.0.0.1:{servers.main.plain}")
    password = SecretStr(f"{PASSWORDS[USER]}\n")
    check_result = await check_redis(
        Settings(redis_url=url, redis_user=f"{USER}\r\n", redis_password=password)
    )
    assert check_result.level is not Level.FAIL, check_result


async def test_a_pool_that_is_too_small_is_named(servers: Fleet):
    client = connect(
        f"redis://127.0.0.1:{servers.main.plain}?max_connections=2", 30.0, access=ADMIN
    )
    try:
        answers = await asyncio.gather(
            *(client.blpop("none", timeout=1) for _ in range(3)), return_exceptions=True
        )
        (refused,) = [answer for answer in answers if isinstance(answer, Exception)]
        assert "raise max_connections" in error_text(refused, str)
    finally:
        await close(client)


async def test_certificates_that_are_replaced_are_used_by_the_next_connection(
    servers: Fleet, tmp_path: Path
):
    ca, certificate = tmp_path / "ca.pem", tmp_path / "both.pem"
    make_authority(tmp_path / "other", ["client"])
    ca.write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    other = [(tmp_path / "other" / name).read_bytes() for name in ("client.pem", "client.key")]
    certificate.write_bytes(b"".join(other))
    access = RedisAccess(ca=ca, client_certificate=certificate, password=PASSWORDS[""])
    client = connect(f"rediss://127.0.0.1:{servers.strict.tls}", 30.0, access=access)
    try:
        with pytest.raises(REDIS_ERRORS, match="CERTIFICATE_VERIFY_FAILED"):
            await client.ping()
        ca.write_bytes((servers.folder / "ca.pem").read_bytes())
        with pytest.raises(REDIS_ERRORS) as refused:
            await client.ping()
        assert "client certificate" in error_text(refused.value, str)
        certificate.write_bytes((servers.folder / "both.pem").read_bytes())
        assert await client.ping()
    finally:
        await close(client)


@pytest.mark.parametrize("form", ["redis", "redis+cluster"])
async def test_the_rights_in_the_document_suffice(servers: Fleet, form: str):
    ports = servers.cluster if "cluster" in form else servers.main
    (rights,) = re.findall(r"`(~\{speculation:1\}.*?)`", (DOCS / "fleet.md").read_text())
    admin = connect(f"{form}://127.0.0.1:{ports.plain}", 30.0, access=ADMIN)
    command = ("ACL", "SETUSER", "few", "reset", "on", ">x", *rights.split())
    await admin.execute_command(*command, **NODES if "cluster" in form else {})
    store = RedisStore(f"{form}://few:x@127.0.0.1:{ports.plain}", timeout_seconds=30.0)
    heard = asyncio.Event()
    await store.open(heard.set)
    try:
        async with run_store_tasks(store), asyncio.timeout(120):
            await heard.wait()
            ann = Actor("ann", "because", "uid 1000")
            await store.write("a", "1", 100.0, 0, ann)
            assert [entry.override_id for entry in await store.entries()] == ["a"]
            assert await store.audit(5)
            await store.blobs.put(PROFILES, "aa", "01", "x")
            assert await store.blobs.names(PROFILES)
            assert await store.blobs.items(PROFILES, "aa")
            await store.summaries.put("ab", b"x")
            assert (await store.summaries.read()).summaries
            assert store.health.ok
            with pytest.raises(StoreUnavailableError, match="NOPERM"):
                await store._ask(lambda: store._client.get("other"), lambda reply: reply)
    finally:
        await store.close()
        await close(admin)

"""What an earlier version stored is read without loss, and what a newer one stored is not spoiled.

The content below is written out as version 1 of each format has it, not by the code under test: a
change that can no longer read it needs a new format number and an upgrade.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from controller.core.cost.profile import Profile
from controller.core.errors import InvalidProfileError
from controller.core.planning.overrides import InvalidOverrideError, Rule
from controller.service.net.access import AccessFileError, AccessList
from controller.store.file_store import FileStore
from controller.store.interface import Actor, StoreBrokenError
from controller.store.redis_store import RedisStore
from controller.wire.overrides import override_from_json, override_to_json
from tests.support.redis_server import RedisServer
from tests.unit.controller.core.cost.small_profile import PROFILE

ANN = Actor("ann", "because", "uid 1000")
BODY = (
    '{"author":"ann","overrideId":"slow","reason":"why","rule":{"gammaMax":2},'
    '"scope":{"fleet":true}}'
)
FORMAT_1 = """
CREATE TABLE entries (
  override_id TEXT PRIMARY KEY, revision INTEGER NOT NULL, body TEXT NOT NULL, until REAL,
  created_at REAL NOT NULL, ended TEXT NOT NULL, checksum TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE audit (
  sequence INTEGER PRIMARY KEY, at REAL NOT NULL, action TEXT NOT NULL, subject TEXT NOT NULL,
  author TEXT NOT NULL, reason TEXT NOT NULL, origin TEXT NOT NULL, before TEXT NOT NULL,
  after TEXT NOT NULL
) STRICT;
CREATE INDEX audit_of_subject ON audit (subject, sequence);
PRAGMA application_id = 0x53504543;
PRAGMA user_version = 1;
"""
# The digest of ["slow", 7, BODY, null, 1700000000.5, ""].
CHECKSUM = "eb34c046b5f7182b"


def format_1(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(FORMAT_1)
        connection.execute(
            "INSERT INTO entries VALUES ('slow', 7, ?, NULL, 1700000000.5, '', ?)", (BODY, CHECKSUM)
        )
        connection.execute(
            "INSERT INTO audit "
            "VALUES (7, 1700000000.5, 'set', 'slow', 'ann', 'why', 'uid 1', '', ?)",
            (BODY,),
        )
        connection.commit()


async def test_a_database_of_format_1_keeps_its_overrides_and_its_audit(tmp_path: Path):
    format_1(tmp_path / "overrides.db")
    store = FileStore(tmp_path)
    await store.open(lambda: None)
    try:
        [entry] = await store.entries()
        assert (entry.override_id, entry.revision, entry.body) == ("slow", 7, BODY)
        assert entry.remaining_seconds is None
        [record] = await store.audit(10)
        assert (record.sequence, record.author, record.after) == ("7", "ann", BODY)
        assert override_from_json(entry.body).rule.gamma_max == 2
        assert (await store.write("slow", "{}", None, 7, ANN)).revision == 8
    finally:
        await store.close()


async def test_a_database_of_a_newer_format_is_refused_and_left_as_it_is(tmp_path: Path):
    path = tmp_path / "overrides.db"
    format_1(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 2")
    before = path.read_bytes()
    with pytest.raises(StoreBrokenError, match=r"format 2.*install the newer version"):
        await FileStore(tmp_path).open(lambda: None)
    assert path.read_bytes() == before


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


async def test_redis_keys_of_layout_1_are_found_again_with_fields_of_a_newer_version(
    server: RedisServer,
):
    tag = "{speculation:1}"
    entry: dict[str, Any] = {"revision": 7, "body": BODY, "created": 1.0, "ended": ""}
    with server.client() as client:
        fill(client, tag, entry | {"of_a_newer_version": [1]})
        # Another layout of keys, as another version would have it.
        client.set("{speculation:2}:revision", "text")
        store = RedisStore(server.url, timeout_seconds=2)
        await store.open(lambda: None)
        try:
            [stored_entry] = await store.entries()
            assert (stored_entry.override_id, stored_entry.revision, stored_entry.body) == (
                "slow",
                7,
                BODY,
            )
            assert (await store.write("slow", "{}", None, 7, ANN)).revision == 8
        finally:
            await store.close()
        assert client.get("{speculation:2}:revision") == "text"


def fill(client: redis.Redis, tag: str, entry: dict[str, Any]) -> None:
    client.set(f"{tag}:revision", 7)
    client.set(f"{tag}:entry:slow", json.dumps(entry))
    client.zadd(f"{tag}:live", {"slow": "inf"})


def test_an_override_without_a_bound_is_written_as_versions_before_bounds_wrote_it():
    override = override_from_json(BODY)
    assert override.rule.tpot_max_seconds is None
    assert override_to_json(override) == BODY


def test_a_bound_is_stored_to_the_last_bit():
    override = replace(override_from_json(BODY), rule=Rule(tpot_max_seconds=0.1 / 7))
    assert '"tpotMaxSeconds":' in override_to_json(override)
    assert override_from_json(override_to_json(override)) == override


def test_an_override_with_a_rule_of_a_newer_version_is_refused_by_the_name_of_the_rule():
    newer = BODY.replace('"gammaMax":2', '"gammaMax":2,"gammaMost":3')
    with pytest.raises(InvalidOverrideError, match="gammaMost"):
        override_from_json(newer)


@pytest.mark.parametrize(
    "change",
    [{"format": "speculation-profile/2"}, {"of_a_newer_version": 1}],
    ids=["format", "field"],
)
def test_a_profile_of_a_newer_version_is_refused_by_what_is_newer(change: dict[str, Any]):
    text = json.dumps(json.loads(PROFILE.to_json()) | change)
    newer = change.get("format", "of_a_newer_version")
    with pytest.raises(InvalidProfileError, match=newer):
        Profile.from_json(text)


def test_an_access_list_with_a_right_of_a_newer_version_is_refused_as_a_whole(tmp_path: Path):
    path = tmp_path / "access"
    path.write_text("read uid:1000 ann\n")
    identity = AccessList(path).find("uid:1000")
    assert identity is not None
    assert identity.name == "ann"
    path.write_text("read uid:1000 ann\nread,newer uid:1001 ben\n")
    with pytest.raises(AccessFileError, match="line 2: rights are read, steer"):
        AccessList(path)

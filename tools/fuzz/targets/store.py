"""The files that the override store reads: database, mirror, shelf."""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from controller.core.clock import VirtualClock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import EngineSpec
from controller.core.errors import SpeculationError
from controller.core.planning.overrides import Rule
from controller.service.rpc.overrides import held_override_to_proto
from controller.service.rpc.store_messages import audit_to_proto
from controller.service.sessions.registry import SessionRegistry
from controller.service.state.override_registry import OverrideRegistry
from controller.service.state.profile_registry import ProfileRegistry
from controller.service.views.fleet_filter import engine_values
from controller.service.views.fleet_summary import EngineSummary, decode_summary, encode_summary
from controller.service.views.fleet_view import FleetEngine, totals_of
from controller.store.file_store import FileBlobStore, FileStore
from controller.store.interface import Actor, BlobKind
from controller.store.redis_mirror import RedisMirror
from controller.wire.overrides import override_to_json
from speculation.v1 import service_pb2
from tests.support import recorded_events
from tests.support.service_harness import make_profile
from tools.fuzz.mutation import mutate_bytes, mutate_json
from tools.fuzz.target import Feed, Target, folder_reader, refusing

_SHELVED = "profiles/name/source.json"


@contextmanager
def _database_opened(folder: Path) -> Iterator[Feed]:
    def feed(data: bytes) -> None:
        _clean(folder)
        (folder / "overrides.db").write_bytes(data)
        asyncio.run(_ask_store(folder))

    yield feed


def _clean(folder: Path) -> None:
    for path in folder.glob("overrides.*"):
        path.unlink()


async def _ask_store(folder: Path) -> None:
    """Opened, and asked all that one can ask."""
    registry = SessionRegistry(_no_core, ProfileRegistry(), VirtualClock())
    override_registry = OverrideRegistry(FileStore(folder), registry)
    await override_registry.open()
    try:
        for held_override in override_registry.list_active():
            held_override_to_proto(held_override)
        for record in await override_registry.audit(1000, "", ""):
            audit_to_proto(record)
    finally:
        await override_registry.close()


def _no_core(spec: EngineSpec, profile: Profile | None) -> EngineController:
    raise AssertionError("no engine is introduced here")


async def _written_database(folder: Path) -> bytes:
    store = FileStore(folder)
    await store.open(lambda: None)
    author = Actor("ann", "because", "uid 0")
    body = _body("pin-1")
    first = await store.write("pin-1", body, None, 0, author)
    await store.write("pin-1", body, 3600.0, first.revision, author)
    await store.write("pin-2", _body("pin-2"), 3600.0, 0, author)
    await store.clear("pin-2", 3, author)
    await store.close()
    return (folder / "overrides.db").read_bytes()


def _body(name: str) -> str:
    return override_to_json(recorded_events.override(name, Rule(gamma=2)))


def _database_seeds() -> Sequence[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [asyncio.run(_written_database(Path(folder)))]


def _mirror_seeds() -> Sequence[bytes]:
    entry = {
        "id": "pin-1", "revision": 3, "body": _body("pin-1"),
        "created": 1.9e9, "ended": "", "ms": -1,
    }  # fmt: skip
    return [json.dumps({"at": 1.9e9, "entries": [entry, entry | {"id": "b", "ms": 9e12}]}).encode()]


@contextmanager
def _mirror_opened(folder: Path) -> Iterator[Feed]:
    path = folder / "mirror"

    def feed(data: bytes) -> None:
        path.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        entries, _ = RedisMirror(path).read()
        for held_entry in entries.values():
            held_entry.to_entry(0.0)
            held_entry.to_seed(0.0)

    yield feed


def _shelf(folder: Path) -> Callable[[], None]:
    """An empty shelf, and what reads it."""
    blobs = FileBlobStore(folder)
    (folder / _SHELVED).parent.mkdir(parents=True)

    def read() -> None:
        for item in asyncio.run(blobs.items(BlobKind("profiles", 8, None), "name")):
            Profile.from_json(item.text)

    return read


def _shelf_seeds() -> Sequence[bytes]:
    return [json.dumps({"at": 1.9e9, "text": make_profile().to_json()}).encode()]


def _read_summary(data: bytes) -> None:
    head, engines, _ = decode_summary(data)
    fleet_engines = [FleetEngine(head.sidecar, "ab", engine, 1.0) for engine in engines]
    for engine in fleet_engines:
        row = service_pb2.FleetEngine(**engine_values(engine))
        row.SerializeToString()
    totals_of(fleet_engines)


def _summary_seeds() -> Sequence[bytes]:
    engine = EngineSummary(
        "engine-0", "target", 8, "mtp", 3, "steered", "exploit", 0.5, 2.5, 300.0, 1.5, ("night",),
        2, "", 300.0,
    )  # fmt: skip
    return [
        encode_summary("pod", "1.0", 5.0, [engine, replace(engine, engine_id="b", overrides=())])
    ]


_ERRORS = (SpeculationError,)

TARGETS = (
    Target("store.database", _database_seeds, mutate_bytes, _database_opened, _ERRORS),
    Target("store.mirror", _mirror_seeds, mutate_json, _mirror_opened),
    refusing("store.summary", _summary_seeds, _read_summary, mutate_json, ValueError),
    Target("store.shelf", _shelf_seeds, mutate_json, folder_reader(_SHELVED, _shelf), _ERRORS),
)

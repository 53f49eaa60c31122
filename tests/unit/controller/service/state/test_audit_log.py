"""The audit of identities holds when ids change hands as fast as they can."""

import asyncio
from pathlib import Path

from controller.core.clock import VirtualClock
from controller.service.sessions.engine_identity import EngineIdentity
from controller.service.state.audit_log import AuditLog
from controller.store.file_store import FileStore
from controller.store.interface import AuditRecord
from controller.util.tasks import Supervisor
from tests.support.service_harness import PATIENCE_SECONDS
from tests.unit.controller.service.sessions.small_registry import ANYBODY, registry, spec

REPLACED = 1000


def replace(plan_log: AuditLog, times: int) -> None:
    """One engine id changes hands `times` times, each time after a silence."""
    clock = VirtualClock()
    sessions = registry(clock)
    before = sessions.introduce(spec(), EngineIdentity.from_caller(ANYBODY, "0"))
    for number in range(1, times + 1):
        clock.advance(10.0)
        session = sessions.introduce(spec(), EngineIdentity.from_caller(ANYBODY, str(number)))
        plan_log.record_replaced_session(session, before)
        before = session


async def records(store: FileStore) -> list[AuditRecord]:
    return list(await store.audit(2 * REPLACED))


async def test_few_replaced_sessions_have_a_record_each(tmp_path: Path):
    store = FileStore(tmp_path)
    await store.open(lambda: None)
    plan_log = AuditLog(store)
    replace(plan_log, 3)
    await plan_log.close()
    assert [record.action for record in await records(store)] == ["replace_session"] * 3
    assert {record.reason for record in await records(store)} == {
        "the previous session was silent for 10 s"
    }
    await store.close()


async def test_a_flood_of_replaced_sessions_is_counted_in_one_record(tmp_path: Path):
    store = FileStore(tmp_path)
    await store.open(lambda: None)
    plan_log = AuditLog(store, count_seconds=0.01)
    supervisor = Supervisor()
    supervisor.run("audit_counts", plan_log.record_counts)
    replace(plan_log, REPLACED)

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any("were replaced" in record.reason for record in await records(store)):  # noqa: ASYNC110  # a file
            await asyncio.sleep(0.005)
    audit_records = await records(store)
    assert len(audit_records) < 100
    count = int(audit_records[0].reason.split()[0])
    assert len(audit_records) - 1 + count == REPLACED
    await supervisor.stop()
    await plan_log.close()
    assert len(await records(store)) == len(audit_records)
    await store.close()


async def test_what_was_counted_is_told_at_the_end(tmp_path: Path):
    store = FileStore(tmp_path)
    await store.open(lambda: None)
    plan_log = AuditLog(store)
    replace(plan_log, REPLACED)
    await plan_log.close()
    audit_records = await records(store)
    assert len(audit_records) - 1 + int(audit_records[0].reason.split()[0]) == REPLACED
    await store.close()

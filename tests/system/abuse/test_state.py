"""The state directory under attack: floods of audit queries beside a long audit."""

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.store.database import Database, StoredEntry
from controller.util.sockets import operators_path
from controller.wire.overrides import override_to_json
from speculation.v1 import policy_pb2, policy_pb2_grpc
from tests.support.service_harness import PATIENCE_SECONDS
from tests.support.sidecar_process import controller, sidecar_process
from tests.system.abuse.conftest import MEMORY_BYTES

RECORDS = 40_000
FLOOD = 100


def long_audit(folder: Path) -> None:
    """Overrides that were set and cleared, with the longest reasons that are allowed."""
    folder.mkdir()
    rule = Rule(gamma=3)
    body = override_to_json(Override("x", Scope(ScopeKind.FLEET), rule, "a" * 100, "r" * 500))
    now = time.time()
    database = Database(folder / "overrides.db")
    # The traces of the newest are still there.
    database.replace(
        [
            StoredEntry(f"o{number}", number, "", now + 9e5, now, "cleared")
            for number in range(1, 1000)
        ]
    )
    database.close()
    records = (
        (number, now, "clear", f"o{number // 2}", "a" * 100, "r" * 500, "uid 0", body, "")
        if number % 2 == 0
        else (number, now, "set", f"o{number // 2 + 1}", "a" * 100, "r" * 500, "uid 0", "", body)
        for number in range(1, RECORDS + 1)
    )
    with closing(sqlite3.connect(folder / "overrides.db")) as connection:
        connection.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", records)
        connection.commit()


async def flood(address: str, stop: threading.Event, answers: dict[Any, int]) -> None:
    """Clients of the engines' socket ask for the longest page, again and again."""
    async with grpc.aio.insecure_channel(address) as channel:
        query = policy_pb2_grpc.PolicyServiceStub(channel).QueryAudit

        async def ask() -> None:
            while not stop.is_set():
                try:
                    await query(policy_pb2.QueryAuditRequest(limit=1000), timeout=PATIENCE_SECONDS)
                    code = grpc.StatusCode.OK
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                    await asyncio.sleep(0.01)
                answers[code] = answers.get(code, 0) + 1

        await asyncio.gather(*(ask() for _ in range(FLOOD)))


@pytest.mark.timeout(180)
def test_queries_of_a_long_audit_delay_no_override_and_take_bounded_memory(tmp_path: Path):
    long_audit(tmp_path / "controller.sock.state")
    stop, answers = threading.Event(), dict[Any, int]()
    with sidecar_process(tmp_path, log=tmp_path / "log") as sidecar:
        process = psutil.Process(sidecar.process.pid)
        peace = process.memory_info().rss
        flooding = threading.Thread(
            target=lambda: asyncio.run(flood(sidecar.address, stop, answers))
        )
        flooding.start()
        operators = operators_path(Path(sidecar.address.removeprefix("unix:")))
        try:
            with grpc.insecure_channel(f"unix:{operators}") as channel:
                stub = policy_pb2_grpc.PolicyServiceStub(channel)
                most = 0
                for number in range(20):
                    stub.SetOverride(request(f"op-{number}"), timeout=PATIENCE_SECONDS)
                    most = max(most, process.memory_info().rss)
                while answers.get(grpc.StatusCode.OK, 0) < FLOOD:
                    most = max(most, process.memory_info().rss)
                    time.sleep(0.05)
        finally:
            stop.set()
            flooding.join()
        # Its pages are short, and the command line asks for as many as it takes.
        log = controller(
            "override", "log", "--limit", "1000", "-o", "name", "--address", sidecar.address
        )
        assert len(log.stdout.splitlines()) == 1000, log.stderr
    assert set(answers) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert most - peace < MEMORY_BYTES


def request(name: str) -> policy_pb2.SetOverrideRequest:
    return policy_pb2.SetOverrideRequest(
        override=policy_pb2.Override(
            override_id=name,
            scope=policy_pb2.Scope(engine_id="pod-7"),
            rule=policy_pb2.OverrideRule(gamma=1),
            author="ann",
            reason="beside a flood",
        )
    )

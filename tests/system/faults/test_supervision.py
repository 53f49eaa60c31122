"""No long-lived task of a sidecar ends unseen: each of them is killed while the sidecar serves."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from grpc_health.v1 import health_pb2

import controller
import engine_shim
from controller.service.metrics.sidecar import SIDECAR_FAMILIES, SidecarSnapshot
from controller.service.views.readiness import STORE
from controller.util.tasks import Supervisor
from lab.harness.processes import free_port
from tests.support import override_calls
from tests.support.redis_server import RedisServer
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    RunningSidecar,
    health_stub,
    render_family,
    running_sidecar,
    wait_until,
    with_timeout,
)

# Tasks of one call or one connection, which end with it: whoever awaits them sees how.
SHORT_LIVED = {
    "controller/profiling/engine_http.py",
    "controller/profiling/sidecar.py",
    "controller/service/net/unix_sockets.py",
    "controller/service/rpc/request_ids.py",
    "controller/service/rpc/streams.py",
    "controller/store/file_store.py",
    "engine_shim/link/agent.py",
    "engine_shim/link/sidecar_client.py",
}
KEEPERS = {
    "controller/util/tasks.py",
}
TASKS = {
    "readiness", "expiry", "load", "access_list", "overrides", "store_news", "store_counter",
    "policy_file", "audit_counts", "profile_searches", "estimate_searches", "estimates",
    "training_state", "status", "fleet_summary",
    "recorder", "metrics_server", "page_server",
}  # fmt: skip
# One without which the sidecar is not SERVING, and one for the store: they are killed last, because
# they run again within seconds, and how long the others take depends on the machine.
LAST = {"access_list", "store_news"}


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@asynccontextmanager
async def with_everything(folder: Path) -> AsyncIterator[RunningSidecar]:
    """A sidecar with every part that has a task."""
    access, policy = folder / "access", folder / "policy.yaml"
    access.write_text("read  token-sha256:" + "0" * 64 + "  reader\n")
    policy.write_text("policies: []\n")
    with RedisServer(folder / "redis") as redis:
        async with running_sidecar(
            folder, redis_url=redis.url, access=access, policy=policy,
            record_directory=folder / "recordings", metrics_host="127.0.0.1",
            metrics_port=free_port(), page_port=free_port(), ready_with="guess",
        ) as running:  # fmt: skip
            yield running


def measured(running: RunningSidecar) -> dict[tuple[str, str], float]:
    sidecar = running.sidecar
    registry = sidecar.override_registry
    snapshot = SidecarSnapshot([], [], registry.policy, registry.health, sidecar.supervisor.states)
    return {
        (sample.name, sample.labels.get("task", "")): sample.value
        for family in SIDECAR_FAMILIES
        for sample in render_family(family, snapshot)
    }


async def is_serving(running: RunningSidecar, service: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await with_timeout(health_stub(running.channel).Check(request))
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def services_of(running: RunningSidecar, task: str) -> list[str]:
    """The services whose detail names a task."""
    return [it.service for it in running.sidecar._readiness.services() if f" {task} " in it.detail]


async def test_every_task_that_is_killed_is_seen_and_runs_again(tmp_path: Path, lines: list[Any]):
    async with with_everything(tmp_path) as running:
        supervisor = running.sidecar.supervisor
        assert set(supervisor.states) == TASKS
        for name in sorted(TASKS, key=lambda name: name in LAST):
            supervisor.cancel(name)
            await wait_until(lambda name=name: name in supervisor.faults())
            metric_values = measured(running)
            assert metric_values["speculation_task_down", name] == 1
            assert metric_values["speculation_task_failures_total", name] == 1
            assert services_of(running, name), f"every service is SERVING without {name}"
        assert not await is_serving(running, "")
        assert not await is_serving(running, STORE)
        assert {line["task"] for line in lines if line["event"] == "task_failed"} == TASKS
        await wait_until(lambda: not supervisor.faults())
        metric_values = measured(running)
        assert not any(metric_values["speculation_task_down", name] for name in TASKS)
        for service in ("", STORE):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await is_serving(running, service):  # noqa: ASYNC110  # asked by a call
                    await asyncio.sleep(0.01)
        await obeys(running)


async def obeys(running: RunningSidecar) -> None:
    """What the tasks are for works: an override reaches an engine, and ends by itself."""
    await running.introduce()
    await override_calls.set_override(running, name="brief", gamma=1, request={"ttl_seconds": 1.5})
    session = next(iter(running.sidecar.registry))
    await wait_until(lambda: "brief" in session.plan.overrides)
    await wait_until(lambda: "brief" not in session.plan.overrides)


def test_whoever_creates_a_task_has_somebody_who_sees_its_end():
    creating = {
        str(path.relative_to(package.parent))
        for package in (Path(controller.__file__).parent, Path(engine_shim.__file__).parent)
        for path in package.rglob("*.py")
        if re.search(r"\b(create_task|ensure_future)\(", path.read_text(encoding="utf-8"))
    }
    assert creating == SHORT_LIVED | KEEPERS


async def test_a_task_that_fails_by_an_error_is_started_again_by_a_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Any]
):
    async with running_sidecar(tmp_path) as running:
        registry = running.sidecar.override_registry
        refresh, failures = registry.refresh, 1

        async def fail_once() -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "what a store may give")
            await refresh()

        monkeypatch.setattr(registry, "refresh", fail_once)
        registry._refresh_needed.set()
        supervisor: Supervisor = running.sidecar.supervisor
        await wait_until(supervisor.faults)
        assert set(supervisor.faults()) == {"overrides"}
        await wait_until(lambda: not supervisor.faults())
        await obeys(running)

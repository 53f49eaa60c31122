"""Faults of the fleet's Redis: cut off, stopped, full, read-only."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tools.faults.driving import PIN, open_testbed
from tools.faults.fault import PLAN_CONTINUES, CannotInjectError, Observations, fault
from tools.faults.link_faults import check_plan_continues, replace_agent

_EXPECTED = f"{PLAN_CONTINUES}; new overrides refused with the reason, those acknowledged in force"
_SHORT_SECONDS = 4.0
# A network of its own for each process that runs these.
_NETWORK = f"10.213.{os.getpid() % 250}"
_HOST_ADDRESS, _NAMESPACE_ADDRESS = f"{_NETWORK}.1", f"{_NETWORK}.2"


@fault("redis-cut-off", _EXPECTED)
def cut_off(place: Path, observations: Observations) -> None:
    """Redis in a network namespace, its link goes down (ip netns)."""
    with _namespace() as name:
        redis = RedisServer(
            place / "redis",
            *("--protected-mode", "no"),
            host=_NAMESPACE_ADDRESS,
            prefix=("ip", "netns", "exec", name),
        )

        def link(state: str) -> None:
            _run_ip("-n", name, "link", "set", "inside", state)

        with redis:
            _check_outage(
                place, observations, redis, lambda: link("down"), lambda: link("up"), "UNAVAILABLE"
            )


@fault("redis-stopped", _EXPECTED)
def stopped(place: Path, observations: Observations) -> None:
    """SIGSTOP to Redis."""
    with RedisServer(place / "redis") as redis:
        _check_outage(
            place, observations, redis, redis.pause, redis.resume, "does not answer in time"
        )


@fault("redis-full", _EXPECTED)
def full(place: Path, observations: Observations) -> None:
    """CONFIG SET maxmemory 1."""

    def limit(size: str) -> None:
        with redis.client() as client:
            client.config_set("maxmemory", size)

    with RedisServer(place / "redis") as redis:
        _check_outage(
            place, observations, redis, lambda: limit("1"), lambda: limit("0"), "out of memory"
        )


@fault("redis-read-only", _EXPECTED)
def read_only(place: Path, observations: Observations) -> None:
    """REPLICAOF a server that is not there."""

    def replicate(*whom: str) -> None:
        with redis.client() as client:
            client.execute_command("REPLICAOF", *whom)

    with RedisServer(place / "redis") as redis:
        _check_outage(
            place, observations, redis,
            lambda: replicate("127.0.0.1", "1"), lambda: replicate("NO", "ONE"), "read-only",
        )  # fmt: skip


def _check_outage(
    place: Path,
    observations: Observations,
    redis: RedisServer,
    begin: Callable[[], None],
    end: Callable[[], None],
    words: str,
) -> None:
    """Checks what must hold in every outage.  words: part of the refusal's message."""
    with open_testbed(place, environment={"CONTROLLER_REDIS_URL": redis.url}) as testbed:
        testbed.operator.pin("short", seconds=_SHORT_SECONDS)
        moment = time.monotonic()
        begin()
        try:
            request_time = time.monotonic()
            refused = testbed.operator.refusal("refused")
            observations.figure("refused_after_seconds", time.monotonic() - request_time)
            observations.check(f"a new override is refused: {words}", words in refused, refused)
            replace_agent(testbed)
            # When an override ends, the sidecar reads its store.
            eventually(
                lambda: "short" not in testbed.operator.active_override_ids(),
                description="an override ends",
            )
            check_plan_continues(testbed, observations, moment)
            active_ids = testbed.operator.active_override_ids()
            observations.check("what was acknowledged is in force", PIN in active_ids, active_ids)
        finally:
            end()
        moment = time.monotonic()
        eventually(
            lambda: not testbed.operator.refusal("later"), description="overrides are taken again"
        )
        observations.figure("taken_again_seconds", time.monotonic() - moment)
        active_ids = testbed.operator.active_override_ids()
        observations.check(
            "then overrides are taken again", active_ids >= {PIN, "later"}, active_ids
        )


@contextmanager
def _namespace() -> Iterator[str]:
    """A network namespace with one link to this one."""
    name = f"faults-{os.getpid()}"
    outside = f"flt{os.getpid()}"[:15]
    try:
        _run_ip("netns", "add", name)
        try:
            _run_ip("link", "add", outside, "type", "veth", "peer", "inside", "netns", name)
            _run_ip("address", "add", f"{_HOST_ADDRESS}/30", "dev", outside)
            _run_ip("link", "set", outside, "up")
            _run_ip("-n", name, "address", "add", f"{_NAMESPACE_ADDRESS}/30", "dev", "inside")
            _run_ip("-n", name, "link", "set", "inside", "up")
            yield name
        finally:
            # The link goes with it.
            _run_ip("netns", "delete", name)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise CannotInjectError(f"network namespaces need root and iproute2: {error}") from error


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

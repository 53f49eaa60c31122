"""Faults of the fleet's Redis: cut off, stopped, full, read-only."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tools.faults.driving import PIN, scene
from tools.faults.fault import ON, CannotInjectError, Seen, fault
from tools.faults.link_faults import new_session, went_on

_GOES_ON = f"{ON}; new overrides refused with the reason, those acknowledged in force"
_SHORT_SECONDS = 4.0
# A network of its own for each process that runs these.
_NETWORK = f"10.213.{os.getpid() % 250}"
_HERE, _THERE = f"{_NETWORK}.1", f"{_NETWORK}.2"


@fault("redis-cut-off", _GOES_ON)
def cut_off(place: Path, seen: Seen) -> None:
    """Redis in a network namespace, its link goes down (ip netns)."""
    with _namespace() as name:
        redis = RedisServer(
            place / "redis",
            *("--protected-mode", "no"),
            host=_THERE,
            prefix=("ip", "netns", "exec", name),
        )

        def link(state: str) -> None:
            _ip("-n", name, "link", "set", "inside", state)

        with redis:
            _trouble(place, seen, redis, lambda: link("down"), lambda: link("up"), "UNAVAILABLE")


@fault("redis-stopped", _GOES_ON)
def stopped(place: Path, seen: Seen) -> None:
    """SIGSTOP to Redis."""
    with RedisServer(place / "redis") as redis:
        _trouble(place, seen, redis, redis.pause, redis.resume, "does not answer in time")


@fault("redis-full", _GOES_ON)
def full(place: Path, seen: Seen) -> None:
    """CONFIG SET maxmemory 1."""

    def limit(size: str) -> None:
        with redis.client() as client:
            client.config_set("maxmemory", size)

    with RedisServer(place / "redis") as redis:
        _trouble(place, seen, redis, lambda: limit("1"), lambda: limit("0"), "out of memory")


@fault("redis-read-only", _GOES_ON)
def read_only(place: Path, seen: Seen) -> None:
    """REPLICAOF a server that is not there."""

    def follow(*whom: str) -> None:
        with redis.client() as client:
            client.execute_command("REPLICAOF", *whom)

    with RedisServer(place / "redis") as redis:
        _trouble(
            place, seen, redis,
            lambda: follow("127.0.0.1", "1"), lambda: follow("NO", "ONE"), "read-only",
        )  # fmt: skip


def _trouble(
    place: Path,
    seen: Seen,
    redis: RedisServer,
    begin: Callable[[], None],
    end: Callable[[], None],
    words: str,
) -> None:
    """Checks what must hold in every outage.  words: part of the refusal's message."""
    with scene(place, environment={"CONTROLLER_REDIS_URL": redis.url}) as here:
        here.operator.pin("short", seconds=_SHORT_SECONDS)
        moment = time.monotonic()
        begin()
        try:
            asked = time.monotonic()
            refused = here.operator.refusal("refused")
            seen.figure("refused_after_seconds", time.monotonic() - asked)
            seen.that(f"a new override is refused: {words}", words in refused, refused)
            new_session(here)
            # When an override ends, the sidecar reads its store.
            eventually(lambda: "short" not in here.operator.in_force(), what="an override ends")
            went_on(here, seen, moment)
            in_force = here.operator.in_force()
            seen.that("what was acknowledged is in force", PIN in in_force, in_force)
        finally:
            end()
        moment = time.monotonic()
        eventually(lambda: not here.operator.refusal("later"), what="overrides are taken again")
        seen.figure("taken_again_seconds", time.monotonic() - moment)
        in_force = here.operator.in_force()
        seen.that("then overrides are taken again", in_force >= {PIN, "later"}, in_force)


@contextmanager
def _namespace() -> Iterator[str]:
    """A network namespace with one link to this one."""
    name = f"faults-{os.getpid()}"
    outside = f"flt{os.getpid()}"[:15]
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", outside, "type", "veth", "peer", "inside", "netns", name)
            _ip("address", "add", f"{_HERE}/30", "dev", outside)
            _ip("link", "set", outside, "up")
            _ip("-n", name, "address", "add", f"{_THERE}/30", "dev", "inside")
            _ip("-n", name, "link", "set", "inside", "up")
            yield name
        finally:
            # The link goes with it.
            _ip("netns", "delete", name)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise CannotInjectError(f"network namespaces need root and iproute2: {error}") from error


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

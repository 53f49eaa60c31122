"""`controller serve` killed at random instants while it writes; what is on disk afterwards."""

import asyncio
import random
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import psutil

from controller.cli.connection import for_operators
from controller.core.cost.profile import Profile
from controller.service.state.profile_registry import ProfileRegistry
from controller.store.file_store import FileStore
from controller.store.interface import PROFILES
from controller.wire.engines import engine_from_proto
from controller.wire.overrides import from_body
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.service_harness import ENVIRONMENT, engine_message, make_profile
from tests.support.sidecar_process import CONTROLLER, sidecar_process
from tools.faults.driving import PATIENCE_SECONDS, clear_request, set_request
from tools.faults.fault import Fault, Seen

# From SERVING to the kill.
_LONGEST_SECONDS = 0.5
_WRITERS = 3
# Of a writer; all writers' stay far below what may be in force.
_KEPT = 8
# A quick machine's writers come upon the sidecar's limit of calls, and wait this long.
_REFUSED_SECONDS = 0.05
# One life in this many ends before the sidecar serves.
_STILLBORN = 4


@dataclass
class Acknowledged:
    """What sidecars have acknowledged, over all their lives.

    under_way: asked and not answered.  settled: those of them that were cleared afterwards.
    """

    pinned: dict[str, int] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    under_way: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    pushed: list[Profile] = field(default_factory=list)
    installed: list[str] = field(default_factory=list)

    def certain(self) -> list[str]:
        """What has to be in force."""
        return [n for n in self.pinned if n not in self.cleared and n not in self.under_way]


class Writers:
    """Threads that set and clear overrides, push and install profiles, until the sidecar dies."""

    def __init__(self, address: str, life: int, known: Acknowledged) -> None:
        self._known, self._life = known, life
        self.refusals: list[str] = []
        self._channels = [grpc.insecure_channel(for_operators(address)) for _ in range(_WRITERS)]
        self._channels.append(grpc.insecure_channel(address))
        works: list[Callable[[], None]] = [
            *(lambda n=n: self._overrides(n) for n in range(_WRITERS)),
            self._profiles,
        ]
        self._threads = [threading.Thread(target=self._until_it_dies, args=(w,)) for w in works]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Once the sidecar has been killed."""
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        for channel in self._channels:
            channel.close()

    def _until_it_dies(self, work: Callable[[], None]) -> None:
        try:
            work()
        except grpc.RpcError as error:
            call = cast("grpc.Call", error)
            if call.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                self.refusals.append(f"{call.code().name}: {call.details()}")

    def _overrides(self, number: int) -> None:
        stub = policy_pb2_grpc.PolicyServiceStub(self._channels[number])
        known = self._known
        kept = [name for name in known.certain() if name.endswith(f"-{number}")]
        # Overrides that were pending when a sidecar died may be in force: too many in time.
        for name in sorted(known.under_way - known.settled):
            if name.endswith(f"-{number}"):
                self._clear(stub, name)
                known.settled.add(name)
        count = 0
        while True:
            count += 1
            name, gamma = f"{self._life}-{count}-{number}", count % 3
            known.under_way.add(name)
            scope = policy_pb2.Scope(engine_id=name)
            _call(stub.SetOverride, set_request(name, gamma, scope, for_ever=True))
            known.pinned[name] = gamma
            known.under_way.discard(name)
            kept.append(name)
            if len(kept) > _KEPT:
                over = kept.pop(0)
                known.under_way.add(over)
                self._clear(stub, over)
                known.cleared.add(over)
                known.under_way.discard(over)

    def _clear(self, stub: policy_pb2_grpc.PolicyServiceStub, name: str) -> None:
        _call(stub.ClearOverride, clear_request(name, allow_missing=True))

    def _profiles(self) -> None:
        channel = self._channels[-1]
        service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
            service_pb2.IntroduceRequest(engine=engine_message()), timeout=PATIENCE_SECONDS
        )
        stub = service_pb2_grpc.ProfilingServiceStub(self._channels[0])
        count = 0
        while True:
            count += 1
            profile = make_profile(measured_at=f"2020-01-01-{self._life:04d}-{count:06d}")
            text = profile.to_json()
            _call(stub.PushProfile, service_pb2.PushProfileRequest(profile_json=text))
            self._known.pushed.append(profile)
            _call(stub.InstallProfile, service_pb2.InstallProfileRequest(profile_json=text))
            self._known.installed.append(profile.measured_at)


def _call(method: Callable[..., Any], request: Any) -> None:
    """Calls, again for as long as there were too many calls: such a call has done nothing."""
    while True:
        try:
            method(request, timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            if not (cast("grpc.Call", error).details() or "").startswith("too many calls"):
                raise
            time.sleep(_REFUSED_SECONDS)
        else:
            return


def killed_at_random(count: int) -> Fault:
    """Makes the fault of `count` kills."""

    def inject(place: Path, seen: Seen) -> None:
        rng = random.Random()
        known = Acknowledged()
        descriptors = psutil.Process().num_fds()
        lost: list[str] = []
        left: set[int] = set()
        starts = []
        for life in range(count):
            if life % _STILLBORN == _STILLBORN - 1:
                left |= _killed_starting(place, rng)
            else:
                took, children = _killed_serving(place, rng, life, known)
                starts.append(took)
                left |= children
            lost += asyncio.run(_lost(place, known))
            print(f"    kill {life + 1} of {count}", end="\r", flush=True)
        seen.that(f"after each of {count} kills the store is readable and its lock free", True)
        seen.that("all that was acknowledged is there, and nothing else", not lost, lost[:5])
        alive = [pid for pid in left if psutil.pid_exists(pid)]
        seen.that("no process is left", not alive, alive)
        more = psutil.Process().num_fds() - descriptors
        seen.that("no descriptor is left", more <= 0, more)
        with sidecar_process(place, *_flags(place)) as sidecar:
            code, _ = sidecar.stop()
        rest = _left_files(place)
        seen.that("after a clean end no socket or unfinished file is left", not rest, rest)
        seen.that("the clean end is one", code == 0, code)
        seen.figure("overrides_acknowledged", len(known.pinned))
        seen.figure("clears_acknowledged", len(known.cleared))
        seen.figure("profiles_acknowledged", len(known.pushed) + len(known.installed))
        seen.spread("start_to_serving_seconds", starts)

    return Fault(
        "killed-at-random",
        f"SIGKILL to a sidecar that writes overrides and profiles all the time, {count} times",
        "the store is readable, what was acknowledged is there, nothing is left behind",
        inject,
        quick=True,
    )


def _flags(place: Path) -> tuple[str, ...]:
    return ("--profile-directory", str(place / "profiles"), "--log-level", "error")


def _killed_serving(
    place: Path, rng: random.Random, life: int, known: Acknowledged
) -> tuple[float, set[int]]:
    """Seconds to SERVING, and the processes that the sidecar had."""
    with sidecar_process(place, *_flags(place), log=place / "log") as sidecar:
        writers = Writers(sidecar.address, life, known)
        time.sleep(rng.uniform(0, _LONGEST_SECONDS))
        family = psutil.Process(sidecar.process.pid).children(recursive=True)
        sidecar.process.kill()
        writers.join()
        assert not writers.refusals, writers.refusals
    return sidecar.seconds_to_serving, {sidecar.process.pid, *(one.pid for one in family)}


def _killed_starting(place: Path, rng: random.Random) -> set[int]:
    address = f"unix:{place}/controller.sock"
    command = [*CONTROLLER, "serve", "--address", address, "--metrics-port", "0", *_flags(place)]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        time.sleep(rng.uniform(0, 2 * _LONGEST_SECONDS))
        process.kill()
    return {process.pid}


async def _lost(place: Path, known: Acknowledged) -> list[str]:
    """Describes every difference between the store and what was acknowledged."""
    store = FileStore(place / "controller.sock.state")
    await store.open(lambda: None)
    try:
        entries = {entry.override_id: entry for entry in await store.entries()}
        names = await store.blobs.names(PROFILES)
        stored = {item.source for n in names for item in await store.blobs.items(PROFILES, n)}
    finally:
        await store.close()
    lost = []
    for name in known.certain():
        entry = entries.get(name)
        if entry is None or entry.ended:
            lost.append(f"{name} is not in force")
        elif from_body(entry.body).rule.gamma != known.pinned[name]:
            lost.append(f"{name} is another one: {entry.body}")
    ended = {name for name, entry in entries.items() if entry.ended}
    lost += [f"{name} is in force again" for name in known.cleared - ended]
    lost += [f"{name}: never asked" for name in entries.keys() - known.pinned - known.under_way]
    if known.pushed and known.pushed[-1].profile_id not in stored:
        lost.append(f"profile of {known.pushed[-1].measured_at} is not in the store")
    profile_registry = ProfileRegistry(place / "profiles")
    profile_registry.load([])
    kept = profile_registry.find(engine_from_proto(engine_message()))
    if known.installed and (kept is None or kept.measured_at < known.installed[-1]):
        lost.append(f"profile of {known.installed[-1]} is not the one in use: {kept}")
    return lost


def _left_files(place: Path) -> list[str]:
    """Sockets and unfinished files that were left behind."""
    found = place.rglob("*")
    return [str(path) for path in found if path.is_socket() or path.suffix == ".part"]

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

from controller.cli.connection import to_operators_address
from controller.core.cost.profile import Profile
from controller.service.state.profile_registry import ProfileRegistry
from controller.store.file_store import FileStore
from controller.store.interface import PROFILES
from controller.wire.engines import engine_from_proto
from controller.wire.overrides import override_from_json
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.service_harness import ENVIRONMENT, engine_message, make_profile
from tests.support.sidecar_process import CONTROLLER, sidecar_process
from tools.faults.driving import PATIENCE_SECONDS, clear_request, set_request
from tools.faults.fault import Fault, Observations

# From SERVING to the kill.
_MAX_LIFE_SECONDS = 0.5
_WRITERS = 3
# Of a writer; all writers' stay far below what may be in force.
_MAX_ACTIVE = 8
# A quick machine's writers come upon the sidecar's limit of calls, and wait this long.
_REFUSED_SECONDS = 0.05
# One life in this many ends before the sidecar serves.
_EARLY_KILL_INTERVAL = 4


@dataclass
class Acknowledged:
    """The changes that the sidecars have acknowledged, over all their lives.

    pending: asked and not answered.  settled: those of them that were cleared afterwards.
    """

    pinned: dict[str, int] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    pending: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    pushed: list[Profile] = field(default_factory=list)
    installed: list[str] = field(default_factory=list)

    def certain(self) -> list[str]:
        """Returns the overrides that must be in force."""
        return [n for n in self.pinned if n not in self.cleared and n not in self.pending]


class Writers:
    """Threads that set and clear overrides, push and install profiles, until the sidecar dies."""

    def __init__(self, address: str, life: int, acknowledged: Acknowledged) -> None:
        self._acknowledged, self._life = acknowledged, life
        self.refusals: list[str] = []
        self._channels = [
            grpc.insecure_channel(to_operators_address(address)) for _ in range(_WRITERS)
        ]
        self._channels.append(grpc.insecure_channel(address))
        tasks: list[Callable[[], None]] = [
            *(lambda n=n: self._write_overrides(n) for n in range(_WRITERS)),
            self._write_profiles,
        ]
        self._threads = [
            threading.Thread(target=self._run_until_killed, args=(task,)) for task in tasks
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Ends the threads, after the sidecar was killed."""
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        for channel in self._channels:
            channel.close()

    def _run_until_killed(self, work: Callable[[], None]) -> None:
        try:
            work()
        except grpc.RpcError as error:
            call = cast("grpc.Call", error)
            if call.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                self.refusals.append(f"{call.code().name}: {call.details()}")

    def _write_overrides(self, number: int) -> None:
        stub = policy_pb2_grpc.PolicyServiceStub(self._channels[number])
        acknowledged = self._acknowledged
        active_names = [name for name in acknowledged.certain() if name.endswith(f"-{number}")]
        # Overrides that were pending when a sidecar died may be in force: too many in time.
        for name in sorted(acknowledged.pending - acknowledged.settled):
            if name.endswith(f"-{number}"):
                self._clear(stub, name)
                acknowledged.settled.add(name)
        count = 0
        while True:
            count += 1
            name, gamma = f"{self._life}-{count}-{number}", count % 3
            acknowledged.pending.add(name)
            scope = policy_pb2.Scope(engine_id=name)
            _call(stub.SetOverride, set_request(name, gamma, scope, for_ever=True))
            acknowledged.pinned[name] = gamma
            acknowledged.pending.discard(name)
            active_names.append(name)
            if len(active_names) > _MAX_ACTIVE:
                oldest = active_names.pop(0)
                acknowledged.pending.add(oldest)
                self._clear(stub, oldest)
                acknowledged.cleared.add(oldest)
                acknowledged.pending.discard(oldest)

    def _clear(self, stub: policy_pb2_grpc.PolicyServiceStub, name: str) -> None:
        _call(stub.ClearOverride, clear_request(name, allow_missing=True))

    def _write_profiles(self) -> None:
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
            self._acknowledged.pushed.append(profile)
            _call(stub.InstallProfile, service_pb2.InstallProfileRequest(profile_json=text))
            self._acknowledged.installed.append(profile.measured_at)


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

    def inject(place: Path, observations: Observations) -> None:
        rng = random.Random()
        acknowledged = Acknowledged()
        descriptors = psutil.Process().num_fds()
        problems: list[str] = []
        pids: set[int] = set()
        starts = []
        for life in range(count):
            if life % _EARLY_KILL_INTERVAL == _EARLY_KILL_INTERVAL - 1:
                pids |= _kill_starting(place, rng)
            else:
                start_seconds, children = _kill_serving(place, rng, life, acknowledged)
                starts.append(start_seconds)
                pids |= children
            problems += asyncio.run(_find_losses(place, acknowledged))
            print(f"    kill {life + 1} of {count}", end="\r", flush=True)
        observations.check(
            f"after each of {count} kills the store is readable and its lock free", True
        )
        observations.check(
            "all that was acknowledged is there, and nothing else", not problems, problems[:5]
        )
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        observations.check("no process is left", not alive, alive)
        extra_descriptors = psutil.Process().num_fds() - descriptors
        observations.check("no descriptor is left", extra_descriptors <= 0, extra_descriptors)
        with sidecar_process(place, *_flags(place)) as sidecar:
            code, _ = sidecar.stop()
        leftover_files = _find_leftover_files(place)
        observations.check(
            "after a clean end no socket or unfinished file is left",
            not leftover_files,
            leftover_files,
        )
        observations.check("the clean end is one", code == 0, code)
        observations.figure("overrides_acknowledged", len(acknowledged.pinned))
        observations.figure("clears_acknowledged", len(acknowledged.cleared))
        observations.figure(
            "profiles_acknowledged", len(acknowledged.pushed) + len(acknowledged.installed)
        )
        observations.spread("start_to_serving_seconds", starts)

    return Fault(
        "killed-at-random",
        f"SIGKILL to a sidecar that writes overrides and profiles all the time, {count} times",
        "the store is readable, what was acknowledged is there, nothing is left behind",
        inject,
        quick=True,
    )


def _flags(place: Path) -> tuple[str, ...]:
    return ("--profile-directory", str(place / "profiles"), "--log-level", "error")


def _kill_serving(
    place: Path, rng: random.Random, life: int, acknowledged: Acknowledged
) -> tuple[float, set[int]]:
    """Seconds to SERVING, and the processes that the sidecar had."""
    with sidecar_process(place, *_flags(place), log=place / "log") as sidecar:
        writers = Writers(sidecar.address, life, acknowledged)
        time.sleep(rng.uniform(0, _MAX_LIFE_SECONDS))
        children = psutil.Process(sidecar.process.pid).children(recursive=True)
        sidecar.process.kill()
        writers.join()
        assert not writers.refusals, writers.refusals
    return sidecar.seconds_to_serving, {sidecar.process.pid, *(child.pid for child in children)}


def _kill_starting(place: Path, rng: random.Random) -> set[int]:
    address = f"unix:{place}/controller.sock"
    command = [*CONTROLLER, "serve", "--address", address, "--metrics-port", "0", *_flags(place)]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        time.sleep(rng.uniform(0, 2 * _MAX_LIFE_SECONDS))
        process.kill()
    return {process.pid}


async def _find_losses(place: Path, acknowledged: Acknowledged) -> list[str]:
    """Describes every difference between the store and what was acknowledged."""
    store = FileStore(place / "controller.sock.state")
    await store.open(lambda: None)
    try:
        entries = {entry.override_id: entry for entry in await store.entries()}
        names = await store.blobs.names(PROFILES)
        stored_profiles = {
            item.source for n in names for item in await store.blobs.items(PROFILES, n)
        }
    finally:
        await store.close()
    problems = []
    for name in acknowledged.certain():
        entry = entries.get(name)
        if entry is None or entry.ended:
            problems.append(f"{name} is not in force")
        elif override_from_json(entry.body).rule.gamma != acknowledged.pinned[name]:
            problems.append(f"{name} is another one: {entry.body}")
    ended = {name for name, entry in entries.items() if entry.ended}
    problems += [f"{name} is in force again" for name in acknowledged.cleared - ended]
    problems += [
        f"{name}: never asked"
        for name in entries.keys() - acknowledged.pinned - acknowledged.pending
    ]
    if acknowledged.pushed and acknowledged.pushed[-1].profile_id not in stored_profiles:
        problems.append(f"profile of {acknowledged.pushed[-1].measured_at} is not in the store")
    profile_registry = ProfileRegistry(place / "profiles")
    profile_registry.load([])
    profile_in_use = profile_registry.find(engine_from_proto(engine_message()))
    if acknowledged.installed and (
        profile_in_use is None or profile_in_use.measured_at < acknowledged.installed[-1]
    ):
        problems.append(
            f"profile of {acknowledged.installed[-1]} is not the one in use: {profile_in_use}"
        )
    return problems


def _find_leftover_files(place: Path) -> list[str]:
    """Sockets and unfinished files that were left behind."""
    paths = place.rglob("*")
    return [str(path) for path in paths if path.is_socket() or path.suffix == ".part"]

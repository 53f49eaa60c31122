"""Many engines that come and go at one sidecar: `python -m tools.soak.crowd --minutes 10`.

A real `controller serve` with its metrics and its page.  Every engine has a connection and a
stream of its own, lives for a fifth of the run or so, and ends in one of three ways; then it comes
back, under its own id or another one.  Beside them an operator sets and clears overrides, a client
lists engines and scrapes metrics, and one honest engine asks for a decision ten times a second;
the delays of these decisions are noted.

Sampled are memory, descriptors, threads, sockets, the log and the tasks of the event loop.  The
exit code is 1 if something grew, an engine was not steered, or a call failed that should not.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc
import grpc.aio

from controller.util.sockets import operators_address
from lab.harness.processes import free_port
from speculation.v1 import (
    engine_pb2,
    policy_pb2,
    policy_pb2_grpc,
    service_pb2,
    service_pb2_grpc,
)
from tests.support.service_harness import ENVIRONMENT, engine_message, report_message
from tests.support.sidecar_process import PATIENCE_SECONDS, wait_until_serving
from tools.faults.driving import clear_request, set_request
from tools.soak import counted_sidecar
from tools.soak.growth import Growth, Sample, Sampler, Watched, growths

_HONEST: Final = "honest"
# Steps of an engine.
_STEP_SECONDS: Final = 0.2
# Of the whole run; introductions are what costs most, and engines seldom come back.
_LIFE_SHARES: Final = (0.1, 0.3)
# In one life of this many an engine has another id, so that sessions are left behind.
_OTHER_ID_EVERY: Final = 3
# They are removed in this time, so that their number is steady after it.
_SESSION_IDLE_SECONDS: Final = 20.0
_DECISION_SECONDS: Final = 0.1
_OVERRIDE_SECONDS: Final = 3.0
# One override in this many is for the fleet, for which every engine is planned again.
_FLEET_EVERY: Final = 10
# An engine that lived this long must have had a plan on its stream.
_PLANNED_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 5.0
_SAMPLES: Final = 240
_SAMPLE_SECONDS: Final = (0.1, 5.0)
# What comes and goes moves the number of tasks by the engines that are between two lives.
_TASKS_SHARE: Final = 0.1
_ALONE: Final = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(slots=True)
class Soaked:
    """The result of a run.

    delays: (seconds since the start, milliseconds) of the honest engine's decisions.  tasks:
    (seconds, tasks of the event loop).  lives: of engines; plans: that they were sent; failures:
    sentences.
    """

    samples: list[Sample] = field(default_factory=list)
    delays: list[tuple[float, float]] = field(default_factory=list)
    tasks: list[tuple[float, int]] = field(default_factory=list)
    lives: int = 0
    plans: int = 0
    without_plan: int = 0
    overrides: int = 0
    looks: int = 0
    failures: list[str] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """Describes what went wrong."""
        found = [str(growth) for growth in self.growths if growth.is_too_much]
        if grown := self._tasks_grown():
            found.append(grown)
        if self.without_plan:
            found.append(f"{self.without_plan} lives ended without a plan")
        return [*found, *self.failures[:10]]

    def _tasks_grown(self) -> str:
        counts = [count for _, count in self.tasks]
        quarter = len(counts) // 4
        if not quarter:
            return "the tasks were not counted"
        early, late = median(counts[quarter : 2 * quarter]), median(counts[-quarter:])
        if late <= early * (1 + _TASKS_SHARE) + 10:
            return ""
        return f"tasks of the event loop: {early:.0f} at first, {late:.0f} in the end"


class _Crowd:
    def __init__(self, address: str, found: Soaked, seconds: float) -> None:
        self._address, self._found = address, found
        self._began = time.monotonic()
        self._seconds = seconds
        self._end = self._began + seconds

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end

    async def live(self, number: int) -> None:
        """Runs one engine, life after life."""
        rng = random.Random(number)
        await asyncio.sleep(rng.uniform(0, 5))
        life = 0
        while not self._is_over:
            life += 1
            other = f"-{life}" if life % _OTHER_ID_EVERY == 0 else ""
            try:
                await self._one_life(f"engine-{number}{other}", f"secret-{number}", rng)
            except grpc.aio.AioRpcError as error:
                self._found.failures.append(f"{error.code().name}: {error.details()}")
                await asyncio.sleep(1.0)

    async def _one_life(self, engine_id: str, secret: str, rng: random.Random) -> None:
        ends = min(time.monotonic() + rng.uniform(*_LIFE_SHARES) * self._seconds, self._end)
        async with grpc.aio.insecure_channel(self._address, _ALONE) as channel:
            stub = service_pb2_grpc.SpeculationServiceStub(channel)
            opened = await stub.Introduce(
                service_pb2.IntroduceRequest(
                    engine=engine_message(engine_id), engine_secret=secret
                ),
                timeout=PATIENCE_SECONDS,
            )
            call: Any = stub.Steer()
            plans = asyncio.create_task(self._plans(call))
            step = 0
            while time.monotonic() < ends:
                step += 1
                try:
                    await call.write(_steer(opened.session_id, _step(step, rng)))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    why = f"{(await call.code()).name}: {await call.details()}"
                    self._found.failures.append(f"the stream of {engine_id} has ended: {why}")
                    break
                await asyncio.sleep(_STEP_SECONDS)
            # By ending the stream, by cancelling it, or by closing the connection.
            how = rng.randrange(3)
            if how == 0:
                await call.done_writing()
                await asyncio.wait_for(call.code(), PATIENCE_SECONDS)
            elif how == 1:
                call.cancel()
        plans.cancel()
        await asyncio.wait([plans])
        self._found.lives += 1

    async def _plans(self, call: Any) -> None:
        count = 0
        began = time.monotonic()
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                count += answer.HasField("plan")
        except grpc.aio.AioRpcError:
            pass  # the stream's end; what matters is whether there was a plan
        finally:
            self._found.plans += count
            lived = time.monotonic() - began
            self._found.without_plan += not count and lived >= _PLANNED_SECONDS

    async def decide(self) -> None:
        """Runs the honest engine, and notes how long each decision takes."""
        rng, step = random.Random(0), 0
        async with grpc.aio.insecure_channel(self._address, _ALONE) as channel:
            stub = service_pb2_grpc.SpeculationServiceStub(channel)
            opened = await stub.Introduce(
                service_pb2.IntroduceRequest(engine=engine_message(_HONEST), engine_secret="s"),
                timeout=PATIENCE_SECONDS,
            )
            while not self._is_over:
                step += 1
                request = service_pb2.DecideRequest(
                    session_id=opened.session_id, report=_step(step, rng)
                )
                began = time.monotonic()
                try:
                    await stub.Decide(request, timeout=PATIENCE_SECONDS)
                except grpc.aio.AioRpcError as error:
                    self._found.failures.append(f"Decide: {error.code().name}: {error.details()}")
                    return
                took = time.monotonic() - began
                self._found.delays.append((began - self._began, 1e3 * took))
                await asyncio.sleep(_DECISION_SECONDS)

    async def operate(self) -> None:
        """Sets and clears overrides, each for some seconds."""
        async with grpc.aio.insecure_channel(operators_address(self._address)) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            number = 0
            while not self._is_over:
                number += 1
                scope = (
                    policy_pb2.Scope(engine_id=_HONEST)
                    if number % _FLEET_EVERY
                    else policy_pb2.Scope(fleet=True)
                )
                await stub.SetOverride(
                    set_request(f"o{number}", number % 4, scope, ttl_seconds=30.0),
                    timeout=PATIENCE_SECONDS,
                )
                if number % 2:
                    await stub.ClearOverride(clear_request(f"o{number}"), timeout=PATIENCE_SECONDS)
                self._found.overrides += 1
                await asyncio.sleep(_OVERRIDE_SECONDS)

    async def look(self, urls: Sequence[str]) -> None:
        """Reads the lists, the metrics and the page's state."""
        async with grpc.aio.insecure_channel(self._address, _ALONE) as channel:
            stub = service_pb2_grpc.InspectionServiceStub(channel)
            while not self._is_over:
                await stub.ListEngines(
                    service_pb2.ListEnginesRequest(page_size=50), timeout=PATIENCE_SECONDS
                )
                for url in urls:
                    await asyncio.to_thread(_read, url)
                self._found.looks += 1
                await asyncio.sleep(_LOOK_SECONDS)


def _read(url: str) -> None:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        answer.read()


def _steer(session_id: str, *reports: engine_pb2.StepReport) -> service_pb2.SteerRequest:
    return service_pb2.SteerRequest(session_id=session_id, reports=reports)


def _step(step: int, rng: random.Random) -> engine_pb2.StepReport:
    accepted = rng.randint(0, 4)
    return report_message(
        step, accepted_counts=[4 - accepted, 0, accepted], step_seconds=rng.uniform(0.009, 0.011)
    )


@asynccontextmanager
async def _sampled(
    process: "subprocess.Popen[str]", found: Soaked, log: Path, tasks: Path, every: float
) -> AsyncIterator[None]:
    """Samples the sidecar while the block runs."""
    began = time.monotonic()

    async def count() -> None:
        while True:
            await asyncio.sleep(every)
            with suppress(FileNotFoundError):
                text = tasks.read_text()  # noqa: ASYNC240  # a number of four digits
                found.tasks.append((time.monotonic() - began, int(text)))

    sampler = Sampler({"sidecar": Watched(lambda: process.pid, lambda: log)}, every)
    with sampler:
        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()
    found.samples = sampler.samples


async def _play(place: Path, engines: int, seconds: float) -> Soaked:
    found = Soaked()
    metrics, page = free_port(), free_port()
    address, log, tasks = f"unix:{place}/controller.sock", place / "log", place / "tasks"
    command = [
        sys.executable, "-m", counted_sidecar.__name__, str(tasks), "serve",
        "--address", address, "--metrics-port", str(metrics), "--page-port", str(page),
        "--log-level", "warning",
    ]  # fmt: skip
    settings = {"CONTROLLER_SESSION_IDLE_SECONDS": str(_SESSION_IDLE_SECONDS)}
    with (
        log.open("wb") as lines,
        subprocess.Popen(  # noqa: ASYNC220  # it is only started here
            command, env=ENVIRONMENT | settings, stderr=lines, text=True
        ) as process,
    ):
        try:
            await asyncio.to_thread(wait_until_serving, address, process)
            every = min(max(seconds / _SAMPLES, _SAMPLE_SECONDS[0]), _SAMPLE_SECONDS[1])
            crowd = _Crowd(address, found, seconds)
            urls = (f"http://127.0.0.1:{metrics}/metrics", f"http://127.0.0.1:{page}/api/v1/state")
            async with _sampled(process, found, log, tasks, every), asyncio.TaskGroup() as works:
                for number in range(engines):
                    works.create_task(crowd.live(number))
                works.create_task(crowd.decide())
                works.create_task(crowd.operate())
                works.create_task(crowd.look(urls))
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
            if code:
                found.failures.append(f"the sidecar ended with {code}")
        finally:
            process.kill()
    found.failures += [line for line in log.read_text().splitlines() if '"call_failed"' in line]
    # In the first half every engine's history fills, and sessions that ended are still there.
    found.growths = growths([it for it in found.samples if it.seconds >= seconds / 2])
    return found


def soak(engines: int, minutes: float) -> Soaked:
    """Runs it all.  Raises AssertionError and grpc.RpcError where a part does not even work."""
    with TemporaryDirectory(prefix="crowd-") as name:
        return asyncio.run(_play(Path(name), engines, 60.0 * minutes))


def p99(delays: Sequence[tuple[float, float]]) -> float:
    """The delay, in milliseconds, that one decision in a hundred takes longer than."""
    return quantiles([delay for _, delay in delays], n=100, method="inclusive")[-1]


def _document(found: Soaked, engines: int, minutes: float) -> dict[str, Any]:
    first = [it for it in found.delays if it[0] < 30 * minutes]
    last = [it for it in found.delays if it[0] >= 30 * minutes]
    return {
        "engines": engines,
        "minutes": minutes,
        "lives": found.lives,
        "plans": found.plans,
        "overrides": found.overrides,
        "looks": found.looks,
        "decisions": len(found.delays),
        "decision_ms_p50": median(delay for _, delay in found.delays),
        "decision_ms_p99": p99(found.delays),
        "decision_ms_p99_by_half": [p99(first), p99(last)],
        "tasks_first_last": [found.tasks[len(found.tasks) // 4][1], found.tasks[-1][1]],
        "growth": [asdict(growth) for growth in found.growths],
        "megabytes": [round(it.memory_megabytes, 1) for it in found.samples],
        "findings": found.findings,
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("build/soak/crowd.json"))
    given = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    found = soak(given.engines, given.minutes)
    text = json.dumps(_document(found, given.engines, given.minutes), indent=1)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(text + "\n")
    print(text)
    return int(bool(found.findings))


if __name__ == "__main__":
    raise SystemExit(main())

"""Many engines that come and go at one sidecar: `python -m tools.soak.crowd --minutes 10`.

A real `controller serve` with its metrics and its page.  Every engine has a connection and a
stream of its own, lives for about a fifth of the run, and ends in one of three ways; then it comes
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
from tools.soak.growth import Growth, Sample, Sampler, WatchedProcess, growths

_HONEST: Final = "honest"
# Steps of an engine.
_STEP_SECONDS: Final = 0.2
# Of the whole run; introductions are what costs most, and engines seldom come back.
_LIFE_SHARES: Final = (0.1, 0.3)
# In one life of this many an engine has another id, so that sessions are left behind.
_OTHER_ID_INTERVAL: Final = 3
# They are removed in this time, so that their number is steady after it.
_SESSION_IDLE_SECONDS: Final = 20.0
_DECISION_SECONDS: Final = 0.1
_OVERRIDE_SECONDS: Final = 3.0
# One override in this many is for the fleet, for which every engine is planned again.
_FLEET_INTERVAL: Final = 10
# An engine that lived this long must have had a plan on its stream.
_PLANNED_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 5.0
_SAMPLES: Final = 240
_SAMPLE_SECONDS: Final = (0.1, 5.0)
# What comes and goes moves the number of tasks by the engines that are between two lives.
_TASKS_SHARE: Final = 0.1
_OWN_CHANNEL: Final = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(slots=True)
class CrowdResult:
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
    probes: int = 0
    failures: list[str] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """Describes what went wrong."""
        problems = [str(growth) for growth in self.growths if growth.is_too_much]
        if task_growth := self._describe_task_growth():
            problems.append(task_growth)
        if self.without_plan:
            problems.append(f"{self.without_plan} lives ended without a plan")
        return [*problems, *self.failures[:10]]

    def _describe_task_growth(self) -> str:
        counts = [count for _, count in self.tasks]
        quarter = len(counts) // 4
        if not quarter:
            return "the tasks were not counted"
        early, late = median(counts[quarter : 2 * quarter]), median(counts[-quarter:])
        if late <= early * (1 + _TASKS_SHARE) + 10:
            return ""
        return f"tasks of the event loop: {early:.0f} at first, {late:.0f} in the end"


class _Crowd:
    def __init__(self, address: str, result: CrowdResult, seconds: float) -> None:
        self._address, self._result = address, result
        self._start = time.monotonic()
        self._seconds = seconds
        self._end = self._start + seconds

    @property
    def _has_ended(self) -> bool:
        return time.monotonic() >= self._end

    async def run_lives(self, number: int) -> None:
        """Runs one engine, life after life."""
        rng = random.Random(number)
        await asyncio.sleep(rng.uniform(0, 5))
        life = 0
        while not self._has_ended:
            life += 1
            suffix = f"-{life}" if life % _OTHER_ID_INTERVAL == 0 else ""
            try:
                await self._run_life(f"engine-{number}{suffix}", f"secret-{number}", rng)
            except grpc.aio.AioRpcError as error:
                self._result.failures.append(f"{error.code().name}: {error.details()}")
                await asyncio.sleep(1.0)

    async def _run_life(self, engine_id: str, secret: str, rng: random.Random) -> None:
        life_end = min(time.monotonic() + rng.uniform(*_LIFE_SHARES) * self._seconds, self._end)
        async with grpc.aio.insecure_channel(self._address, _OWN_CHANNEL) as channel:
            stub = service_pb2_grpc.SpeculationServiceStub(channel)
            opened = await stub.Introduce(
                service_pb2.IntroduceRequest(
                    engine=engine_message(engine_id), engine_secret=secret
                ),
                timeout=PATIENCE_SECONDS,
            )
            call: Any = stub.Steer()
            plans = asyncio.create_task(self._count_plans(call))
            step = 0
            while time.monotonic() < life_end:
                step += 1
                try:
                    await call.write(_steer(opened.session_id, _step(step, rng)))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    reason = f"{(await call.code()).name}: {await call.details()}"
                    self._result.failures.append(f"the stream of {engine_id} has ended: {reason}")
                    break
                await asyncio.sleep(_STEP_SECONDS)
            # By ending the stream, by cancelling it, or by closing the connection.
            ending = rng.randrange(3)
            if ending == 0:
                await call.done_writing()
                await asyncio.wait_for(call.code(), PATIENCE_SECONDS)
            elif ending == 1:
                call.cancel()
        plans.cancel()
        await asyncio.wait([plans])
        self._result.lives += 1

    async def _count_plans(self, call: Any) -> None:
        count = 0
        start = time.monotonic()
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                count += answer.HasField("plan")
        except grpc.aio.AioRpcError:
            pass  # the stream's end; what matters is whether there was a plan
        finally:
            self._result.plans += count
            lifetime = time.monotonic() - start
            self._result.without_plan += not count and lifetime >= _PLANNED_SECONDS

    async def decide(self) -> None:
        """Runs the honest engine, and notes how long each decision takes."""
        rng, step = random.Random(0), 0
        async with grpc.aio.insecure_channel(self._address, _OWN_CHANNEL) as channel:
            stub = service_pb2_grpc.SpeculationServiceStub(channel)
            opened = await stub.Introduce(
                service_pb2.IntroduceRequest(engine=engine_message(_HONEST), engine_secret="s"),
                timeout=PATIENCE_SECONDS,
            )
            while not self._has_ended:
                step += 1
                request = service_pb2.DecideRequest(
                    session_id=opened.session_id, report=_step(step, rng)
                )
                request_start = time.monotonic()
                try:
                    await stub.Decide(request, timeout=PATIENCE_SECONDS)
                except grpc.aio.AioRpcError as error:
                    self._result.failures.append(f"Decide: {error.code().name}: {error.details()}")
                    return
                elapsed = time.monotonic() - request_start
                self._result.delays.append((request_start - self._start, 1e3 * elapsed))
                await asyncio.sleep(_DECISION_SECONDS)

    async def operate(self) -> None:
        """Sets and clears overrides, each for some seconds."""
        async with grpc.aio.insecure_channel(operators_address(self._address)) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            number = 0
            while not self._has_ended:
                number += 1
                scope = (
                    policy_pb2.Scope(engine_id=_HONEST)
                    if number % _FLEET_INTERVAL
                    else policy_pb2.Scope(fleet=True)
                )
                await stub.SetOverride(
                    set_request(f"o{number}", number % 4, scope, ttl_seconds=30.0),
                    timeout=PATIENCE_SECONDS,
                )
                if number % 2:
                    await stub.ClearOverride(clear_request(f"o{number}"), timeout=PATIENCE_SECONDS)
                self._result.overrides += 1
                await asyncio.sleep(_OVERRIDE_SECONDS)

    async def poll_views(self, urls: Sequence[str]) -> None:
        """Reads the lists, the metrics and the page's state."""
        async with grpc.aio.insecure_channel(self._address, _OWN_CHANNEL) as channel:
            stub = service_pb2_grpc.InspectionServiceStub(channel)
            while not self._has_ended:
                await stub.ListEngines(
                    service_pb2.ListEnginesRequest(page_size=50), timeout=PATIENCE_SECONDS
                )
                for url in urls:
                    await asyncio.to_thread(_read, url)
                self._result.probes += 1
                await asyncio.sleep(_POLL_SECONDS)


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
async def _sample_sidecar(
    process: "subprocess.Popen[str]", result: CrowdResult, log: Path, tasks: Path, interval: float
) -> AsyncIterator[None]:
    """Samples the sidecar while the block runs."""
    start = time.monotonic()

    async def count() -> None:
        while True:
            await asyncio.sleep(interval)
            with suppress(FileNotFoundError):
                text = tasks.read_text()  # noqa: ASYNC240  # a number of four digits
                result.tasks.append((time.monotonic() - start, int(text)))

    sampler = Sampler({"sidecar": WatchedProcess(lambda: process.pid, lambda: log)}, interval)
    with sampler:
        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()
    result.samples = sampler.samples


async def _play(place: Path, engines: int, seconds: float) -> CrowdResult:
    result = CrowdResult()
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
            interval = min(max(seconds / _SAMPLES, _SAMPLE_SECONDS[0]), _SAMPLE_SECONDS[1])
            crowd = _Crowd(address, result, seconds)
            urls = (f"http://127.0.0.1:{metrics}/metrics", f"http://127.0.0.1:{page}/api/v1/state")
            async with (
                _sample_sidecar(process, result, log, tasks, interval),
                asyncio.TaskGroup() as group,
            ):
                for number in range(engines):
                    group.create_task(crowd.run_lives(number))
                group.create_task(crowd.decide())
                group.create_task(crowd.operate())
                group.create_task(crowd.poll_views(urls))
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
            if code:
                result.failures.append(f"the sidecar ended with {code}")
        finally:
            process.kill()
    result.failures += [line for line in log.read_text().splitlines() if '"call_failed"' in line]
    # In the first half every engine's history fills, and sessions that ended are still there.
    result.growths = growths([sample for sample in result.samples if sample.seconds >= seconds / 2])
    return result


def soak(engines: int, minutes: float) -> CrowdResult:
    """Runs it all.  Raises AssertionError and grpc.RpcError where a part does not even work."""
    with TemporaryDirectory(prefix="crowd-") as name:
        return asyncio.run(_play(Path(name), engines, 60.0 * minutes))


def p99(delays: Sequence[tuple[float, float]]) -> float:
    """The delay, in milliseconds, that one decision in a hundred takes longer than."""
    return quantiles([delay for _, delay in delays], n=100, method="inclusive")[-1]


def _document(result: CrowdResult, engines: int, minutes: float) -> dict[str, Any]:
    first = [delay_sample for delay_sample in result.delays if delay_sample[0] < 30 * minutes]
    last = [delay_sample for delay_sample in result.delays if delay_sample[0] >= 30 * minutes]
    return {
        "engines": engines,
        "minutes": minutes,
        "lives": result.lives,
        "plans": result.plans,
        "overrides": result.overrides,
        "looks": result.probes,
        "decisions": len(result.delays),
        "decision_ms_p50": median(delay for _, delay in result.delays),
        "decision_ms_p99": p99(result.delays),
        "decision_ms_p99_by_half": [p99(first), p99(last)],
        "tasks_first_last": [result.tasks[len(result.tasks) // 4][1], result.tasks[-1][1]],
        "growth": [asdict(growth) for growth in result.growths],
        "megabytes": [round(delay_sample.memory_megabytes, 1) for delay_sample in result.samples],
        "findings": result.findings,
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("build/soak/crowd.json"))
    parsed_arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    result = soak(parsed_arguments.engines, parsed_arguments.minutes)
    text = json.dumps(
        _document(result, parsed_arguments.engines, parsed_arguments.minutes), indent=1
    )
    parsed_arguments.output.parent.mkdir(parents=True, exist_ok=True)
    parsed_arguments.output.write_text(text + "\n")
    print(text)
    return int(bool(result.findings))


if __name__ == "__main__":
    raise SystemExit(main())

"""A real sidecar on a real unix socket, real client stubs, and an engine that speaks to them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from prometheus_client.samples import Sample

from controller.core.clock import Clock
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Fingerprint
from controller.service.metrics.family import MetricFamily, add_samples, samples
from controller.service.metrics.server import ENGINE_FAMILIES
from controller.service.server import Sidecar
from controller.service.sessions.session import EngineSession
from controller.service.views.engine_status import EngineSnapshot
from controller.settings.settings import Settings
from speculation.v1 import engine_pb2, plan_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc

GAMMAS = (0, 1, 2, 3)
MAX_BATCH_SIZE = 16
# Nothing here takes this long; a test that waits so long has failed.
PATIENCE_SECONDS = 60.0

# For processes of our own: what is importable here is importable there.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("CONTROLLER_")
} | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

T = TypeVar("T")


async def with_timeout(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, PATIENCE_SECONDS)


async def wait_until(condition: Any) -> None:
    """Lets the sidecar work until the condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  # the condition is the sidecar's state, no event
            await asyncio.sleep(0.005)


def secret_of(engine_id: str) -> str:
    """What the harness's engines introduce themselves with."""
    return f"the secret of {engine_id}"


def engine_message(
    engine_id: str = "engine-0",
    gammas: Sequence[int] = GAMMAS,
    target_model: str = "target",
    max_batch_size: int = MAX_BATCH_SIZE,
) -> engine_pb2.EngineSpec:
    return engine_pb2.EngineSpec(
        engine_id=engine_id,
        fingerprint=engine_pb2.Fingerprint(target_model=target_model, engine="virtual"),
        drafters=[engine_pb2.Drafter(name="mtp", kind=engine_pb2.DRAFTER_KIND_MTP, gammas=gammas)],
        max_batch_size=max_batch_size,
    )


def report_message(step: int, **changes: Any) -> engine_pb2.StepReport:
    """A report that is right: B = 4 at gamma 2, unless changed."""
    fields: dict[str, Any] = {
        "step": step,
        "batch_size": 4,
        "kv_tokens": 4096,
        "drafter": "mtp",
        "gamma": 2,
        "accepted_counts": [1, 1, 2],
        "step_seconds": 0.01,
    }
    return engine_pb2.StepReport(**fields | changes)


def step_seconds(gamma: int, batch_size: int) -> float:
    return 0.01 * (1 + 0.1 * gamma + 0.01 * batch_size * (gamma + 1))


def make_profile(target_model: str = "target", measured_at: str = "2020-01-01") -> Profile:
    """What measuring `step_seconds` gives, for the engine of `engine_message`."""
    cells = tuple(
        ProfileCell("mtp", gamma, size, step_seconds(gamma, size), 0.0, 20)
        for gamma in GAMMAS
        for size in (1, 2, 4, 8, MAX_BATCH_SIZE)
    )
    return Profile(
        Fingerprint(target_model, engine="virtual"),
        (DrafterIdentity("mtp"),),
        512.0,
        0.0,
        cells,
        measured_at=measured_at,
    )


@dataclass
class RunningSidecar:
    """A sidecar that serves, and stubs that are connected to it."""

    sidecar: Sidecar
    channel: grpc.aio.Channel
    operators: grpc.aio.Channel
    speculation: "service_pb2_grpc.SpeculationServiceAsyncStub" = field(init=False)
    inspection: "service_pb2_grpc.InspectionServiceAsyncStub" = field(init=False)
    profiling: "service_pb2_grpc.ProfilingServiceAsyncStub" = field(init=False)
    policy: "policy_pb2_grpc.PolicyServiceAsyncStub" = field(init=False)

    def __post_init__(self) -> None:
        self.speculation = service_pb2_grpc.SpeculationServiceStub(self.channel)
        self.inspection = service_pb2_grpc.InspectionServiceStub(self.channel)
        self.profiling = service_pb2_grpc.ProfilingServiceStub(self.operators)
        self.policy = policy_pb2_grpc.PolicyServiceStub(self.operators)

    async def introduce(self, engine_id: str = "engine-0", **engine: Any) -> str:
        """The session id."""
        request = service_pb2.IntroduceRequest(
            engine=engine_message(engine_id, **engine), engine_secret=secret_of(engine_id)
        )
        return (await with_timeout(self.speculation.Introduce(request))).session_id

    async def status(self, engine_id: str = "engine-0") -> service_pb2.EngineStatus:
        answer = await with_timeout(self.inspection.ListEngines(service_pb2.ListEnginesRequest()))
        return next(e for e in answer.engines if e.engine.engine_id == engine_id)

    async def explain(self, batch_size: int = 0) -> service_pb2.ExplainResponse:
        request = service_pb2.ExplainRequest(engine_id="engine-0", batch_size=batch_size)
        return await with_timeout(self.inspection.Explain(request))


@asynccontextmanager
async def running_sidecar(
    directory: Path, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[RunningSidecar]:
    """A sidecar on `directory`/controller.sock without metrics, unless the settings say else."""
    address = f"unix:{directory}/controller.sock"
    sidecar = Sidecar(Settings.load({"address": address, "metrics_port": 0} | settings), clock)
    operators = f"unix:{directory}/controller-operators.sock"
    async with (
        sidecar,
        grpc.aio.insecure_channel(address) as channel,
        grpc.aio.insecure_channel(operators) as by_operators,
    ):
        yield RunningSidecar(sidecar, channel, by_operators)


def session_metrics(session: EngineSession) -> dict[tuple[str, ...], float]:
    """Its metrics as a scrape would show them: by name, and value of their own label."""
    view = EngineSnapshot.from_session(session)
    return {
        (sample.name, *list(sample.labels.values())[1:]): sample.value
        for family in ENGINE_FAMILIES
        for sample in render_family(family, view)
    }


def render_family(family: MetricFamily[Any], source: Any) -> Sequence[Sample]:
    """Its samples as a scrape has them, of an engine "e" where it is of an engine."""
    common = {"engine": "e"} if family in ENGINE_FAMILIES else {}
    target = family.make_empty(*common)
    add_samples(samples(family, source), target, *common.values())
    return target.samples


async def read_next(call: "grpc.aio.StreamStreamCall[Any, T]") -> T:
    """The next answer.  Raises grpc.aio.AioRpcError when the stream ended badly."""
    answer = await with_timeout(call.read())
    assert answer is not grpc.aio.EOF, "the stream ended"
    return cast("T", answer)


def health_stub(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """The health service's stub, whose types do not name its methods."""
    return health_pb2_grpc.HealthStub(channel)


class SteerClient:
    """One Steer stream, as an agent has it."""

    def __init__(self, running: RunningSidecar, session_id: str) -> None:
        self.session_id = session_id
        self.call = running.speculation.Steer()

    async def send(
        self, *reports: engine_pb2.StepReport, session_id: str = "", dropped: int = 0
    ) -> None:
        await with_timeout(
            self.call.write(
                service_pb2.SteerRequest(
                    session_id=session_id or self.session_id,
                    reports=reports,
                    dropped_reports=dropped,
                )
            )
        )

    async def read(self) -> service_pb2.SteerResponse:
        """Raises grpc.aio.AioRpcError when the stream ended badly."""
        return await read_next(self.call)

    async def plan(self) -> plan_pb2.Plan:
        while True:
            answer = await self.read()
            if answer.HasField("plan"):
                return answer.plan

    async def rejections(self) -> list[service_pb2.ReportRejection]:
        while True:
            answer = await self.read()
            if answer.rejections:
                return list(answer.rejections)

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Reads on to the end; its status."""
        with suppress(grpc.aio.AioRpcError):
            while await with_timeout(self.call.read()) is not grpc.aio.EOF:
                pass
        return await with_timeout(self.call.code()), await with_timeout(self.call.details()) or ""


async def failure(awaitable: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """The status that a call fails with."""
    try:
        await with_timeout(awaitable)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call succeeded")

"""Run by test_packaging in small environments: are the stubs good with the gRPC that is here?

Sends a message through every kind of call that the contract has, over a unix socket, once with the
threaded and once with the asyncio side of gRPC, and prints the versions it ran on.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from concurrent import futures
from importlib.metadata import version

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from speculation.v1 import engine_pb2, plan_pb2, service_pb2, service_pb2_grpc

REPORT = engine_pb2.StepReport(
    step=7,
    batch_size=3,
    kv_tokens=1200,
    drafter="eagle3",
    gamma=2,
    accepted_counts=[1, 0, 2],
    step_seconds=0.0125,
    flags=engine_pb2.StepFlags(after_gap=True),
)
PLAN = plan_pb2.Plan(
    epoch=4,
    rows=[
        plan_pb2.PlanRow(
            max_batch_size=8,
            drafter="eagle3",
            gamma=3,
            probe=plan_pb2.Probe(probe_id=1, drafter="eagle3", gamma=5, steps=2),
            reason=plan_pb2.REASON_PROBE,
        ),
        plan_pb2.PlanRow(max_batch_size=64, reason=plan_pb2.REASON_EXPLOIT),
    ],
    lease_ms=2000,
)


class Threaded(service_pb2_grpc.SpeculationServiceServicer):
    """Answers `Decide` with what the report says."""

    def Decide(
        self, request: service_pb2.DecideRequest, context: grpc.ServicerContext
    ) -> service_pb2.DecideResponse:
        """Refuses any report but the one that was sent."""
        if request.report != REPORT:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not the report that was sent")
        return service_pb2.DecideResponse(drafter=request.report.drafter, gamma=3)


class Streaming(service_pb2_grpc.SpeculationServiceServicer):
    """Answers every `Steer` message with the plan."""

    async def Steer(
        self,
        request_iterator: AsyncIterator[service_pb2.SteerRequest],
        context: grpc.aio.ServicerContext[service_pb2.SteerRequest, service_pb2.SteerResponse],
    ) -> AsyncIterator[service_pb2.SteerResponse]:
        """Refuses any report but the one that was sent."""
        async for request in request_iterator:
            if list(request.reports) != [REPORT]:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not the report sent")
            yield service_pb2.SteerResponse(plan=PLAN)


def threaded(address: str) -> None:
    """One unary call."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    servicer = Threaded()  # type: ignore[abstract]  # the other calls stay unimplemented
    service_pb2_grpc.add_SpeculationServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        answer = stub.Decide(service_pb2.DecideRequest(report=REPORT), timeout=60)
    server.stop(None)
    assert (answer.drafter, answer.gamma) == ("eagle3", 3), answer


async def streaming(address: str) -> None:
    """One stream, beside the health and reflection services."""
    server = grpc.aio.server()
    servicer = Streaming()  # type: ignore[abstract]  # the other calls stay unimplemented
    service_pb2_grpc.add_SpeculationServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection(["speculation.v1.SpeculationService"], server)
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = service_pb2_grpc.SpeculationServiceStub(channel).Steer(timeout=60)
        for _ in range(3):
            await call.write(service_pb2.SteerRequest(session_id="s", reports=[REPORT]))
            answer = await call.read()
            assert isinstance(answer, service_pb2.SteerResponse), answer
            assert answer.plan == PLAN, answer
            assert answer.plan.rows[0].HasField("probe")
            assert not answer.plan.rows[1].HasField("probe")
        await call.done_writing()
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        status = await check(health_pb2.HealthCheckRequest(), timeout=60)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)


def main() -> None:
    """Runs both and prints the versions."""
    plan = plan_pb2.Plan.FromString(PLAN.SerializeToString())
    assert plan == PLAN, plan
    with tempfile.TemporaryDirectory() as directory:
        threaded(f"unix:{directory}/threaded.sock")
        asyncio.run(streaming(f"unix:{directory}/streaming.sock"))
    print(json.dumps({name: version(name) for name in ("grpcio", "protobuf", "numpy")}))


if __name__ == "__main__":
    main()

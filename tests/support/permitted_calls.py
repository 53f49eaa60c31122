"""What a caller may do: the status of one call of each kind."""

from typing import Any

import grpc
import grpc.aio

from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.override_calls import make_override_request
from tests.support.service_harness import engine_message, with_timeout


class CallProbe:
    """The status of each kind of call, made with a token."""

    def __init__(self, channel: grpc.aio.Channel, token: str = "") -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def _code(self, call: Any) -> grpc.StatusCode:
        try:
            await with_timeout(call)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def read(self) -> grpc.StatusCode:
        stub = service_pb2_grpc.InspectionServiceStub(self._channel)
        request = service_pb2.ListEnginesRequest()
        return await self._code(stub.ListEngines(request, metadata=self._metadata))

    async def steer(self) -> grpc.StatusCode:
        stub = service_pb2_grpc.SpeculationServiceStub(self._channel)
        request = service_pb2.IntroduceRequest(engine=engine_message("caller"))
        return await self._code(stub.Introduce(request, metadata=self._metadata))

    async def override(self, name: str) -> grpc.StatusCode:
        stub = policy_pb2_grpc.PolicyServiceStub(self._channel)
        request = make_override_request(name, scope={"fleet": True}, off=True)
        return await self._code(stub.SetOverride(request, metadata=self._metadata))

    async def watch(self) -> grpc.StatusCode:
        stub: Any = policy_pb2_grpc.PolicyServiceStub(self._channel)
        call = stub.WatchOverrides(policy_pb2.WatchOverridesRequest(), metadata=self._metadata)
        code = await self._code(call.read())
        call.cancel()
        return code

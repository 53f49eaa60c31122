"""What answers commands in the place of a sidecar, and gives what no sidecar gives."""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from speculation.v1 import policy_pb2, service_pb2

# Makes a page's token and how many bytes its rows have, from the number of the page.
Paging = Callable[[int], tuple[str, int]]
# Of each method that lists: its answer, the field of its rows, and of their words.
_LISTS: Mapping[str, tuple[type[Message], str, str]] = {
    "InspectionService/Overview": (service_pb2.OverviewResponse, "engines", "engine_id"),
    "InspectionService/ListFleet": (service_pb2.ListFleetResponse, "engines", "engine_id"),
    "InspectionService/ListEngines": (
        service_pb2.ListEnginesResponse, "engines", "engine.engine_id",
    ),
    "ProfilingService/ListProfiles": (
        service_pb2.ListProfilesResponse, "profiles", "profile_id",
    ),
    "PolicyService/QueryAudit": (policy_pb2.QueryAuditResponse, "records", "reason"),
    "PolicyService/ListOverrides": (
        policy_pb2.ListOverridesResponse, "overrides", "override.reason",
    ),
}  # fmt: skip


class HostileSidecar(grpc.GenericRpcHandler):
    """Lists pages by a rule, of rows whose words are `words`.  pages: how many it has given."""

    def __init__(self, paging: Paging, words: str = "") -> None:
        self.pages = 0
        self.address = ""
        self._paging = paging
        self._words = words

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Other calls are answered as gRPC does for what is not there."""
        name = handler_call_details.method.removeprefix("/speculation.v1.")
        if name not in _LISTS:
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._page(name),
            response_serializer=lambda answer: answer.SerializeToString(),
        )

    def _page(self, name: str) -> Any:
        kind, rows, words = _LISTS[name]
        answer: Any = kind()
        self.pages += 1
        answer.next_page_token, size = self._paging(self.pages)
        row = getattr(answer, rows).add()
        inner, _, field = words.rpartition(".")
        setattr(getattr(row, inner) if inner else row, field, self._words + "x" * size)
        if kind is policy_pb2.QueryAuditResponse:
            row.override_id, row.at = row.reason, 1e300
            # `override log` ends when it has as many records as it wants.
            if answer.next_page_token:
                del answer.records[:]
        return answer


@contextmanager
def hostile_sidecar(paging: Paging, words: str = "") -> Iterator[HostileSidecar]:
    """Serves on a port of the loopback address."""
    sidecar = HostileSidecar(paging, words)
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[sidecar])
    sidecar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield sidecar
    finally:
        server.stop(None).wait()

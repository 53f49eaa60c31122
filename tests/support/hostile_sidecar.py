"""What answers commands in the place of a sidecar, and gives what no sidecar gives."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from speculation.v1 import (
    policy_pb2,
    policy_pb2_grpc,
    service_pb2,
    service_pb2_grpc,
)

# Makes a page's token and how many bytes its rows have, from the number of the page.
Paging = Callable[[int], tuple[str, int]]


class HostileSidecar:
    """Lists pages by a rule, of rows whose words are `words`.  pages: how many it has given."""

    def __init__(self, paging: Paging, words: str = "") -> None:
        self.pages = 0
        self.address = ""
        self._paging = paging
        self._words = words

    def _fill(self, answer: Any, rows: str, name: str) -> Any:
        self.pages += 1
        answer.next_page_token, size = self._paging(self.pages)
        row = getattr(answer, rows).add()
        if name:
            inner, _, field = name.rpartition(".")
            setattr(getattr(row, inner) if inner else row, field, self._words + "x" * size)
        return answer

    def serve(self, server: grpc.Server) -> None:
        """Adds every call that lists."""
        fill = self._fill

        class Inspection(service_pb2_grpc.InspectionServiceServicer):
            def Overview(self, request: Any, context: Any) -> Any:
                return fill(service_pb2.OverviewResponse(), "engines", "engine_id")

            def ListFleet(self, request: Any, context: Any) -> Any:
                return fill(service_pb2.ListFleetResponse(), "engines", "engine_id")

            def ListEngines(self, request: Any, context: Any) -> Any:
                return fill(service_pb2.ListEnginesResponse(), "engines", "engine.engine_id")

        class Profiling(service_pb2_grpc.ProfilingServiceServicer):
            def ListProfiles(self, request: Any, context: Any) -> Any:
                return fill(service_pb2.ListProfilesResponse(), "profiles", "profile_id")

        class Policy(policy_pb2_grpc.PolicyServiceServicer):
            def QueryAudit(self, request: Any, context: Any) -> Any:
                answer = fill(policy_pb2.QueryAuditResponse(), "records", "reason")
                answer.records[0].override_id = answer.records[0].reason
                answer.records[0].at = 1e300
                # `override log` ends when it has as many records as it wants.
                if answer.next_page_token:
                    del answer.records[:]
                return answer

            def ListOverrides(self, request: Any, context: Any) -> Any:
                return fill(policy_pb2.ListOverridesResponse(), "overrides", "override.reason")

        # Other calls are answered as gRPC does for what is not there.
        service_pb2_grpc.add_InspectionServiceServicer_to_server(
            Inspection(),  # type: ignore[abstract]
            server,
        )
        service_pb2_grpc.add_ProfilingServiceServicer_to_server(
            Profiling(),  # type: ignore[abstract]
            server,
        )
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            Policy(),  # type: ignore[abstract]
            server,
        )


@contextmanager
def hostile_sidecar(paging: Paging, words: str = "") -> Iterator[HostileSidecar]:
    """Serves on a port of the loopback address."""
    found = HostileSidecar(paging, words)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    found.serve(server)
    found.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(None).wait()

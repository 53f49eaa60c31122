"""A collector of OpenTelemetry that keeps what it is sent: a real OTLP/gRPC server."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """spans, records: in the order in which they came; resource: of the last ones."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.records: list[LogRecord] = []
        self.resource: dict[str, Any] = {}
        self.endpoint = ""


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for of_resource in request.resource_spans:
            self._collector.resource = plain(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self._collector.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(
        self, request: logs_service_pb2.ExportLogsServiceRequest, context: grpc.ServicerContext
    ) -> logs_service_pb2.ExportLogsServiceResponse:
        for of_resource in request.resource_logs:
            for scope in of_resource.scope_logs:
                self._collector.records.extend(scope.log_records)
        return logs_service_pb2.ExportLogsServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """Serves on `endpoint` inside the block."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(collector), server)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(collector), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as Python values."""
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None

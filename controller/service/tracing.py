"""Exports traces of decisions and of operators' calls, and logs, to OpenTelemetry.

There is a span for every decision that changes what an engine does, and for every unary call of an
operator or a reader.  Steps, reports, renewed leases and open streams have no spans.  If a
call changes plans, its span is the parent of those decisions.  Separate threads send the sampled
spans to the collector in batches.  While the collector is unavailable, spans are dropped, and the
log reports that.

This module is imported only if a collector is configured, because its packages are an extra.
"""

from typing import Any

import grpc
import grpc.aio
from opentelemetry._logs import LogRecord
from opentelemetry._logs.severity import SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import controller
from controller.core.errors import SpeculationError
from controller.core.plan import Plan
from controller.service.net.errors import status_message
from controller.service.sessions.session import EngineSession
from controller.util import logs
from speculation.v1 import policy_pb2, service_pb2

# The longest attempt to export a batch, and so about the longest wait for the collector at the end.
_EXPORT_SECONDS = 2.0
_EXPORTER_LOGGER = "opentelemetry"
_SEVERITY = {
    "debug": SeverityNumber.DEBUG,
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
    "critical": SeverityNumber.FATAL,
}


class Tracing:
    """Exports the traces.

    endpoint: of an OTLP/gRPC collector, http[s]://HOST:PORT.  ratio: share of traces that are kept;
    a trace that the caller has sampled is always kept.
    """

    def __init__(self, endpoint: str, ratio: float) -> None:
        self._endpoint = endpoint
        self._insecure = endpoint.startswith("http://")
        self._resource = Resource.create(
            {"service.name": "speculation-controller", "service.version": controller.__version__}
        )
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._traces = TracerProvider(sampler, self._resource, shutdown_on_exit=False)
        self._traces.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint, insecure=self._insecure, timeout=_EXPORT_SECONDS)
            )
        )
        self._tracer = self._traces.get_tracer(__name__, controller.__version__)
        self._logs: LoggerProvider | None = None

    @property
    def interceptor(self) -> grpc.aio.ServerInterceptor:
        """Traces the unary calls of operators and readers."""
        return _CallSpans(self._tracer)

    def record_decision(
        self, session: EngineSession, previous_plan: Plan, began_unix_ns: int
    ) -> None:
        """Records a span of this decision.  began_unix_ns: Unix nanoseconds."""
        plan, last_report = session.plan, session.last_report
        size = last_report.batch_size if last_report else 1
        row, previous_row = plan.row_for(size), previous_plan.row_for(size)
        span = self._tracer.start_span("decision", start_time=began_unix_ns)
        if span.is_recording():
            span.set_attributes(
                {
                    "speculation.engine": session.engine_id,
                    "speculation.decision": session.decision_id,
                    "speculation.epoch": plan.epoch,
                    "speculation.reason": plan.reason.value,
                    "speculation.reason_detail": plan.reason_detail,
                    "speculation.batch_size": size,
                    "speculation.drafter": row.arm.drafter,
                    "speculation.gamma": row.arm.gamma,
                    "speculation.drafter.before": previous_row.arm.drafter,
                    "speculation.gamma.before": previous_row.arm.gamma,
                    "speculation.regime": str(plan.regime),
                    "speculation.draft_version": plan.draft_version,
                    "speculation.overrides": list(plan.overrides),
                    "speculation.reports": session.counters.reports,
                }
            )
        span.end()

    def send_logs(self) -> None:
        """Exports log lines too from now on."""
        self._logs = LoggerProvider(self._resource, shutdown_on_exit=False)
        exporter = OTLPLogExporter(self._endpoint, self._insecure, timeout=_EXPORT_SECONDS)
        self._logs.add_log_record_processor(BatchLogRecordProcessor(exporter))
        logs.add_listener(self._send)

    def _send(self, line: logs.Line) -> None:
        """Exports a line; the exporter's own lines stay on standard error."""
        name, level = str(line.get("logger", "")), str(line.get("level", "info"))
        if self._logs is None or name.startswith(_EXPORTER_LOGGER):
            return
        attributes = {
            key: _attribute_value(value) for key, value in line.items() if key not in _RECORD_FIELDS
        }
        self._logs.get_logger(name).emit(
            LogRecord(
                severity_text=level,
                severity_number=_SEVERITY.get(level, SeverityNumber.INFO),
                body=str(line.get("event", "")),
                attributes=attributes,
            )
        )

    def close(self) -> None:
        """Exports what is left, with a time limit.  Blocks."""
        self._traces.shutdown()
        if self._logs is not None:
            logs.remove_listener(self._send)
            self._logs.shutdown()


# Keys of a log line that the record has as fields of its own.
_RECORD_FIELDS = {"event", "level", "logger", "timestamp"}

# Methods that operators and readers call; those of engines and their trainers are not traced.
_OPERATOR_METHODS = {
    f"/{service.full_name}/{method.name}"
    for service in (
        policy_pb2.DESCRIPTOR.services_by_name["PolicyService"],
        service_pb2.DESCRIPTOR.services_by_name["InspectionService"],
        service_pb2.DESCRIPTOR.services_by_name["ProfilingService"],
    )
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
}


class _CallSpans(grpc.aio.ServerInterceptor):
    """Makes a span around each traced call, as a child of the caller's span if it sends one.

    The interceptor of the instrumentation package cannot be used.  It expects an address and a port
    of every peer, which a Unix socket does not have, and fails the call.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Part of the interceptor's interface."""
        handler = await continuation(details)
        if handler is None or details.method not in _OPERATOR_METHODS:
            return handler
        service, _, method = details.method.strip("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        metadata = dict(details.invocation_metadata or ())

        async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            span = self._tracer.start_as_current_span(
                f"{service}/{method}",
                self._propagator.extract(metadata),
                SpanKind.SERVER,
                attributes,
                record_exception=False,
                set_status_on_exception=False,
            )
            with span as call:
                try:
                    return await handler.unary_unary(request, context)
                except SpeculationError as error:
                    # The guard ends the call with this status.
                    status = status_message(error)
                    call.set_attribute("rpc.grpc.status_code", status.code)
                    call.set_status(StatusCode.ERROR, status.message)
                    raise
                except BaseException:
                    status_code: Any = context.code()  # a bare number if no code was set
                    code = (
                        status_code
                        if isinstance(status_code, grpc.StatusCode)
                        else grpc.StatusCode.UNKNOWN
                    )
                    call.set_attribute("rpc.grpc.status_code", code.value[0])
                    call.set_status(StatusCode.ERROR, context.details())
                    raise

        return grpc.unary_unary_rpc_method_handler(
            traced, handler.request_deserializer, handler.response_serializer
        )


def _attribute_value(value: object) -> str | bool | int | float:
    return value if isinstance(value, str | bool | int | float) else str(value)

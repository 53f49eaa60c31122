"""Checks every call before its servicer: the caller, the caller's right, and the rate of calls.

Every server has its own guard, with its own way to identify callers and its own limits.  The
engines' server therefore never identifies a caller as an operator, and callers on TCP do not use up
the limits of engines on the unix socket.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from controller.core.errors import SpeculationError
from controller.service.net import callers, limits
from controller.service.net.access import Identify
from controller.service.net.callers import Call, Right
from controller.service.net.errors import (
    ForbiddenError,
    SidecarFailedError,
    TooManyCallsError,
    abort,
)
from controller.service.net.request_parsing import AdmissionQueue, read_after_admission

_OVERRIDE_METHODS = {"SetOverride", "ClearOverride"}
_PROFILING_RIGHTS = {
    "ListProfiles": Right.READ,
    "GetProfile": Right.READ,
    "Measure": Right.MEASURE,
    "InstallProfile": Right.INSTALL,
    "PushProfile": Right.INSTALL,
}
# Calls per second, and burst, of one source (`callers.limit_source`), by the required right.
LIMITS: Final[Mapping[Right, tuple[float, float]]] = {
    Right.READ: (100.0, 400.0),
    Right.STEER: (50_000.0, 100_000.0),
    Right.MEASURE: (20.0, 200.0),
    Right.INSTALL: (20.0, 200.0),
    Right.OVERRIDE: (20.0, 200.0),
}
# All sources of one server together may make this multiple of one source's calls.
TOTAL_LIMIT_FACTOR: Final = 4
# Open streams of one server that only watch, for example health or overrides.
WATCHES_MAX = 64

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def _report_failures(context: Any, method: str) -> AsyncIterator[None]:
    """Ends a refused call with its status and details, and a failed one with a general status.

    gRPC itself would send clients the text of any error.
    """
    try:
        yield
    except grpc.aio.BaseError:
        # The call has ended already.
        raise
    except SpeculationError as error:
        await abort(context, error)
    except Exception:  # noqa: BLE001  # the client needs a status, whatever has failed
        _log.exception("call_failed", method=method)
        await abort(context, SidecarFailedError())


def required_right(method: str) -> Right:
    """Returns the right that a call of /package.Service/Method requires."""
    kind = method.strip("/").partition("/")[0].rpartition(".")[2]
    name = method.rpartition("/")[2]
    if kind == "Health":
        return Right.NONE
    if kind == "PolicyService" and name in _OVERRIDE_METHODS:
        return Right.OVERRIDE
    if kind == "ProfilingService":
        return _PROFILING_RIGHTS.get(name, Right.INSTALL)
    return Right.STEER if kind in {"SpeculationService", "TrainingService"} else Right.READ


class _CallLimit:
    """Limits the calls of each source, and those of all sources of a server together."""

    def __init__(self, rate_per_second: float, burst: float) -> None:
        self._rate_per_second = rate_per_second
        self._total = limits.TokenBucket(
            TOTAL_LIMIT_FACTOR * rate_per_second, TOTAL_LIMIT_FACTOR * burst
        )
        self._by_source = limits.LimitBySource(lambda: limits.TokenBucket(rate_per_second, burst))

    def count_call(self, source: str) -> None:
        """Counts a call.  Raises TooManyCallsError; a refused call does not use the total limit."""
        if not self._by_source.limit_for(source).try_consume():
            raise TooManyCallsError(
                f"too many calls of this kind: a caller may make {self._rate_per_second:g} a "
                "second; try "
                "again in a moment"
            )
        if not self._total.try_consume():
            raise TooManyCallsError(
                "too many calls of this kind by all callers together: try again in a moment"
            )


class Guard(grpc.aio.ServerInterceptor):
    """Checks the calls of one server.

    identify: identifies the caller of a call.  operators: path of the operators' socket, for error
    messages.  waiting_max: calls that may wait for their first message at the same time.
    """

    def __init__(self, identify: Identify, operators: str, waiting_max: int) -> None:
        self._identify = identify
        self._operators = operators
        self._admission_queue = AdmissionQueue(waiting_max)
        self._call_limits = {right: _CallLimit(*limit) for right, limit in LIMITS.items()}
        self._open_watches = 0
        # Open streams that require a right.
        self._open_streams: dict[Call, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Wraps the call's handler with the check."""
        handler = await continuation(handler_call_details)
        right = required_right(handler_call_details.method)
        if handler is None:
            return None
        is_stream = handler.request_streaming or handler.response_streaming

        @asynccontextmanager
        async def admitted(context: Any) -> AsyncIterator[None]:
            try:
                call = self._admit(context, right)
                if is_stream and right in {Right.NONE, Right.READ}:
                    self._count_watch(context)
            except SpeculationError as error:
                await abort(context, error)
            if call is None or not is_stream:
                async with _report_failures(context, handler_call_details.method):
                    yield
                return
            call.task = asyncio.current_task()
            self._open_streams[call] = context
            try:
                async with _report_failures(context, handler_call_details.method):
                    yield
            except asyncio.CancelledError:
                if call.revocation_error is None or call.task is None:
                    raise
                call.task.uncancel()
                await abort(context, call.revocation_error)
            finally:
                del self._open_streams[call]

        bytes_max = limits.message_bytes_max(handler_call_details.method)
        return read_after_admission(handler, self._admission_queue, admitted, bytes_max)

    def recheck_streams(self) -> None:
        """Ends the open streams whose callers have lost the right to them."""
        for call, context in list(self._open_streams.items()):
            if call.revocation_error is not None:
                continue
            try:
                caller = self._identify(context)
                self._require(caller, call.right)
                caller.require_engines(call.engine_ids)
            except SpeculationError as error:
                _log.warning("stream_revoked", caller=call.caller.name, error=str(error))
                call.revoke(error)

    def _admit(self, context: Any, right: Right) -> Call | None:
        if right is Right.NONE:
            return None
        caller = self._identify(context)
        self._require(caller, right)
        call = Call(caller, right, callers.limit_source(caller, context.peer() or ""))
        self._call_limits[right].count_call(call.source)
        callers.set_current_call(call)
        return call

    def _require(self, caller: callers.Caller, right: Right) -> None:
        if right in caller.rights:
            return
        name = (right.name or "").lower()
        message = f"{caller.name} does not have the right to {name} here"
        if right not in {Right.READ, Right.STEER}:
            message += f": use the operators' socket, unix:{self._operators}, or an access list "
            message += f"entry with {name}"
        raise ForbiddenError(message)

    def _count_watch(self, context: Any) -> None:
        """Counts a stream that only watches.  Raises TooManyCallsError."""
        if self._open_watches >= WATCHES_MAX:
            raise TooManyCallsError(f"{WATCHES_MAX} such streams are open already: close some")
        self._open_watches += 1
        context.add_done_callback(lambda _: self._uncount_watch())

    def _uncount_watch(self) -> None:
        self._open_watches -= 1

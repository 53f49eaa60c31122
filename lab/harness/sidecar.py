"""Connects to the sidecar: to watch what it decides, to pin an engine, to override its policy."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Final, Self

import grpc

from controller.client.paging import collect_pages
from controller.util.sockets import operators_address
from lab.harness.errors import HarnessError
from speculation.v1 import engine_pb2, plan_pb2, service_pb2, service_pb2_grpc

# The drafter that every engine of a run has; the steered one may have another besides.
OWN_DRAFTER = "eagle3"

_CALL_SECONDS = 5.0
# A busy machine delays reports by a second or two.
_REPORTS_SECONDS = 60.0
_POLL_SECONDS = 0.01
# Ends a command that hangs.
_COMMAND_SECONDS: Final = 120.0
# Numbers the overrides, so that no name is used twice.
_override_numbers = count()


class SidecarHandle:
    """A connection to a running sidecar.  Leaving the context closes it."""

    def __init__(self, address: str, engine_id: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._inspection = service_pb2_grpc.InspectionServiceStub(self._channel)
        self._operator_channel = grpc.insecure_channel(operators_address(address))
        self._profiling = service_pb2_grpc.ProfilingServiceStub(self._operator_channel)
        self.engine_id = engine_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._operator_channel.close()

    def is_serving(self) -> bool:
        """Whether the sidecar answers."""
        try:
            self._list()
        except grpc.RpcError:
            return False
        return True

    def is_introduced(self) -> bool:
        """Whether the engine has introduced itself."""
        try:
            return self._find_status() is not None
        except grpc.RpcError:
            return False

    def status(self) -> service_pb2.EngineStatus:
        """Returns the engine's status.  Raises HarnessError when the sidecar does not know it."""
        try:
            status = self._find_status()
        except grpc.RpcError as error:
            raise HarnessError(f"the sidecar does not answer: {error}") from error
        if status is None:
            raise HarnessError(f"the sidecar does not know an engine {self.engine_id!r}")
        return status

    def explain(self, batch_size: int) -> service_pb2.ExplainResponse:
        """Returns the decision row at a batch size."""
        request = service_pb2.ExplainRequest(engine_id=self.engine_id, batch_size=batch_size)
        return self._inspection.Explain(request, timeout=_CALL_SECONDS)

    def reason_text(self) -> str:
        """Reason and detail of the plan in force."""
        plan = self.status().plan
        return f"{plan_pb2.Reason.Name(plan.reason)}: {plan.reason_detail}"

    @contextmanager
    def pinned(self, gamma: int, drafter: str = OWN_DRAFTER) -> Iterator["Pin"]:
        """Holds the engine to this arm in every batch, as it is while it is profiled.

        Raises HarnessError when the sidecar refuses.
        """
        requests: queue.SimpleQueue[service_pb2.MeasureRequest | None] = queue.SimpleQueue()
        pin = Pin(requests, self.engine_id)
        pin.move(gamma, drafter)
        responses = self._profiling.Measure(iter(requests.get, None))
        try:
            next(responses)  # the force is in a plan now
        except (grpc.RpcError, StopIteration) as error:
            raise HarnessError(
                f"the sidecar does not pin {drafter} gamma {gamma}: {error}"
            ) from error
        drain = threading.Thread(
            target=_drain, args=(responses, pin.reports), name="pin", daemon=True
        )
        drain.start()
        try:
            yield pin
        finally:
            requests.put(None)
            drain.join(_CALL_SECONDS)
            responses.cancel()

    def _list(self, page_token: str = "") -> service_pb2.ListEnginesResponse:
        request = service_pb2.ListEnginesRequest(page_token=page_token)
        return self._inspection.ListEngines(request, timeout=_CALL_SECONDS)

    def _find_status(self) -> service_pb2.EngineStatus | None:
        for engine in collect_pages(self._list).engines:
            if engine.engine.engine_id == self.engine_id:
                return engine
        return None


def count_tokens(reports: Sequence[engine_pb2.StepReport]) -> int:
    """Counts the tokens that steps have made: accepted drafts, and one of the target for each."""
    return sum(
        count_decoded_rows(report) + sum(k * rows for k, rows in enumerate(report.accepted_counts))
        for report in reports
    )


def count_decoded_rows(report: engine_pb2.StepReport) -> int:
    """Counts the sequences that gained a token: those whose requests had not ended before."""
    ended = sum(sum(group.accepted_counts) for group in report.groups if group.ended)
    return sum(report.accepted_counts) - ended


def find_row(plan: plan_pb2.Plan, batch_size: int) -> plan_pb2.PlanRow:
    """Returns the row of a plan that serves a batch size."""
    rows = plan.rows
    return next((row for row in rows if batch_size <= row.max_batch_size), rows[-1])


class Pin:
    """Pins an engine to an arm.  reports: its steps since then, in order, of other arms as well."""

    def __init__(
        self, requests: queue.SimpleQueue[service_pb2.MeasureRequest | None], engine_id: str
    ) -> None:
        self.reports: list[engine_pb2.StepReport] = []
        self._requests = requests
        self._engine_id = engine_id

    def move(self, gamma: int, drafter: str = OWN_DRAFTER) -> None:
        """Moves the engine to another arm, within a few steps."""
        self._requests.put(
            service_pb2.MeasureRequest(engine_id=self._engine_id, drafter=drafter, gamma=gamma)
        )

    def reports_since(
        self,
        first: int,
        tokens: int,
        count: Callable[[Sequence[engine_pb2.StepReport]], int] = count_tokens,
    ) -> list[engine_pb2.StepReport]:
        """Returns the reports after the first `first`, once their steps have made `tokens` tokens.

        Reports arrive after the answers that they are about.  count: counts the tokens of reports.
        Raises HarnessError when they do not arrive.
        """
        deadline = time.monotonic() + _REPORTS_SECONDS
        while count(reports := self.reports[first:]) < tokens:
            if time.monotonic() > deadline:
                raise HarnessError(
                    f"{self._engine_id} reported {count(reports)} of {tokens} tokens within "
                    f"{_REPORTS_SECONDS:g} s"
                )
            time.sleep(_POLL_SECONDS)
        return reports


def _drain(
    responses: Iterator[service_pb2.MeasureResponse], reports: list[engine_pb2.StepReport]
) -> None:
    try:
        for response in responses:
            reports.extend(response.reports)
    except grpc.RpcError:
        return  # the stream is over, which is all that is waited for


@contextmanager
def temporary_override(address: str, *rule: str, engine_id: str = "") -> Iterator[None]:
    """Sets an override with these options of `controller override set`, then clears it.

    address: of the sidecar.  engine_id: whom it is for; "" for the fleet.  Raises HarnessError
    where the sidecar refuses.
    """
    name = f"lab-{next(_override_numbers)}"
    scope = ("--engine", engine_id) if engine_id else ("--fleet",)
    author = ("--author", "lab", "--reason", "a measurement")
    _run_controller(address, "override", "set", "--id", name, *scope, *rule, *author)
    try:
        yield
    finally:
        _run_controller(address, "override", "clear", name, *author)


def _run_controller(address: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "controller.cli", *arguments, "--address", address],
        capture_output=True,
        text=True,
        check=False,
        timeout=_COMMAND_SECONDS,
    )
    if done.returncode:
        raise HarnessError(f"controller {' '.join(arguments)}: {done.stderr.strip()}")

"""A sidecar with a script: a real grpc.aio server with the real stubs, in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self

import grpc

from lab.harness.errors import HarnessError
from lab.harness.sidecar import count_decoded_rows
from speculation.v1.engine_pb2 import EngineSpec, StepReport
from speculation.v1.plan_pb2 import (
    REASON_EXPLOIT,
    REGIME_MODE_COLLECT,
    REGIME_MODE_OFF,
    REGIME_MODE_ONLINE,
    MixtureRule,
    Plan,
    PlanRow,
    Regime,
)
from speculation.v1.service_pb2 import (
    DecideRequest,
    DecideResponse,
    IntroduceRequest,
    IntroduceResponse,
    SteerRequest,
    SteerResponse,
)
from speculation.v1.service_pb2_grpc import (
    SpeculationServiceServicer,
    add_SpeculationServiceServicer_to_server,
)

# After this time without a report, those of all steps that ran have arrived; the longest wait for
# an engine that never pauses.
_REST_SECONDS: Final = 0.05
_REST_SECONDS_MAX: Final = 2.0
# A busy machine delays reports by a second or two.
_REPORTS_SECONDS: Final = 90.0
_POLL_SECONDS: Final = 0.01

Arm = tuple[int, bool] | tuple[int, bool, int]
"""Draft length, whether the drafter sleeps, and which of the engine's drafters (the first)."""
Script = Callable[[int], Arm]
"""Gives the arm to run, by the number of reports that have arrived."""


class ScriptedSidecar(SpeculationServiceServicer):
    """Answers an introduction and every Steer message with the script's next plan.

    It can be started again on the same address.  `push` sends a plan at any time.  To change the
    answers, set `first_plan` (of an introduction) and `answer` (of a message; None for none).

    stride: rounds between online updates, 0 for none.  collect: training signals are kept; a script
    may change it with each plan.  collecting: the epochs that asked for it.
    draft_version: of the drafter that is to serve.
    plans_once: only introductions, `run` and `push` send a plan, and no message is answered.
    bounds: largest batch of each row of a plan; rows after the first have the script's next arms.
    rules: of the engine's mixtures.
    plans: those that were made, by epoch.  arms: what each asked for.
    session_id: "" for a new one at each introduction.
    messages_in_flight_max: 0 as a sidecar that does not know of such a limit.
    """

    def __init__(self, target: str, *, plans_once: bool = False) -> None:
        self.target = target
        self.introductions: list[EngineSpec] = []
        self.requests: list[SteerRequest] = []
        self.first_plan: Callable[[], Plan] = self.next_plan
        self.answer: Callable[[SteerRequest], SteerResponse | None] = self._answer
        self.session_id = ""
        self.refuse_introduction: tuple[grpc.StatusCode, str] | None = None
        self.messages_in_flight_max = 0
        self.end_streams: tuple[grpc.StatusCode, str] | None = None
        self.script: Script = lambda _: (3, False)
        self.lease_ms = 60_000
        self.stride = 0
        self.collect = False
        self.draft_version = 0
        self.plans_once = plans_once
        self.bounds: tuple[int, ...] = (64,)
        self.rules: tuple[MixtureRule, ...] = ()
        self.plans: dict[int, Plan] = {}
        self.arms: dict[int, Arm] = {}
        self.collecting: set[int] = set()
        self._lock = threading.Lock()
        self._dropped_before = 0
        # What the open stream sends next; what is pushed before one opens goes out on the first.
        self._outgoing: asyncio.Queue[SteerResponse] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def start(self) -> None:
        """Begins to serve."""

        async def begin() -> None:
            self._server = grpc.aio.server()
            add_SpeculationServiceServicer_to_server(self, self._server)
            assert self._server.add_insecure_port(self.target)
            await self._server.start()

        self._run_in_loop(begin())

    def stop(self) -> None:
        """Ends all streams and the service."""

        async def end() -> None:
            server, self._server = self._server, None
            if server is not None:
                await server.stop(0)

        self._run_in_loop(end())

    @property
    def variables(self) -> dict[str, str]:
        """Returns what its engine is started with.

        Each report wakes the agent, so that no arm of the script is skipped between two polls.
        """
        return {"SPECULATION_SIDECAR": self.target, "SPECULATION_REPORT_INTERVAL_MS": "0"}

    @property
    def reports(self) -> list[StepReport]:
        """Returns all reports that have arrived, in order."""
        return [report for request in list(self.requests) for report in request.reports]

    def run(self, script: Script) -> int:
        """Begins a script, counted from now; gives the number of reports before it."""
        self._wait_for_reports()
        reports_before = len(self.reports)
        self._dropped_before = self._dropped
        self.script = lambda count: script(count - reports_before)
        self.push(self.next_plan())
        return reports_before

    def reports_since(
        self, reports_before: int, rows: int, *, count_lost: bool = False
    ) -> list[StepReport]:
        """Returns the reports after the first `reports_before`, once they cover `rows` rows.

        The rows of requests that had ended are not among them: engines do not count those.
        count_lost: a report that the agent says it has lost since `run` stands for one row, in a
        test whose sessions break off.  Raises HarnessError when they do not arrive.
        """
        deadline = time.monotonic() + _REPORTS_SECONDS
        while True:
            later = self.reports[reports_before:]
            row_count = sum(map(count_decoded_rows, later))
            if row_count + (self._dropped - self._dropped_before if count_lost else 0) >= rows:
                return later
            if time.monotonic() > deadline:
                raise HarnessError(f"{row_count} of {rows} rows came within {_REPORTS_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def push(self, pushed: Plan) -> None:
        """Sends a plan on the open stream."""
        self.send(SteerResponse(plan=pushed))

    def send(self, response: SteerResponse) -> None:
        """Sends a response on the open stream, or on the next one."""
        self._loop.call_soon_threadsafe(self._outgoing.put_nowait, response)

    def next_plan(self) -> Plan:
        """Makes the script's next plan."""
        with self._lock:
            epoch = len(self.arms) + 1
            count = len(self.reports)
            arms = [self.script(count + place) for place in range(len(self.bounds))]
            self.arms[epoch] = arms[0]
            collect = self.collect
            if collect:
                self.collecting.add(epoch)
        drafters = self.introductions[-1].drafters
        rows = [
            PlanRow(
                max_batch_size=bound,
                drafter=drafters[drafter_index[0] if drafter_index else 0].name,
                gamma=gamma,
                drafter_asleep=asleep,
                reason=REASON_EXPLOIT,
            )
            for bound, (gamma, asleep, *drafter_index) in zip(self.bounds, arms, strict=True)
        ]
        mode = REGIME_MODE_ONLINE if self.stride else REGIME_MODE_OFF
        mode = REGIME_MODE_COLLECT if collect else mode
        self.plans[epoch] = Plan(
            epoch=epoch,
            rows=rows,
            regime=Regime(mode=mode, stride=self.stride),
            lease_ms=self.lease_ms,
            draft_version=self.draft_version,
            reason=REASON_EXPLOIT,
            rules=self.rules,
        )
        return self.plans[epoch]

    async def Introduce(self, request: IntroduceRequest, context: Any) -> IntroduceResponse:
        """Takes an introduction, or refuses it as `refuse_introduction` says."""
        if self.refuse_introduction is not None:
            await context.abort(*self.refuse_introduction)
        self.introductions.append(request.engine)
        session_id = self.session_id or f"session-{len(self.introductions)}"
        return IntroduceResponse(
            session_id=session_id,
            plan=self.first_plan(),
            messages_in_flight_max=self.messages_in_flight_max,
        )

    async def Steer(
        self, request_iterator: AsyncIterator[SteerRequest], context: Any
    ) -> AsyncIterator[SteerResponse]:
        """Serves one stream."""

        async def read_requests() -> None:
            async for request in request_iterator:
                self.requests.append(request)
                response = self.answer(request)
                if response is not None:
                    self._outgoing.put_nowait(response)

        reader_task = asyncio.create_task(read_requests())
        try:
            while not reader_task.done():
                if self.end_streams is not None:
                    await context.abort(*self.end_streams)
                try:
                    async with asyncio.timeout(0.02):
                        response = await self._outgoing.get()
                except TimeoutError:
                    continue
                yield response
        finally:
            reader_task.cancel()

    async def Decide(self, request: DecideRequest, context: Any) -> DecideResponse:
        """Is not served."""
        raise NotImplementedError

    @property
    def _dropped(self) -> int:
        return sum(request.dropped_reports for request in list(self.requests))

    def _wait_for_reports(self) -> None:
        deadline = time.monotonic() + _REST_SECONDS_MAX
        report_count = -1
        while report_count < len(self.reports) and time.monotonic() < deadline:
            report_count = len(self.reports)
            time.sleep(_REST_SECONDS)

    def _answer(self, _: SteerRequest) -> SteerResponse | None:
        return None if self.plans_once else SteerResponse(plan=self.next_plan())

    def _run_in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(60)


def scripted_sidecar(folder: Path) -> ScriptedSidecar:
    """A sidecar on a unix socket in `folder`."""
    return ScriptedSidecar(f"unix:{folder / 'sidecar.sock'}")

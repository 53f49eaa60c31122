"""An engine whose step costs are known: real HTTP, a real Steer stream, seconds from a formula.

    C = table(gamma, B) + k_kv * kv, times noise, and occasionally ten times that

It decodes in real time as fast as it can (a step takes about a millisecond) and reports the
formula's seconds, so a measurement of it is quick and its truth is exact.
"""

import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc

from speculation.v1 import engine_pb2, plan_pb2, service_pb2, service_pb2_grpc

GAMMAS = (0, 1, 2, 3)
DRAFTER = "eagle3"
K_KV = 2e-6


def step_seconds(gamma: int, batch_size: int) -> float:
    """Of an empty context."""
    return 0.010 * (1 + 0.15 * gamma + 0.02 * batch_size * (gamma + 1))


def introduction(engine_id: str = "clockwork", **changes: Any) -> engine_pb2.EngineSpec:
    fields: dict[str, Any] = {
        "engine_id": engine_id,
        "fingerprint": engine_pb2.Fingerprint(
            target_model="/models/Tiny Target", engine="clockwork", device="Test CPU @ 1 GHz"
        ),
        "drafters": [
            engine_pb2.Drafter(
                name=DRAFTER,
                kind=engine_pb2.DRAFTER_KIND_MTP,
                gammas=GAMMAS,
                model="/models/draft",
            )
        ],
        "max_batch_size": 8,
    }
    return engine_pb2.EngineSpec(**fields | changes)


class Sequence:
    """One prompt that is being decoded."""

    def __init__(self, request_id: str, prompt: list[int], new_tokens: int) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.length = len(prompt)
        self.end = len(prompt) + new_tokens
        self.ended = threading.Event()


class ClockworkEngine:
    """`with ClockworkEngine(address) as engine`: decodes, reports, is steered.

    noise: relative, normal.  outliers: share of steps that take ten times as long.  drift: the
    machine's slowness as a function of how often the draft length has changed, and not of time,
    since a busy machine takes more steps for a visit.  batch_cap: sequences it really runs.
    obeys: False for a shim whose switch does not take; obeys_up_to: in larger batches it does not.
    names_plans: False for one whose steps name no plan.  late_plan: number of the plan that it
    takes `late_seconds` late, from 0 and without the first one; None for none.  row_width: what its
    rows verify at most, whatever the step's draft length.  table: seconds by gamma and batch size.
    wake_seconds: what each token takes that its drafter missed at gamma = 0.  lost_loads: number of
    requests whose steps are not reported, by their number of prompts.
    """

    def __init__(self, address: str, spec: engine_pb2.EngineSpec | None = None) -> None:
        self.spec = spec or introduction()
        self.noise = 0.02
        self.outliers = 0.0
        self.wake_seconds = 0.0
        self._missed = 0
        self._visit = 0
        self.drift: Callable[[int], float] = lambda _: 1.0
        self.batch_cap = 1000
        self.obeys = True
        self.obeys_up_to = 1000
        self.names_plans = True
        self.late_plan: int | None = None
        self.late_seconds = 3.0
        self.row_width = GAMMAS[-1]
        self.lost_loads: Counter[int] = Counter()
        self._is_lost = False
        self.table: Callable[[int, int], float] = step_seconds
        self.healthy = True
        self.has_tokenizer = True
        self.pool_tokens = 40_000
        self.pace_seconds = 0.001
        self.api_key = ""
        self.prompts: list[list[int]] = []
        self.executed_steps: list[tuple[int, int]] = []  # (gamma, batch size) of every step
        self._address = address
        self._random = random.Random(7)
        self._lock = threading.Condition()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._outgoing: queue.Queue[service_pb2.SteerRequest | None] = queue.Queue()
        self._plan = plan_pb2.Plan()
        self._closed = False
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._http.serve_forever)
        self._start(self._decode)
        if self._address:
            self._channel = grpc.insecure_channel(self._address)
            stub = service_pb2_grpc.SpeculationServiceStub(self._channel)
            request = service_pb2.IntroduceRequest(engine=self.spec, engine_secret="clockwork")
            opened = stub.Introduce(request, timeout=60)
            self._session, self._plan = opened.session_id, opened.plan
            self._outgoing.put(service_pb2.SteerRequest(session_id=self._session))
            self._call = stub.Steer(iter(self._outgoing.get, None))
            self._start(self._take_plans)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            for sequence in (*self._waiting, *self._running):
                sequence.ended.set()
            self._lock.notify_all()
        if self._address:
            self._outgoing.put(None)
            self._call.cancel()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join(5)
        if self._address:
            self._channel.close()

    @property
    def plan_reason(self) -> int:
        return self._plan.reason

    @property
    def busy(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._running)

    def generate(self, body: dict[str, Any]) -> None:
        """Returns when every sequence has ended."""
        new_tokens = body["sampling_params"]["max_new_tokens"]
        pairs = zip(body["rid"], body["input_ids"], strict=True)
        sequences = [Sequence(rid, prompt, new_tokens) for rid, prompt in pairs]
        self.prompts += body["input_ids"]
        with self._lock:
            self._is_lost = self.lost_loads[len(sequences)] > 0
            self.lost_loads[len(sequences)] -= self._is_lost
            self._waiting += sequences
            self._lock.notify_all()
        for sequence in sequences:
            sequence.ended.wait()

    def abort(self, request_id: str) -> None:
        with self._lock:
            for group in (self._waiting, self._running):
                for sequence in [s for s in group if s.request_id == request_id]:
                    group.remove(sequence)
                    sequence.ended.set()

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take_plans(self) -> None:
        try:
            plans = (response.plan for response in self._call if response.HasField("plan"))
            for number, plan in enumerate(plans):
                if number == self.late_plan:
                    time.sleep(self.late_seconds)
                self._plan = plan
        except grpc.RpcError:
            pass

    def _gamma(self, batch_size: int) -> int:
        if not (self.obeys and batch_size <= self.obeys_up_to and self._plan.rows):
            return GAMMAS[-1]
        for row in self._plan.rows:
            if batch_size <= row.max_batch_size:
                return int(row.gamma)
        return int(self._plan.rows[-1].gamma)

    def _decode(self) -> None:
        step, last = 0, None
        while True:
            with self._lock:
                while not (self._running or self._waiting or self._closed):
                    self._lock.wait()
                if self._closed:
                    return
                joined = self._join()
                batch = list(self._running)
            if joined:
                time.sleep(0.005 + 2e-6 * sum(s.length for s in batch))  # a prefill
            time.sleep(self.pace_seconds)
            step += 1
            gamma = self._gamma(len(batch))
            epoch = self._plan.epoch if self.names_plans else 0
            kv_tokens = sum(s.length for s in batch)
            width = min(gamma, self.row_width)
            accepted = [min(self._random.choice((0, 0, 1, 3)), width) for _ in batch]
            flags = engine_pb2.StepFlags(
                after_gap=joined, switched=last is not None and gamma != last
            )
            self._report(step, gamma, epoch, kv_tokens, accepted, flags)
            last = gamma
            with self._lock:
                for sequence, count in zip(batch, accepted, strict=True):
                    sequence.length += count + 1
                    if sequence.length >= sequence.end and sequence in self._running:
                        self._running.remove(sequence)
                        sequence.ended.set()

    def _join(self) -> bool:
        room = self.batch_cap - len(self._running)
        new, self._waiting = self._waiting[:room], self._waiting[room:]
        if not self._running:
            self._missed = 0
        self._running += new
        return bool(new)

    def _report(
        self,
        step: int,
        gamma: int,
        epoch: int,
        kv_tokens: int,
        accepted: list[int],
        flags: engine_pb2.StepFlags,
    ) -> None:
        size = len(accepted)
        self._visit += flags.switched
        seconds = (self.table(gamma, size) + K_KV * kv_tokens) * self.drift(self._visit)
        seconds *= max(1 + self.noise * self._random.gauss(0, 1), 0.5)
        missed_tokens, self._missed = (self._missed, 0) if gamma else (0, self._missed + size)
        is_waking = self.wake_seconds > 0 and missed_tokens > 0
        seconds += self.wake_seconds * missed_tokens
        if (
            self._random.random() < self.outliers
            or flags.after_gap
            or (flags.switched and not is_waking)
        ):
            seconds *= 10
        self.executed_steps.append((gamma, size))
        report = engine_pb2.StepReport(
            step=step,
            batch_size=size,
            kv_tokens=kv_tokens,
            drafter=self.spec.drafters[0].name,
            gamma=gamma,
            accepted_counts=[accepted.count(k) for k in range(gamma + 1)],
            step_seconds=seconds,
            flags=flags,
            plan_epoch=epoch,
        )
        if gamma > self.row_width:
            counts = report.accepted_counts[: self.row_width + 1]
            report.groups.add(drafter=report.drafter, gamma=self.row_width, accepted_counts=counts)
        if self._address and not self._is_lost:
            self._outgoing.put(service_pb2.SteerRequest(session_id=self._session, reports=[report]))


def _handler(engine: ClockworkEngine) -> type[BaseHTTPRequestHandler]:  # noqa: C901  # one case a path
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/health_generate":
                return self._answer(200 if engine.healthy else 503)
            if self._is_unauthorised():
                return self._answer(401)
            if self.path == "/server_info":
                return self._answer(
                    200, {"max_total_num_tokens": engine.pool_tokens, "max_req_input_len": 2043}
                )
            return self._answer(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._is_unauthorised():
                return self._answer(401)
            if self.path == "/v1/tokenize" and engine.has_tokenizer:
                return self._answer(200, {"tokens": list(body["prompt"].encode())})
            if self.path == "/generate":
                engine.generate(body)
                return self._answer(200, [{"meta_info": {}} for _ in body["rid"]])
            if self.path == "/abort_request":
                engine.abort(body["rid"])
                return self._answer(200)
            return self._answer(404)

        def _is_unauthorised(self) -> bool:
            expected_header = f"Bearer {engine.api_key}"
            return bool(engine.api_key) and self.headers["Authorization"] != expected_header

        def _answer(self, status: int, body: Any = None) -> None:
            content = b"" if body is None else json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                self.close_connection = True  # the client hung up

        def log_message(self, *args: Any) -> None:
            pass

    return Handler

"""Measures the cost of a decision for an engine, four ways, in a minute.

    python -m tools.bench.peers_bench

    linked        this project's link: report out, newest plan in, nothing waited for
    in process    SGLang's adaptive policy
    unary         one gRPC call a step on the same sidecar: report up, choice down, waited for
    polled        a thread of the engine's gets the draft length by HTTP every second

One process is the engine: its step is a fixed amount of Python work (about 5 ms), which is the
hardest case for a way with a thread, since it never releases the interpreter.  Blocks of steps
with each way, and one without any, take turns; a ratio is that of a block to the bare one of its
round.
The sidecar is a real `controller serve`.  How old a choice may be: for "polled" the time from a
change at the server to the engine is measured; the link's is in latency_bench; the other two know
of the step before.
"""

import argparse
import contextlib
import json
import multiprocessing
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection

import grpc

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from speculation.v1 import service_pb2, service_pb2_grpc
from speculation.v1.engine_pb2 import StepReport
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.service_harness import engine_message, report_message
from tools.bench.measurement import RATIO, Measurement, command_line, percentiles, run
from tools.bench.serving import quiet_sidecar

_POLL_SECONDS = 1.0
_BATCH = 4
_STEP_SECONDS = 0.005
Step = Callable[[int], None]


def _work(rounds: int) -> None:
    for _ in range(rounds):
        sum(range(1000))


def _rounds() -> int:
    """The number of iterations that takes about a step's time on this machine."""
    start = time.perf_counter()
    _work(1000)
    return max(1, round(1000 * _STEP_SECONDS / (time.perf_counter() - start)))


@contextlib.contextmanager
def _bare(_: str) -> Iterator[Step]:
    yield lambda _: None


@contextlib.contextmanager
def _linked(address: str) -> Iterator[Step]:
    link = EngineLink.start(engine_spec("linked"), LinkSettings(sidecar=address), startup_gamma=3)
    try:
        eventually(
            lambda: link.choose(_BATCH).source is Source.PLAN,
            timeout_seconds=60.0,
            description="a plan",
        )

        def step(number: int) -> None:
            choice = link.choose(_BATCH)
            counts = (_BATCH,) + (0,) * choice.gamma

            def fill(report: StepReport) -> None:
                report.step = number
                report.batch_size = _BATCH
                report.kv_tokens = 2048
                report.drafter = "eagle3"
                report.gamma = choice.gamma
                report.accepted_counts.extend(counts)
                report.step_seconds = _STEP_SECONDS
                report.plan_epoch, report.plan_session = choice.epoch, choice.session
                report.probe_id = choice.probe_id

            link.report(fill)

        yield step
    finally:
        link.close()


@contextlib.contextmanager
def _in_process(_: str) -> Iterator[Step]:
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    policy = AdaptiveSpeculativeParams(3)

    def step(_: int) -> None:
        policy.get_steps_for_batch(_BATCH)
        policy.on_verify_complete([0] * _BATCH, _BATCH)

    yield step


@contextlib.contextmanager
def _unary(address: str) -> Iterator[Step]:
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        request = service_pb2.IntroduceRequest(engine=engine_message("unary"))
        session = stub.Introduce(request).session_id

        def step(number: int) -> None:
            stub.Decide(
                service_pb2.DecideRequest(session_id=session, report=report_message(number))
            )

        yield step


class _Config:
    """The poller's end: the newest draft length, and when it came."""

    def __init__(self, url: str) -> None:
        self.gamma = 0
        self.arrivals: list[tuple[int, float]] = []
        self._url = url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            with urllib.request.urlopen(self._url) as answer:
                gamma = json.load(answer)["gamma"]
            if gamma != self.gamma:
                self.gamma = gamma
                self.arrivals.append((gamma, time.monotonic()))


def _serve_config(pipe: Connection) -> None:
    """Serves, in a process, a number that changes at times, and reports when it changed."""
    changes = [(0, time.monotonic())]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"gamma": changes[-1][0]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_port)
    rng = random.Random(0)
    while not pipe.poll(rng.uniform(0.5, 3.0)):
        changes.append((changes[-1][0] + 1, time.monotonic()))
    pipe.send(changes)


class _PollingEngine:
    """An engine that polls, and records the delay of each change."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    @contextlib.contextmanager
    def __call__(self, _: str) -> Iterator[Step]:
        local_pipe, child_pipe = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_serve_config, args=(child_pipe,), daemon=True
        )
        process.start()
        config = _Config(f"http://127.0.0.1:{local_pipe.recv()}/")
        gammas = []
        yield lambda _: gammas.append(config.gamma)
        config.close()
        local_pipe.send("end")
        changed = dict(local_pipe.recv())
        process.join()
        self.delays += [arrival - changed[gamma] for gamma, arrival in config.arrivals]


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Yields the call's time and the ratio of steps/s to the bare engine's, for each way."""
    polled = _PollingEngine()
    ways: dict[str, Callable[[str], contextlib.AbstractContextManager[Step]]] = {
        "bare": _bare,
        "linked": _linked,
        "in process": _in_process,
        "unary": _unary,
        "polled": polled,
    }
    calls: dict[str, list[list[float]]] = {way: [] for way in ways}
    blocks: dict[str, list[float]] = {way: [] for way in ways}
    with quiet_sidecar() as sidecar:
        rounds = _rounds()
        for repeat in range(options.repeats):
            for way, begin in ways.items():
                # Open only while it is used: the poller's thread is a part of its way alone.
                with begin(sidecar.address) as step:
                    times, block_start = [], time.perf_counter()
                    for number in range(1, options.steps + 1):
                        _work(rounds)
                        called = time.perf_counter()
                        step(number)
                        times.append(1e6 * (time.perf_counter() - called))
                    blocks[way].append(time.perf_counter() - block_start)
                calls[way].append(times)
            print(f"round {repeat + 1} of {options.repeats}", flush=True)
    for way in ways:
        if way == "bare":
            continue
        yield from percentiles(f"{way}: the call in a step", "us", calls[way])
        ratios = [
            bare / block_seconds
            for bare, block_seconds in zip(blocks["bare"], blocks[way], strict=True)
        ]
        yield Measurement(f"{way}: steps/s over the bare engine's", RATIO, ratios)
    if not polled.delays:
        raise RuntimeError("no change reached the polling engine: it needs more --steps")
    yield Measurement("polled: from a change to the engine", "ms", [1e3 * s for s in polled.delays])


PARSER = command_line(__doc__, repeats=5)
PARSER.add_argument("--steps", type=int, default=800, help="of one block")

if __name__ == "__main__":
    run(PARSER, measure)

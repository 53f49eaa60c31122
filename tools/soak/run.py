"""Runs the soak: a real engine, a real sidecar, a real Redis, changing load, and the judgement.

0      load begins, everything is sampled; metrics, page and `explain` are polled
0.15   an override that ends by itself
0.3    an override that outlives the sidecar's restart
0.4    the sidecar is stopped and started again
0.6    that override is cleared
1      load ends; the sidecar writes its recording out; everything is reconciled
"""

import asyncio
import shutil
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc

from controller.recording.recording import find_recording
from controller.recording.replay import ReplayVerdict, replay
from lab.harness.engines import Workplace, launch_sidecar, wait_serving
from lab.harness.errors import HarnessError
from lab.harness.processes import Child, free_port
from lab.harness.sidecar import SidecarHandle
from tests.support.engine import DFLASH, EAGLE3, EngineProcess, install_plugin, running_engine
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tests.support.sidecar_process import controller
from tools.soak import engine_log, reconcile
from tools.soak.engine_log import Step, read_steps
from tools.soak.growth import Growth, Sample, Sampler, WatchedProcess, find_child, growths
from tools.soak.load import NEW_TOKENS, Load, Prompt, Served, pool
from tools.soak.on_record import RecordedEngine, read_record

ENGINE_ID: Final = "soak"
_QUIET: Final = ("--log-level", "warning")
# Samples of a run: enough for the windows of its shortest life.
_SAMPLES = 400
_SAMPLE_SECONDS = (0.25, 5.0)
_POLL_SECONDS = 2.0
_SETTLE_SECONDS = 60.0
# Load in addition, until the operator is done.
_EXTRA_LOAD_SECONDS = 5.0
# Longer than any pause, so that steps run under it.
_EXPIRING_SECONDS_MIN = 15
_EXPIRING, _CLEARED = "soak-expires", "soak-is-cleared"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run.  minutes: of load.  output: folder of logs, samples and results."""

    minutes: float
    output: Path
    seed: int = 1


@dataclass(slots=True)
class SoakResult:
    """The result of a run.

    link: how the engine's link stood at its end.  reports: of the last sidecar's own counter.
    probes: answers of metrics, page and `explain`.  lost_requests: requests that were not answered.
    """

    samples: list[Sample] = field(default_factory=list)
    executed_steps: list[Step] = field(default_factory=list)
    record: RecordedEngine = field(default_factory=RecordedEngine)
    verdict: ReplayVerdict | None = None
    answers: list[Served] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=dict)
    link: dict[str, Any] = field(default_factory=dict)
    reports: int = 0
    probes: int = 0
    lost_requests: list[str] = field(default_factory=list)
    seconds: float = 0.0
    growths: list[Growth] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)


def soak(options: Options, say: Callable[[str], None] = print) -> SoakResult:
    """Runs it all.  Raises HarnessError and AssertionError where a part does not even work."""
    for part in ("record", "state", "engine"):
        shutil.rmtree(options.output / part, ignore_errors=True)
    options.output.mkdir(parents=True, exist_ok=True)
    say("plain decoding, for its tokens")
    prompts = _plain(options)
    with ExitStack() as stack:
        stage = _Stage(options, stack)
        say("sidecar, Redis, engine")
        stage.start()
        say(f"load for {options.minutes:g} minutes")
        start = time.monotonic()
        result = asyncio.run(stage.play(prompts))
        result.seconds = time.monotonic() - start
        stage.settle(result)
    judge(result, options)
    return result


def judge(result: SoakResult, options: Options) -> None:
    """Fills in the findings and the facts that they are taken from."""
    record = options.output / "record"
    result.executed_steps = list(read_steps(options.output / "engine" / "steps.jsonl"))
    result.record = read_record(record, ENGINE_ID)
    result.verdict = verdict = replay(find_recording(record, ENGINE_ID))
    result.growths = growths(result.samples)
    last = result.record.sessions[-1] if result.record.sessions else None
    recorded_count = sum(report.session == last for report in result.record.reports)
    gammas = {_EXPIRING: frozenset({1}), _CLEARED: frozenset({0, 1, 2})}
    result.findings = {
        "growth": [str(growth) for growth in result.growths if growth.is_too_much],
        "steps": reconcile.steps(result.executed_steps, result.record),
        "counter": []
        if recorded_count == result.reports
        else [f"{recorded_count} reports of the last session on record, {result.reports} counted"],
        "plans": reconcile.plans(result.record),
        "lost requests": result.lost_requests,
        "served": reconcile.served(result.executed_steps, result.record, result.answers),
        "tokens": reconcile.tokens(result.answers),
        "overrides": reconcile.overrides(result.record, gammas),
        "replay": []
        if verdict.is_same and not verdict.gaps
        else [f"{verdict.differences} differences, {verdict.first}, gaps {verdict.gaps}"],
    }


def _plain(options: Options) -> list[Prompt]:
    prompts = pool()
    with running_engine(options.output / "plain", _QUIET) as engine:
        answers = engine.generate([p.ids for p in prompts], [NEW_TOKENS] * len(prompts))
    pairs = zip(prompts, answers, strict=True)
    return [replace(prompt, plain=tuple(answer.tokens)) for prompt, answer in pairs]


class _Stage:
    """The running processes, and the operations on them."""

    def __init__(self, options: Options, stack: ExitStack) -> None:
        self._options = options
        self._stack = stack
        self._scratch = Path(stack.enter_context(TemporaryDirectory(prefix="speculation-soak-")))
        self._metrics_port, self._page_port = free_port(), free_port()
        self._redis = RedisServer(options.output / "redis")
        self._lives = 0
        self._sidecar: Child | None = None
        self._engine: EngineProcess | None = None
        self._probes = 0

    @property
    def address(self) -> str:
        """The sidecar's address."""
        return self._place.address

    @property
    def engine(self) -> EngineProcess:
        """The engine, once it runs."""
        assert self._engine is not None
        return self._engine

    @property
    def _place(self) -> Workplace:
        return Workplace(self._options.output / f"sidecar-{self._lives}", self._scratch)

    def start(self) -> None:
        """Starts Redis, sidecar and engine."""
        self._stack.enter_context(self._redis)
        self._start_sidecar()
        folder = self._options.output / "engine"
        plugin = install_plugin(
            self._scratch / "plugin", "tools.soak.engine_log:watch", name="zz_soak"
        )
        variables = {
            "SPECULATION_SIDECAR": self.address,
            "SPECULATION_ENGINE_ID": ENGINE_ID,
            "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
            "PYTHONPATH": str(plugin),
            engine_log.VARIABLE: str(folder / "steps.jsonl"),
        }
        self._engine = self._stack.enter_context(
            running_engine(folder, [*EAGLE3, *_QUIET], variables)
        )
        eventually(
            self._is_introduced,
            timeout_seconds=_SETTLE_SECONDS,
            description="the engine introduces itself",
        )

    async def play(self, prompts: list[Prompt]) -> SoakResult:
        """Plays the load, with everything that happens meanwhile."""
        seconds = self._options.minutes * 60
        load = Load(f"http://127.0.0.1:{self.engine.port}", prompts, self._options.seed)
        interval = min(max(seconds / _SAMPLES, _SAMPLE_SECONDS[0]), _SAMPLE_SECONDS[1])
        with Sampler(self._watched(), interval) as sampler:
            polling = asyncio.create_task(self._poll_views())
            async with asyncio.TaskGroup() as group:
                operating = group.create_task(self._operate(seconds))
                await load.play(seconds)
                # Commands take longer on a slow machine, and steps have to run under each override.
                while not operating.done():
                    await load.play(_EXTRA_LOAD_SECONDS)
            polling.cancel()
        return SoakResult(
            samples=sampler.samples,
            answers=load.answers,
            load={
                "phases": load.phases,
                "answers": len(load.answers),
                "aborted": load.aborted,
                "hung_up": load.hung_up,
            },
            probes=self._probes,
            lost_requests=load.lost_requests,
        )

    def settle(self, result: SoakResult) -> None:
        """Waits until every report has arrived; then the sidecar writes its recording out."""
        path = self._options.output / "engine" / "steps.jsonl"
        with SidecarHandle(self.address, ENGINE_ID) as sidecar:
            end = time.monotonic() + _SETTLE_SECONDS
            last_step = sum(1 for _ in read_steps(path))
            # A step that never arrives is a finding, not an error here.
            while sidecar.status().last_report.step < last_step and time.monotonic() < end:
                time.sleep(0.1)
            result.reports = sidecar.status().reports
        result.link = self.engine.internal_state()["speculation_controller"]
        self._stop_sidecar()

    def _watched(self) -> dict[str, WatchedProcess]:
        engine = self.engine.process.pid
        redis = int(self._redis.client().info("server")["process_id"])
        return {
            "server": WatchedProcess(lambda: engine),
            "scheduler": WatchedProcess(
                find_child(engine, "sglang::scheduler"), lambda: self.engine.log
            ),
            "detokenizer": WatchedProcess(find_child(engine, "sglang::detokenizer")),
            "agent": WatchedProcess(find_child(engine, "engine_shim.link.agent")),
            "sidecar": WatchedProcess(self._sidecar_pid, lambda: self._place.log("sidecar")),
            "redis": WatchedProcess(
                lambda: redis, lambda: self._options.output / "redis" / "redis.log"
            ),
        }

    def _sidecar_pid(self) -> int | None:
        return None if self._sidecar is None else self._sidecar.pid

    def _is_introduced(self) -> bool:
        with SidecarHandle(self.address, ENGINE_ID) as sidecar:
            return sidecar.is_introduced()

    def _start_sidecar(self) -> None:
        self._lives += 1
        output = self._options.output
        environment = {
            "CONTROLLER_PAGE_PORT": str(self._page_port),
            "CONTROLLER_STATE_DIRECTORY": str(output / "state"),
            "CONTROLLER_REDIS_URL": self._redis.url,
            "CONTROLLER_RECORD_DIRECTORY": str(output / "record"),
            "CONTROLLER_RECORD_MEGABYTES": "1000",
        }
        child = launch_sidecar(self._place, self._metrics_port, environment)
        self._sidecar = self._stack.enter_context(child)
        with SidecarHandle(self.address, ENGINE_ID) as sidecar:
            wait_serving(child, sidecar)

    def _stop_sidecar(self) -> None:
        child, self._sidecar = self._sidecar, None
        assert child is not None
        child.terminate()
        child.wait(_SETTLE_SECONDS)

    async def _operate(self, seconds: float) -> None:
        """Sets overrides and restarts the sidecar, at their times."""
        ttl = max(_EXPIRING_SECONDS_MIN, round(0.1 * seconds))
        start = time.monotonic()

        async def run_at(share: float, action: Callable[[], object]) -> None:
            await asyncio.sleep(max(0.0, start + share * seconds - time.monotonic()))
            await asyncio.to_thread(action)

        await run_at(0.05, lambda: self._override(_EXPIRING, "--gamma", "1", "--ttl", f"{ttl}s"))
        await asyncio.sleep(ttl)
        # The second override is refused while the first one, which is stronger, is in force.
        await asyncio.to_thread(eventually, lambda: not self._is_active(_EXPIRING))
        await run_at(0.3, lambda: self._override(_CLEARED, "--at-most", "2", "--ttl", "2h"))
        await run_at(0.45, self._restart)
        await run_at(0.7, lambda: self._command("clear", _CLEARED))

    def _restart(self) -> None:
        self._stop_sidecar()
        self._start_sidecar()

    def _override(self, name: str, *rule: str) -> None:
        self._command("set", "--engine", ENGINE_ID, "--id", name, *rule)

    def _is_active(self, name: str) -> bool:
        return name in self._override_command("list", "-o", "name").split()

    def _command(self, *words: str) -> None:
        self._override_command(*words, "--reason", "soak")

    def _override_command(self, *words: str) -> str:
        completed = controller("override", *words, "--address", self.address)
        if completed.returncode:
            raise HarnessError(f"controller override {' '.join(words)}: {completed.stderr}")
        return completed.stdout

    async def _poll_views(self) -> None:
        """Polls metrics, page and `explain`, as dashboards and people do."""
        page = f"http://127.0.0.1:{self._page_port}"
        urls = (
            f"http://127.0.0.1:{self._metrics_port}/metrics",
            f"{page}/api/v1/state",
            f"{page}/api/v1/engine?id={ENGINE_ID}",
        )
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for url in urls:
                await self._count_answer(asyncio.to_thread(_get, url))
            await self._count_answer(asyncio.to_thread(self._explain))

    async def _count_answer(self, question: Awaitable[object]) -> None:
        try:
            await question
        except (OSError, grpc.RpcError):
            return  # while the sidecar is started again
        self._probes += 1

    def _explain(self) -> None:
        with SidecarHandle(self.address, ENGINE_ID) as sidecar:
            sidecar.explain(batch_size=4)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body

"""The longest turn of the sidecar's event loop, for each handler with the largest input it takes.

    python -m tools.bench.loop_bench

A turn is one callback between two polls of the sockets; while it lasts no other client is served.
It is measured in processor time of the loop's thread, so that other processes on the machine do not
count.  The sidecar runs in this process, and the clients are calls on its loop.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import structlog

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import MAX_ARMS, MAX_BATCH_SIZE, MAX_DRAFTERS
from controller.core.step_report import MAX_REPORT_CLASSES
from controller.wire.engines import engine_from_proto
from lab.harness.processes import free_port
from speculation.v1 import engine_pb2, policy_pb2, service_pb2
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    report_message,
    running_sidecar,
)

BAR_SECONDS = {"usual": 0.005, "largest": 0.010}
ENGINES = 64


@dataclass
class LongestCallback:
    """The longest turn since the last `reset`."""

    seconds: float = 0.0
    handle_text: str = ""

    def reset(self) -> None:
        """Forgets the longest callback."""
        self.seconds, self.handle_text = 0.0, ""


def watch_event_loops() -> LongestCallback:
    """Measures every callback of every event loop from now on."""
    longest, run = LongestCallback(), asyncio.Handle._run

    def run_measured(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        elapsed = time.thread_time() - start
        if elapsed > longest.seconds:
            longest.seconds, longest.handle_text = elapsed, repr(handle)

    asyncio.Handle._run = run_measured  # type: ignore[method-assign,assignment]
    return longest


def largest_engine(engine_id: str) -> engine_pb2.EngineSpec:
    """The most that an introduction may hold."""
    gammas = range(MAX_ARMS // MAX_DRAFTERS)
    return engine_pb2.EngineSpec(
        engine_id=engine_id,
        fingerprint=engine_pb2.Fingerprint(target_model="m", graph_batch_sizes=range(1, 513)),
        max_batch_size=MAX_BATCH_SIZE,
        drafters=[
            engine_pb2.Drafter(
                name=f"d{number}",
                kind=engine_pb2.DRAFTER_KIND_MTP,
                gammas=gammas,
                batch_limits=[
                    engine_pb2.BatchLimit(gamma=g, max_batch_size=600 + 64 * number + g)
                    for g in gammas[1:]
                ],
            )
            for number in range(MAX_DRAFTERS)
        ],
    )


def usual_engine(engine_id: str) -> engine_pb2.EngineSpec:
    """Returns the introduction of SGLang on a large GPU."""
    graphs = [1, 2, 4, *range(8, 161, 8), *range(176, 513, 16)]
    return engine_pb2.EngineSpec(
        engine_id=engine_id,
        fingerprint=engine_pb2.Fingerprint(target_model="u", graph_batch_sizes=graphs),
        max_batch_size=512,
        drafters=[
            engine_pb2.Drafter(
                name=name, kind=engine_pb2.DRAFTER_KIND_MTP, gammas=(0, 1, 2, 3, 5, 7, 9, 15)
            )
            for name in ("mtp", "dflash")
        ],
    )


def largest_report(step: int) -> engine_pb2.StepReport:
    """Returns a report with the most classes, at the deepest draft of `largest_engine`."""
    gamma = MAX_ARMS // MAX_DRAFTERS - 1
    counts = [MAX_REPORT_CLASSES] * (gamma + 1)
    return report_message(
        step,
        batch_size=MAX_REPORT_CLASSES * (gamma + 1),
        drafter="d0",
        gamma=gamma,
        accepted_counts=counts,
        classes=[
            engine_pb2.ClassCounts(label=f"{n:064}", accepted_counts=[1] * (gamma + 1))
            for n in range(MAX_REPORT_CLASSES)
        ],
    )


def largest_profile(engine: engine_pb2.EngineSpec) -> Profile:
    """Returns a profile of an engine with about as many cells as a message can hold."""
    spec = engine_from_proto(engine)
    sizes = spec.fingerprint.graph_batch_sizes
    cells = [
        ProfileCell(arm.drafter, arm.gamma, size, 0.01 * (1 + size / 100 + arm.gamma / 10), 0.0, 9)
        for size in sizes
        for arm in spec.arms
    ]
    drafters = tuple(DrafterIdentity(d.name) for d in spec.drafters)
    profile = Profile(spec.fingerprint, drafters, 512.0, 0.0, tuple(cells[:9]))
    for count in range(5_000, 200, -200):
        profile = replace(profile, cells=tuple(cells[:count]))
        if len(profile.to_json()) < 1_000_000:
            break
    return profile


def override(number: int) -> policy_pb2.Override:
    """Each with a range of its own, so that it splits rows."""
    return policy_pb2.Override(
        override_id=f"o{number:03}", scope=policy_pb2.Scope(fleet=True),
        rule=policy_pb2.OverrideRule(gamma_max=7), author="a", reason="r",
        min_batch_size=2 + number, max_batch_size=700 + number,
    )  # fmt: skip


@asynccontextmanager
async def sidecar_with_engines(
    engines: list[engine_pb2.EngineSpec],
) -> AsyncIterator[tuple[RunningSidecar, SteerClient, dict[str, int]]]:
    ports = {"metrics_port": free_port(), "page_port": free_port()}
    with tempfile.TemporaryDirectory() as name:
        async with running_sidecar(
            Path(name), metrics_port=ports["metrics_port"], page_port=ports["page_port"]
        ) as running:
            sessions = []
            for engine in engines:
                request = service_pb2.IntroduceRequest(engine=engine)
                sessions.append((await running.speculation.Introduce(request)).session_id)
            yield running, SteerClient(running, sessions[0]), ports


async def _fetch(url: str) -> None:
    def get() -> None:
        with urlopen(url, timeout=60) as answer:
            answer.read()

    await asyncio.to_thread(get)


async def measure_handlers(
    longest: LongestCallback, engine: Callable[[str], engine_pb2.EngineSpec], kind: str
) -> AsyncIterator[tuple[str, float, str]]:
    """(what, the longest turn in seconds, which)."""
    engines = [engine(f"e{number}") for number in range(ENGINES)]
    async with sidecar_with_engines(engines[1:]) as (running, stream, ports):

        async def measure_call(label: str, *calls: Awaitable[Any]) -> tuple[str, float, str]:
            # What was prepared for the call belongs to the turn that ends here.
            await asyncio.sleep(0)
            longest.reset()
            for call in calls:
                await call
            await asyncio.sleep(0.05)
            return f"{label} ({kind})", longest.seconds, longest.handle_text

        first = service_pb2.IntroduceRequest(engine=engines[0], engine_secret="of e0")
        yield await measure_call("Introduce", running.speculation.Introduce(first))
        yield await measure_call("Introduce again", running.speculation.Introduce(first))
        inspection = running.inspection
        step = iter(range(1, 10**6))
        if kind == "largest":
            yield await measure_call(
                "Steer, 3 reports of 64 classes",
                stream.send(*(largest_report(next(step)) for _ in range(3))),
                stream.plan(),
            )
        name = engines[0].drafters[0].name
        yield await measure_call(
            "Steer, 1500 reports",
            stream.send(*(report_message(next(step), drafter=name) for _ in range(1_500))),
            asyncio.sleep(2),
        )
        yield await measure_call(
            "Steer, 4096 stale reports",
            stream.send(*[engine_pb2.StepReport(step=1)] * 4096),
            asyncio.sleep(3),
        )
        yield await measure_call(
            "Explain", inspection.Explain(service_pb2.ExplainRequest(engine_id="e1", batch_size=8))
        )
        yield await measure_call(
            "ListEngines, 64", inspection.ListEngines(service_pb2.ListEnginesRequest())
        )
        yield await measure_call("Overview, 64", inspection.Overview(service_pb2.OverviewRequest()))
        yield await measure_call(
            "/metrics, 64", _fetch(f"http://127.0.0.1:{ports['metrics_port']}/metrics")
        )
        page = f"http://127.0.0.1:{ports['page_port']}/api/v1"
        yield await measure_call("page, state of 64", _fetch(f"{page}/state"))
        yield await measure_call("page, one engine", _fetch(f"{page}/engine?id=e1"))
        profile = largest_profile(engines[0])
        text = profile.to_json()
        yield await measure_call(
            f"InstallProfile for 64, {len(profile.cells)} cells",
            running.profiling.InstallProfile(service_pb2.InstallProfileRequest(profile_json=text)),
            asyncio.sleep(1),
        )
        yield await measure_call(
            "ListProfiles", running.profiling.ListProfiles(service_pb2.ListProfilesRequest())
        )
        for number in range(199):
            request = policy_pb2.SetOverrideRequest(override=override(number), ttl_seconds=600)
            if number in {0, 198}:
                yield await measure_call(
                    f"SetOverride, number {number + 1} for 64", running.policy.SetOverride(request)
                )
            elif number < 40 or number > 196:
                await running.policy.SetOverride(request)
        yield await measure_call(
            "Explain under overrides",
            inspection.Explain(service_pb2.ExplainRequest(engine_id="e1")),
        )
        yield await measure_call("ending", asyncio.sleep(0))


async def main(options: argparse.Namespace) -> None:
    """Prints a row for each handler."""
    longest = watch_event_loops()
    for kind, engine in (("usual", usual_engine), ("largest", largest_engine)):
        if options.usual and kind != "usual":
            continue
        async for label, seconds, callback in measure_handlers(longest, engine, kind):
            mark = "" if seconds <= BAR_SECONDS[kind] else "  above the bar"
            print(f"{label:46} {1e3 * seconds:8.1f} ms{mark}", flush=True)
            if mark and options.turns:
                print(f"    {callback[:200]}", flush=True)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", action="store_true", help="say which callback was too long")
    parser.add_argument("--usual", action="store_true", help="only with usual engines")
    asyncio.run(main(parser.parse_args()))

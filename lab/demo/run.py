"""The demo's story: start, profile, find the static draft length, play, compare."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.demo import engines, picture, report, result
from lab.demo.compare import DemoOutcome, PolicyPlays, Selection
from lab.demo.engines import ADAPTIVE, OFF, STEERED, static
from lab.demo.stream import halved, warm_up_stream
from lab.harness import machine
from lab.harness.engines import (
    Engine,
    Workplace,
    launch_sidecar,
    profile_command,
    wait_introduced,
    wait_ready,
    wait_serving,
)
from lab.harness.errors import EngineFailedError, HarnessError
from lab.harness.load_generator import Play, play
from lab.harness.processes import Child
from lab.harness.sidecar import GammaSample, GammaWatch, SidecarHandle
from lab.harness.stream import StreamPhase
from lab.harness.terminal import Terminal

# Beyond its own budget: waiting for load to begin, the fit, a slow machine.
_PROFILE_SPARE_SECONDS = 90.0
# So many of the best static draft lengths are played a second time before one is chosen.
_FINALISTS = 3


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a run is made of; `static_gamma` None: it is searched for."""

    stream: tuple[StreamPhase, ...]
    repeats: int
    static_gamma: int | None
    profile_seconds: float
    output: Path


def run(options: DemoOptions, terminal: Terminal) -> DemoOutcome:
    """Plays the whole demo and writes result.json and demo.png.  Raises HarnessError."""
    started = time.monotonic()
    load = machine.machine()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="speculation-demo-")))
        stage = _Demo(Workplace(options.output, scratch), terminal, stack)
        profile = stage.prepare(options.profile_seconds)
        selection = None
        gamma = options.static_gamma
        if gamma is None:
            selection = stage.select_static(options.stream)
            gamma = selection.gamma
        stage.start([static(gamma)])
        order = [OFF, static(gamma), ADAPTIVE, STEERED]
        outcome = stage.compare(options.stream, order, options.repeats, selection)
        with terminal.working("stopping"):
            stage.stop()
    document = {
        "command": [Path(sys.executable).name, *sys.orig_argv[1:]],
        "seconds": round(time.monotonic() - started, 1),
        **result.as_json(outcome),
        "profile": profile,
        "machine": load,
        "versions": machine.versions(),
    }
    (options.output / "result.json").write_text(json.dumps(document, indent=1) + "\n")
    picture.draw(outcome, options.output / "demo.png")
    return outcome


class _Demo:
    """The running processes, and what is done with them."""

    def __init__(self, place: Workplace, terminal: Terminal, stack: ExitStack) -> None:
        self._place = place
        self._terminal = terminal
        self._stack = stack
        self._engines: dict[str, Engine] = {}
        self._sidecar_child: Child | None = None
        self._sidecar = stack.enter_context(SidecarHandle(place.address, engines.ENGINE_ID))

    def prepare(self, profile_seconds: float) -> Mapping[str, Any]:
        """Starts sidecar and engines and measures the steered one's profile."""
        self._terminal.heading("Starting")
        with self._terminal.working("sidecar: controller serve") as work:
            child = self._stack.enter_context(launch_sidecar(self._place))
            self._sidecar_child = child
            wait_serving(child, self._sidecar)
            work.result = f"on {self._place.address}"
        self.start([STEERED, OFF, ADAPTIVE])
        steered = self._engines[STEERED]
        wait_introduced(steered, self._sidecar)
        self._terminal.say(f"steered by {self._sidecar.why()}")
        return self._profile(steered, profile_seconds)

    def start(self, policies: Sequence[str]) -> None:
        """Starts engines side by side, waits for them and warms them up."""
        names = ", ".join(policies)
        with self._terminal.working(f"engines: {names}") as work:
            for policy in policies:
                engine = engines.launch(policy, self._place)
                self._engines[policy] = engine
                self._stack.enter_context(engine.child)
            for policy in policies:
                began = time.monotonic()

                def tick(policy: str = policy, began: float = began) -> None:
                    work.update(f"{policy}, {time.monotonic() - began:.0f} s")

                wait_ready(self._engines[policy], engines.READY_SECONDS, tick)
            for policy in policies:
                work.update(f"warming up {policy}")
                self._play(policy, warm_up_stream())

    def _profile(self, steered: Engine, budget_seconds: float) -> Mapping[str, Any]:
        self._terminal.heading("Measuring step costs: controller profile")
        began = time.monotonic()
        command = profile_command(self._place, steered, engines.ENGINE_ID, budget_seconds)
        with (
            Child("controller profile", command, self._place.log("profile")) as child,
            self._terminal.working("profile of the steered engine") as work,
        ):
            child.wait(
                budget_seconds + _PROFILE_SPARE_SECONDS, lambda: work.update(child.last_line())
            )
        seconds = time.monotonic() - began
        profile = json.loads(self._place.profile.read_text())
        (self._place.output / "profile.json").write_text(json.dumps(profile, indent=1) + "\n")
        profile_id = self._sidecar.status().profile_id
        if not profile_id:
            raise HarnessError(f"the sidecar did not take the profile up.\n{child.tail()}")
        report.show_profile(profile, self._terminal)
        return {"seconds": round(seconds, 1), "profile_id": profile_id}

    def select_static(self, stream: Sequence[StreamPhase]) -> Selection:
        """The best fixed draft length for this stream, on the steered engine held to each.

        Answers are half as long as in the comparison, everything else is the same.
        """
        self._terminal.heading("Finding the best static γ for this stream (answers half as long)")
        short = halved(stream)
        plays: dict[int, tuple[Play, ...]] = {gamma: () for gamma in engines.GAMMAS if gamma > 0}
        candidates = tuple(plays)
        for _ in range(2):
            for gamma in candidates:
                with self._terminal.working(f"γ = {gamma}") as work, self._sidecar.pinned(gamma):
                    played = self._play(STEERED, short, work.update)
                    work.result = f"{played.tokens_per_second:.1f} tokens/s"
                plays[gamma] += (played,)
            candidates = Selection(plays).ranked[:_FINALISTS]
        selection = Selection(plays)
        report.show_selection(selection, short, self._terminal)
        return selection

    def compare(
        self,
        stream: tuple[StreamPhase, ...],
        order: Sequence[str],
        repeats: int,
        selection: Selection | None,
    ) -> DemoOutcome:
        """Plays the stream on every engine; every second repeat in reverse: drift cancels."""
        self._terminal.heading(
            f"One stream, {len(order)} policies, {repeats} repeats: "
            f"{sum(len(phase.requests) for phase in stream)} requests, "
            f"{sum(phase.new_tokens for phase in stream)} tokens a play"
        )
        plays: dict[str, list[Play]] = {policy: [] for policy in order}
        watched: list[tuple[GammaSample, ...]] = []
        for repeat in range(repeats):
            for policy in order if repeat % 2 == 0 else reversed(order):
                text = f"repeat {repeat + 1}/{repeats}: {policy}"
                watch = GammaWatch(self._sidecar) if policy == STEERED else None
                with self._terminal.working(text) as work, watch or nullcontext():
                    played = self._play(policy, stream, work.update)
                    work.result = f"{played.tokens_per_second:.1f} tokens/s"
                plays[policy].append(played)
                if watch is not None:
                    watched.append(watch.samples)
        policies = tuple(PolicyPlays(policy, tuple(plays[policy])) for policy in order)
        return DemoOutcome(stream, policies, tuple(watched), selection)

    def stop(self) -> None:
        """Asks all to end at once; the context waits for each."""
        for engine in self._engines.values():
            engine.child.terminate()

    def _play(
        self,
        policy: str,
        stream: Sequence[StreamPhase],
        update: Callable[[str], None] = lambda _: None,
    ) -> Play:
        engine = self._engines[policy]
        try:
            played = asyncio.run(play(stream, engine.url, lambda phase: update(phase.name)))
        except EngineFailedError as error:
            raise EngineFailedError(f"{policy}: {error}\n{engine.child.tail()}") from error
        for text in played.lost:
            self._terminal.say(f"{policy}: {text}")
        if self._sidecar_child is not None:
            self._sidecar_child.check()
        return played

"""Runs the demo: starts the engines, profiles, finds the static draft length, plays, compares."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.demo import engines, picture, report, result
from lab.demo.compare import DemoOutcome, PolicyPlays, Selection
from lab.demo.engines import ADAPTIVE, OFF, STEERED, static
from lab.demo.stream import halved, warm_up_stream
from lab.harness.engines import Harness, Workplace
from lab.harness.load_generator import Play
from lab.harness.machine import run_facts, write_result
from lab.harness.sidecar import GammaSample, GammaWatch, SidecarHandle
from lab.harness.stream import StreamPhase
from lab.harness.terminal import Terminal

# So many of the best static draft lengths are played a second time before one is chosen.
_FINALISTS = 3


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a run; `static_gamma` None: it is searched for."""

    stream: tuple[StreamPhase, ...]
    repeats: int
    static_gamma: int | None
    profile_seconds: float
    output: Path


def run(options: DemoOptions, terminal: Terminal) -> DemoOutcome:
    """Plays the whole demo and writes result.json and demo.png.  Raises HarnessError."""
    started = time.monotonic()
    facts = run_facts()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="speculation-demo-")))
        demo = _Demo(Workplace(options.output, scratch), terminal, stack)
        profile = demo.prepare(options.profile_seconds)
        selection = None
        gamma = options.static_gamma
        if gamma is None:
            selection = demo.select_static(options.stream)
            gamma = selection.gamma
        demo.start([static(gamma)])
        order = [OFF, static(gamma), ADAPTIVE, STEERED]
        outcome = demo.compare(options.stream, order, options.repeats, selection)
        with terminal.working("stopping"):
            demo.stop()
    seconds = round(time.monotonic() - started, 1)
    write_result(
        {**facts, "seconds": seconds, **result.as_json(outcome), "profile": profile},
        options.output,
    )
    picture.draw(outcome, options.output / "demo.png")
    return outcome


class _Demo(Harness):
    """The running processes, and what is done with them."""

    def __init__(self, place: Workplace, terminal: Terminal, stack: ExitStack) -> None:
        super().__init__(place, terminal, stack)
        self._sidecar = stack.enter_context(SidecarHandle(place.address, engines.ENGINE_ID))

    def prepare(self, profile_seconds: float) -> Mapping[str, Any]:
        """Starts sidecar and engines and measures the steered one's profile."""
        self._terminal.heading("Starting")
        with self._terminal.working("sidecar: controller serve") as work:
            self._start_sidecar(self._sidecar)
            work.result = f"on {self._place.address}"
        self.start([STEERED, OFF, ADAPTIVE])
        self._terminal.say(f"steered by {self._sidecar.why()}")
        began = time.monotonic()
        profile = json.loads(self._measure_profile(STEERED, self._sidecar, profile_seconds))
        (self._place.output / "profile.json").write_text(json.dumps(profile, indent=1) + "\n")
        report.show_profile(profile, self._terminal)
        seconds = round(time.monotonic() - began, 1)
        return {"seconds": seconds, "profile_id": self._sidecar.status().profile_id}

    def start(self, policies: Sequence[str]) -> None:
        """Starts engines side by side, waits for them and warms them up."""
        with self._terminal.working(f"engines: {', '.join(policies)}") as work:
            for engine in [self._keep(engines.launch(name, self._place)) for name in policies]:
                began = time.monotonic()

                def tick(policy: str = engine.policy, began: float = began) -> None:
                    work.update(f"{policy}, {time.monotonic() - began:.0f} s")

                sidecar = self._sidecar if engine.policy == STEERED else None
                engine.wait_ready(engines.READY_SECONDS, tick, sidecar)
        for policy in policies:
            self._play(policy, warm_up_stream(), f"warming up {policy}")

    def select_static(self, stream: Sequence[StreamPhase]) -> Selection:
        """Finds the best fixed draft length for this stream, on the steered engine held to each.

        Answers are half as long as in the comparison, everything else is the same.
        """
        self._terminal.heading("Finding the best static γ for this stream (answers half as long)")
        short = halved(stream)
        plays: dict[int, tuple[Play, ...]] = {gamma: () for gamma in engines.GAMMAS if gamma > 0}
        candidates = tuple(plays)
        for _ in range(2):
            for gamma in candidates:
                with self._sidecar.pinned(gamma):
                    plays[gamma] += (self._play(STEERED, short, f"γ = {gamma}"),)
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
        """Plays the stream on every engine, in reverse order every second time: drift cancels."""
        self._terminal.heading(
            f"One stream, {len(order)} policies, {repeats} repeats: "
            f"{sum(len(phase.requests) for phase in stream)} requests, "
            f"{sum(phase.new_tokens for phase in stream)} tokens a play"
        )
        plays: dict[str, list[Play]] = {policy: [] for policy in order}
        watched: list[tuple[GammaSample, ...]] = []
        for repeat in range(repeats):
            for policy in order if repeat % 2 == 0 else reversed(order):
                watch = GammaWatch(self._sidecar) if policy == STEERED else None
                with watch or nullcontext():
                    text = f"repeat {repeat + 1}/{repeats}: {policy}"
                    plays[policy].append(self._play(policy, stream, text))
                if watch is not None:
                    watched.append(watch.samples)
        policies = tuple(PolicyPlays(policy, tuple(plays[policy])) for policy in order)
        return DemoOutcome(stream, policies, tuple(watched), selection)

    def stop(self) -> None:
        """Asks all engines to end at once; the context waits for each."""
        for engine in self._engines.values():
            engine.child.terminate()

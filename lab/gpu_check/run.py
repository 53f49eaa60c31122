"""The check from end to end, with one sidecar and at most two engines at a time."""

import asyncio
import json
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.gpu_check import acceptance, engines, switches
from lab.gpu_check.engines import OFF, PINNED, STATIC, STEERED, EngineSetting
from lab.gpu_check.load import build_stream, steady_stream
from lab.gpu_check.shapes import Shape
from lab.harness.engines import (
    Engine,
    Workplace,
    launch_sidecar,
    profile_command,
    wait_introduced,
    wait_ready,
    wait_serving,
)
from lab.harness.errors import EngineFailedError
from lab.harness.load_generator import Play, play
from lab.harness.machine import machine, versions
from lab.harness.processes import Child
from lab.harness.sidecar import Pin, SidecarHandle
from lab.harness.spread import Spread
from lab.harness.stream import StreamPhase
from lab.harness.terminal import Terminal
from speculation.v1 import engine_pb2

Arm = tuple[str, int]
# An engine and the arm that it is held to, None for what it does by itself.
Held = tuple[str, Arm | None]

# Beyond its own budget: waiting for load to begin, the fit.
_PROFILE_SPARE_SECONDS = 120.0
# So many of the best static arms are played against the steered engine.
_FINALISTS = 2
_SEED = 7
# Methods of `_Check`: the first always, the others as asked for, in this order.
START = "start"
PARTS = ("profile", "arms", "switches", "asleep", "overhead")
# Answers so many times as long as the moving load's: hundreds of changes of the arm, and little
# but decoding.
_SWITCHING_TIMES = 12
_ASLEEP_TIMES = 4


@dataclass(frozen=True, slots=True)
class GpuCheckOptions:
    """What a check is made of.

    engine_options: further ones for SGLang.  keep_profile: a folder that gets the profile.
    parts: of PARTS, in their order.
    """

    shape: Shape
    on_cpu: bool
    repeats: int
    profile_seconds: float
    output: Path
    engine_options: tuple[str, ...] = ()
    keep_profile: Path | None = None
    parts: tuple[str, ...] = PARTS


def run(options: GpuCheckOptions, terminal: Terminal) -> dict[str, Any]:
    """Everything the check finds, which is also in result.json.  Raises HarnessError."""
    started = time.monotonic()
    document: dict[str, Any] = {
        "command": [Path(sys.executable).name, *sys.orig_argv[1:]],
        "shape": options.shape.name,
        "acceptance": dict(acceptance.ASSUMED),
        "machine": machine(),
        "versions": versions(),
    }
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="speculation-gpu-check-")))
        check = _Check(options, scratch, terminal, stack)
        # What is found is kept as it is found: a check is long, and engines end.
        for part in (START, *options.parts):
            getattr(check, part)(document)
            document["seconds"] = round(time.monotonic() - started, 1)
            text = json.dumps(document, indent=1) + "\n"
            (options.output / "result.json").write_text(text)
    return document


class _Check:
    """The running processes; each public method is one part and adds what it found."""

    def __init__(
        self, options: GpuCheckOptions, scratch: Path, terminal: Terminal, stack: ExitStack
    ) -> None:
        self._options, self._shape = options, options.shape
        self._place = Workplace(options.output, scratch)
        self._terminal = terminal
        self._stack = stack
        self._setting = EngineSetting(
            options.shape, options.shape.write(scratch), options.on_cpu, options.engine_options
        )
        self._acceptance = acceptance.environment(scratch)
        self._engines: dict[str, Engine] = {}
        self._sidecars = {
            policy: stack.enter_context(SidecarHandle(self._place.address, policy))
            for policy in (STEERED, PINNED)
        }
        self._stream = build_stream(options.shape, options.shape.loads, _SEED)

    def start(self, document: dict[str, Any]) -> None:
        """The sidecar and the steered engine: startup seconds, and what its states take."""
        self._terminal.heading("Starting")
        child = self._stack.enter_context(launch_sidecar(self._place))
        wait_serving(child, self._sidecars[STEERED])
        seconds = self._start(STEERED)
        said = self._server_info(STEERED)["internal_states"][0]["speculation_controller"]
        document["startup"] = {"seconds": {STEERED: seconds}, "prepared": said["prepared"]}

    def profile(self, document: dict[str, Any]) -> None:
        """C(drafter, B, gamma, kv), by `controller profile`; the sidecar plans from it then."""
        self._terminal.heading("Measuring step costs: controller profile")
        budget = self._options.profile_seconds
        sizes = ",".join(map(str, self._shape.batch_sizes))
        steered = self._engines[STEERED]
        command = profile_command(self._place, steered, STEERED, budget, "--batch-sizes", sizes)
        with (
            Child("controller profile", command, self._place.log("profile")) as child,
            self._terminal.working(f"B = {sizes}") as work,
        ):
            child.wait(budget + _PROFILE_SPARE_SECONDS, lambda: work.update(child.last_line()))
        text = self._place.profile.read_text()
        for folder in filter(None, (self._options.output, self._options.keep_profile)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self._profile_name(document)).write_text(text)
        document["profile"] = json.loads(text)

    def arms(self, document: dict[str, Any]) -> None:
        """Every arm held over the moving load, and the best of them against the steered engine."""
        self._terminal.heading("The moving load, every arm in turn, then steered")
        rates: dict[Arm, float] = {}
        ran: Counter[Arm] = Counter()
        eager: Counter[Arm] = Counter()
        accepted: Counter[Arm] = Counter()
        verified: Counter[Arm] = Counter()
        for arm in self._shape.arms():
            played, pin = self._play_pinned(STEERED, arm, self._stream)
            rates[arm] = played.tokens_per_second
            ran.update(_arms_of(pin.reports))
            eager.update(_arms_of(r for r in pin.reports if r.flags.eager_fallback))
            for one, report in zip(_arms_of(pin.reports), pin.reports, strict=True):
                accepted[one] += sum(k * count for k, count in enumerate(report.accepted_counts))
                verified[one] += sum(report.accepted_counts)
        finalists = sorted(rates, key=lambda arm: -rates[arm])[:_FINALISTS]
        plays: dict[Arm | None, list[Play]] = {None: [], **{arm: [] for arm in finalists}}
        for repeat in range(self._options.repeats):
            turns: list[Arm | None] = [*finalists, None]
            for turn in turns if repeat % 2 == 0 else turns[::-1]:
                plays[turn].append(self._play_held((STEERED, turn), self._stream))
        document["arms"] = [
            {
                "drafter": arm[0],
                "gamma": arm[1],
                "tokens_per_second": round(rates[arm], 2),
                "steps": ran[arm],
                "eager_steps": eager[arm],
                "acceptance_length": round(1 + accepted[arm] / max(verified[arm], 1), 3),
            }
            for arm in rates
        ]
        document["eager_steps"] = sum(eager.values())
        document["graphs_expected"] = engines.graphs_expected(
            self._options.engine_options, on_cpu=self._options.on_cpu
        )
        document["steered"] = {
            "tokens_per_second": _rates(plays[None]).as_json(),
            "over": [
                {"drafter": arm[0], "gamma": arm[1], **_ratio(plays[None], plays[arm])}
                for arm in finalists
            ],
            "phases": _phase_rates(plays),
        }

    def switches(self, document: dict[str, Any]) -> None:
        """What a step takes more when it runs another arm than the one before."""
        self._terminal.heading("Changing the arm under a steady load")
        size = sorted(self._shape.batch_sizes)[len(self._shape.batch_sizes) // 2]
        stream = steady_stream(self._shape, size, _SEED + 1, _SWITCHING_TIMES)
        gammas = [gamma for gamma in self._shape.gammas if gamma]
        corners = (("eagle3", gammas[0]), ("dflash", gammas[-1]), ("eagle3", gammas[-1]))
        arms = [arm for arm in corners if arm in self._shape.arms()]
        with self._sidecars[STEERED].pinned(arms[0][1], arms[0][0]) as pin:
            with switches.taking_turns(pin, arms):
                for _ in range(self._options.repeats):
                    self._play(STEERED, stream, f"×{size}, {len(arms)} arms in turn")
            document["switch"] = {"batch_size": size, **switches.cost(pin.reports, size)}

    def asleep(self, document: dict[str, Any]) -> None:
        """The steered engine at gamma 0 against one without speculation configured."""
        self._terminal.heading("Not speculating: against an engine without speculation")
        document["startup"]["seconds"][OFF] = self._start(OFF)
        found = {}
        for size in dict.fromkeys(load.concurrency for load in self._shape.loads):
            stream = steady_stream(self._shape, size, _SEED + 2, _ASLEEP_TIMES)
            found[str(size)] = self._ratio((STEERED, ("eagle3", 0)), (OFF, None), stream)
        document["asleep"] = found
        self._stop(OFF)

    def overhead(self, document: dict[str, Any]) -> None:
        """One draft length, with the plugin and the sidecar against SGLang alone."""
        self._terminal.heading("The same draft length with and without the plugin")
        self._stop(STEERED)
        seconds = document["startup"]["seconds"]
        seconds[STATIC] = self._start(STATIC)
        seconds[PINNED] = self._start(PINNED)
        arm = ("eagle3", self._shape.static_gamma)
        ratio = self._ratio((PINNED, arm), (STATIC, None), self._stream)
        document["pinned"] = {"gamma": arm[1], **ratio}
        self._stop(STATIC, PINNED)

    def _ratio(self, ours: Held, theirs: Held, stream: Sequence[StreamPhase]) -> dict[str, Any]:
        """Of tokens/s, in pairs, every second one the other way round, after a warm-up each."""
        plays: dict[Held, list[Play]] = {ours: [], theirs: []}
        for repeat in range(self._options.repeats + 1):
            for held in (ours, theirs) if repeat % 2 == 0 else (theirs, ours):
                plays[held].append(self._play_held(held, stream))
        return _ratio(plays[ours][1:], plays[theirs][1:])

    def _start(self, policy: str) -> float:
        """Starts an engine and plays a little on it; the seconds until it was ready."""
        began = time.monotonic()
        with self._terminal.working(f"engine: {policy}") as work:
            engine = engines.launch(policy, self._setting, self._place, self._acceptance)
            self._engines[policy] = engine
            self._stack.enter_context(engine.child)
            wait_ready(
                engine,
                engines.READY_SECONDS,
                lambda: work.update(f"{time.monotonic() - began:.0f} s"),
            )
            seconds = round(time.monotonic() - began, 1)
            if policy in self._sidecars:
                wait_introduced(engine, self._sidecars[policy])
            work.result = f"ready after {seconds} s"
        for size in dict.fromkeys(load.concurrency for load in self._shape.loads):
            self._play(policy, steady_stream(self._shape, size, _SEED + 3), f"{policy}: warm-up")
        return seconds

    def _profile_name(self, document: Mapping[str, Any]) -> str:
        cards = document["machine"]["gpus"] or ["cpu"]
        card = re.sub(r"[^a-z0-9]+", "-", cards[0].split(",")[0].lower()).strip("-")
        return f"{self._shape.name}-{card}.json"

    def _stop(self, *policies: str) -> None:
        for policy in policies:
            self._engines.pop(policy).child.stop()

    def _server_info(self, policy: str) -> Mapping[str, Any]:
        url = f"{self._engines[policy].url}/server_info"
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # our own engine
            found: Mapping[str, Any] = json.load(answer)
        return found

    def _play_held(self, held: Held, stream: Sequence[StreamPhase]) -> Play:
        policy, arm = held
        if arm is None:
            return self._play(policy, stream, policy)
        return self._play_pinned(policy, arm, stream)[0]

    def _play_pinned(
        self, policy: str, arm: Arm, stream: Sequence[StreamPhase]
    ) -> tuple[Play, Pin]:
        drafter, gamma = arm
        with self._sidecars[policy].pinned(gamma, drafter) as pin:
            return self._play(policy, stream, f"{policy}: {drafter} γ = {gamma}"), pin

    def _play(self, policy: str, stream: Sequence[StreamPhase], text: str) -> Play:
        engine = self._engines[policy]
        with self._terminal.working(text) as work:
            try:
                played = asyncio.run(play(stream, engine.url, lambda p: work.update(p.name)))
            except EngineFailedError as error:
                raise EngineFailedError(f"{policy}: {error}\n{engine.child.tail()}") from error
            work.result = f"{played.tokens_per_second:.1f} tokens/s"
        for lost in played.lost:
            self._terminal.say(f"{policy}: {lost}")
        return played


def _arms_of(reports: Iterable[engine_pb2.StepReport]) -> list[Arm]:
    return [(report.drafter if report.gamma else "eagle3", report.gamma) for report in reports]


def _rates(plays: Sequence[Play]) -> Spread:
    return Spread(tuple(play.tokens_per_second for play in plays))


def _ratio(ours: Sequence[Play], theirs: Sequence[Play]) -> dict[str, Any]:
    """Of tokens/s, pair by pair: what drifts from one to the next cancels."""
    pairs = zip(ours, theirs, strict=True)
    return Spread(tuple(a.tokens_per_second / b.tokens_per_second for a, b in pairs)).as_json()


def _phase_rates(plays: Mapping[Arm | None, Sequence[Play]]) -> list[dict[str, Any]]:
    """Tokens/s of each phase, steered and the finalists."""
    phases = next(iter(plays.values()))[0].phases
    return [
        {
            "phase": phase.phase.name,
            **{
                f"{arm[0]} {arm[1]}" if arm else "steered": Spread(
                    tuple(one.phases[number].tokens_per_second for one in found)
                ).as_json()
                for arm, found in plays.items()
            },
        }
        for number, phase in enumerate(phases)
    ]

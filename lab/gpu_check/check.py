"""The running processes of a check: one sidecar, and at most two engines at a time."""

import json
import math
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.cpu_engine.forking import popen
from lab.gpu_check import (
    acceptance,
    engines,
    float32_rmsnorm,
    plugins,
    shim_time,
    small_engines,
    syncs,
)
from lab.gpu_check.budget import Deadline, OutOfTimeError, Prices, Tally
from lab.gpu_check.engines import PINNED, PINNED_NO_OVERLAP, STEERED, EngineSetting
from lab.gpu_check.load import moving_stream, warm_up_stream
from lab.gpu_check.shapes import Device, Scale, Shape
from lab.harness.engines import Harness, Workplace, launch_engine
from lab.harness.errors import EngineFailedError
from lab.harness.load_generator import PhasePlay, Play, StreamPhase, paired_ratio
from lab.harness.sidecar import Pin, SidecarHandle
from lab.harness.terminal import Terminal

Arm = tuple[str, int]
# An engine and the arm that it is pinned to; None if its arm is not pinned.
Contender = tuple[str, Arm | None]

_STEERED_ENGINES = (STEERED, PINNED, PINNED_NO_OVERLAP, *small_engines.STEERED_SMALL)
# A play is not begun when less is left, because what it would measure could not be written.
_MIN_PLAY_SECONDS = 2.0
# Parts that never have two engines of the shape at once.
_PARTS_WITH_ONE_ENGINE = ("exact", "rounding", "learning", "outage", "costs", "graphs", "switches")


@dataclass(frozen=True, slots=True)
class GpuCheckOptions:
    """The options of a check.

    parts: names, in the order in which they run.  seconds: of the whole check.  scale: None for
    what fits the seconds.  graph_sizes: () for those of shape and scale.  startup_seconds: the most
    that an engine may take.  engine_options, small_options: further options for SGLang, for the
    engines of the shape and for those of the small trained models.  keep_profile: a folder that
    gets the profile too.
    """

    shape: Shape
    device: Device
    parts: tuple[str, ...]
    seconds: float
    output: Path
    scale: Scale | None = None
    graph_sizes: tuple[int, ...] = ()
    startup_seconds: float = 600.0
    engine_options: tuple[str, ...] = ()
    small_options: tuple[str, ...] = ()
    keep_profile: Path | None = None
    prices: Prices = field(default_factory=Prices.read)


class Check(Harness):
    """Starts and stops engines and plays streams on them; the results are in `document`.

    save: writes the document and the page.
    """

    def __init__(
        self,
        options: GpuCheckOptions,
        scale: Scale,
        deadline: Deadline,
        place: Workplace,
        terminal: Terminal,
        stack: ExitStack,
        document: dict[str, Any],
        save: Callable[[], None],
    ) -> None:
        super().__init__(place, terminal, stack)
        self.options, self.shape, self.scale = options, options.shape, scale
        self.place, self.terminal = place, terminal
        self.deadline, self.document, self.save = deadline, document, save
        self.tally = Tally()
        self.stream = moving_stream(options.shape, scale.answer_share)
        self.ledger = place.scratch / "syncs.json"
        self.shim_times = place.scratch / "shim-times.json"
        self._plugins = plugins.environment(place.scratch)
        self._handles: dict[str, SidecarHandle] = {}
        # As soon as any part compares two engines, all of them have the smaller pool.
        self.setting = EngineSetting(
            options.shape,
            options.shape.write(place.scratch),
            options.device,
            options.graph_sizes or scale.batch_sizes(options.shape),
            in_pairs=any(name not in _PARTS_WITH_ONE_ENGINE for name in options.parts),
            options=options.engine_options,
        )

    # Engines.

    def run_only(self, *policies: str) -> None:
        """Stops all engines but these, and starts those of them that do not run."""
        for engine_name in [
            engine_name for engine_name in self._engines if engine_name not in policies
        ]:
            self._note_lost_capabilities(engine_name)
            self._engines.pop(engine_name).child.stop()
        if policies and self._sidecar_child is None:
            self._start_sidecar(self.sidecar(STEERED))
        for engine_name in policies:
            if engine_name not in self._engines:
                self._start(engine_name)

    def abandon(self) -> None:
        """Stops all engines, whatever their state; forgets a sidecar that has died."""
        while self._engines:
            self._engines.popitem()[1].child.stop()
        if self._sidecar_child is not None:
            try:
                self._sidecar_child.check()
            except EngineFailedError:
                self._sidecar_child = None

    def sidecar(self, engine_name: str) -> SidecarHandle:
        """Returns the handle with which a part reads and pins this engine at the sidecar."""
        if engine_name not in self._handles:
            handle = SidecarHandle(self.place.address, engine_name)
            self._handles[engine_name] = self._stack.enter_context(handle)
        return self._handles[engine_name]

    def kill_sidecar(self) -> None:
        """Kills the sidecar, as a node that runs out of memory would."""
        assert self._sidecar_child is not None
        self._sidecar_child.kill()

    def restart_sidecar(self) -> None:
        """Starts a sidecar at the same address, and waits until it serves."""
        self._start_sidecar(self.sidecar(STEERED))

    def url(self, engine_name: str) -> str:
        """Returns the address of a running engine's HTTP API."""
        return self._engines[engine_name].url

    def status(self, engine_name: str = STEERED) -> dict[str, Any]:
        """Returns what the plugin says in an engine's /server_info.  Raises EngineFailedError."""
        url = f"{self.url(engine_name)}/server_info"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # our own engine
                states: list[dict[str, Any]] = json.load(answer)["internal_states"]
        except OSError as error:
            raise EngineFailedError(f"{engine_name}: {url} is not answered: {error}") from error
        status: dict[str, Any] = states[0]["speculation_controller"]
        return status

    # Plays.

    def play(self, engine_name: str, stream: Sequence[StreamPhase], text: str = "") -> Play:
        """Plays a stream on an engine.  Raises OutOfTimeError when no time is left."""
        self.deadline.require(_MIN_PLAY_SECONDS, text or engine_name)
        played = self._play(engine_name, stream, text or engine_name)
        self.count(played)
        return played

    def play_silently(self, engine_name: str, stream: Sequence[StreamPhase]) -> Play:
        """Plays a stream in another thread than the one that writes to the terminal."""
        return self._engines[engine_name].play(stream)

    def count(self, played: Play) -> None:
        """Adds a play to what the check has done."""
        self.tally.requests += len(played.answers)
        self.tally.play_seconds += played.seconds
        self.tally.passes += sum(map(decode_steps, played.phases))

    def play_pinned(
        self, engine_name: str, arm: Arm, stream: Sequence[StreamPhase]
    ) -> tuple[Play, Pin]:
        """Plays a stream while the engine is held to an arm."""
        drafter, gamma = arm
        with self.sidecar(engine_name).pinned(gamma, drafter) as pin:
            return self.play(engine_name, stream, f"{engine_name}: {drafter} γ = {gamma}"), pin

    def play_contender(self, contender: Contender, stream: Sequence[StreamPhase]) -> Play:
        """Plays a stream on an engine, held to an arm or not."""
        engine_name, arm = contender
        if arm is None:
            return self.play(engine_name, stream)
        return self.play_pinned(engine_name, arm, stream)[0]

    def play_pairs(
        self, first: Contender, second: Contender, stream: Sequence[StreamPhase]
    ) -> tuple[list[Play], list[Play]]:
        """Plays in turns, in reverse order every second time (A B B A), after a warm-up pair."""
        plays: dict[Contender, list[Play]] = {first: [], second: []}
        for repeat in range(self.scale.repeats + 1):
            for contender in (first, second) if repeat % 2 == 0 else (second, first):
                plays[contender].append(self.play_contender(contender, stream))
        return plays[first][1:], plays[second][1:]

    def measure_ratio(
        self, first: Contender, second: Contender, stream: Sequence[StreamPhase]
    ) -> dict[str, Any]:
        """Compares tokens/s, pair by pair."""
        return paired_ratio(*self.play_pairs(first, second, stream)).as_json()

    # Starting.

    def _start(self, engine_name: str) -> None:
        start_time = time.monotonic()
        limit = min(self.options.startup_seconds, self.deadline.remaining_seconds)
        self.deadline.require(
            self.options.prices.launch / 2, f"the start of the engine {engine_name}"
        )
        with self.terminal.show_progress(f"engine: {engine_name}") as work:
            engine = self._register_engine(self._launch(engine_name))
            try:
                engine.wait_ready(
                    limit,
                    lambda: work.update(f"{time.monotonic() - start_time:.0f} s"),
                    self.sidecar(engine_name) if engine_name in _STEERED_ENGINES else None,
                )
            except EngineFailedError as error:
                self._engines.pop(engine_name).child.stop()
                if self.deadline.remaining_seconds > 0:
                    raise
                text = f"the engine {engine_name} had not started within the budget"
                raise OutOfTimeError(text) from error
            seconds = round(time.monotonic() - start_time, 1)
            work.result = f"ready after {seconds} s"
        self.tally.launches += 1
        self.tally.launch_seconds += seconds
        startup = self.document.setdefault("startup", {"seconds": {}})
        startup["seconds"][engine_name] = seconds
        if engine_name in _STEERED_ENGINES:
            self._count_captures(engine_name)
        if engine_name in engines.SHAPE_ENGINES:
            self.play(engine_name, warm_up_stream(self.shape), f"{engine_name}: warm-up")

    def _launch(self, engine_name: str) -> Any:
        if engine_name in engines.SHAPE_ENGINES:
            variables = self._plugins | acceptance.variables() | syncs.variables(self.ledger)
            if engine_name in (PINNED, PINNED_NO_OVERLAP):
                variables |= shim_time.variables(self.shim_times)
            return engines.launch(engine_name, self.setting, self.place, variables)
        engine_variables = (
            small_engines.environment(engine_name, self.place.address, self.options.device)
            | self._plugins
        )
        if not small_engines.is_bfloat16(engine_name):
            engine_variables |= {float32_rmsnorm.VARIABLE: "1"}
        if engine_name == small_engines.LEARNING:
            engine_variables |= syncs.variables(self.ledger.with_stem(engine_name))
        return launch_engine(
            engine_name,
            lambda port: small_engines.command(
                engine_name, port, self.options.small_options, self.options.device
            ),
            engine_variables,
            self.place,
            popen,
        )

    def _note_lost_capabilities(self, policy: str) -> None:
        """Notes what the plugin has given up in an engine: a drafter that failed, for example."""
        if policy not in _STEERED_ENGINES:
            return
        try:
            lost_capabilities = self.status(policy)["lost"]
        except EngineFailedError as error:
            # It is about to be stopped, so its failure does not matter to the next part.
            lost_capabilities = [{"capability": "the engine", "reason": str(error)}]
        if lost_capabilities:
            self.document.setdefault("lost", {})[policy] = lost_capabilities

    def _count_captures(self, engine_name: str) -> None:
        """Notes how long the captures of the further draft lengths took."""
        prepared = self.status(engine_name)["prepared"]
        sizes = (
            small_engines.graph_sizes(self.options.device)
            if engine_name in small_engines.SMALL_ENGINES
            else self.setting.graph_sizes
        )
        gammas = tuple(map(int, prepared))
        self.tally.captures += small_engines.count_chain_captures(gammas, len(sizes))
        self.tally.capture_seconds += sum(state["seconds"] for state in prepared.values())


def decode_steps(played: PhasePlay) -> int:
    """Counts the decode steps of a phase, as if every client had had an equal share of them."""
    steps = sum(answer.verify_steps or len(answer.tokens) for answer in played.answers)
    return math.ceil(steps / played.phase.concurrency)

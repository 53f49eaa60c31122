"""Runs the check from end to end, with one sidecar and at most two engines at a time."""

import json
import os
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.cpu_engine.forking import popen
from lab.gpu_check import acceptance, engines, exact, graphs, learning, switches, syncs
from lab.gpu_check.engines import OFF, PINNED, STATIC, STEERED, EngineSetting
from lab.gpu_check.exact_run import Comparison, steered_policies
from lab.gpu_check.load import build_stream, steady_stream
from lab.gpu_check.parts import DEFAULT_PARTS
from lab.gpu_check.shapes import Shape
from lab.harness.engines import Engine, Harness, Workplace, launch_engine
from lab.harness.load_generator import Play, acceptance_length, paired_ratio, phase_rates
from lab.harness.machine import run_facts, write_result
from lab.harness.overrides import overridden
from lab.harness.sidecar import Pin, SidecarHandle
from lab.harness.stream import StreamPhase
from lab.harness.terminal import Terminal
from speculation.v1 import engine_pb2

Arm = tuple[str, int]
# An engine and the arm that it is held to, None for what it does by itself.
Held = tuple[str, Arm | None]

# So many of the best static arms are played against the steered engine.
_FINALISTS = 2
_SEED = 7
# Prompts of each domain, tokens of an answer, and how often every engine plays them.
_EXACT_SIZES = (4, 256, 3)
_EXACT_SIZES_ON_CPU = (2, 48, 1)
# Requests, tokens of an answer, and plays, of a drafter that learns.
_LEARNING_SIZES = (8, 256, 4)
_LEARNING_SIZES_ON_CPU = (4, 96, 2)
# Answers so many times as long as the moving load's: hundreds of changes of the arm, and little
# but decoding.
_SWITCHING_TIMES = 12
_ASLEEP_TIMES = 4


@dataclass(frozen=True, slots=True)
class GpuCheckOptions:
    """The options of a check.

    engine_options: further options for SGLang.  keep_profile: a folder that gets the profile.
    parts: of parts.PARTS, in their order.
    """

    shape: Shape
    on_cpu: bool
    repeats: int
    profile_seconds: float
    output: Path
    engine_options: tuple[str, ...] = ()
    keep_profile: Path | None = None
    parts: tuple[str, ...] = DEFAULT_PARTS


def run(options: GpuCheckOptions, terminal: Terminal) -> dict[str, Any]:
    """Runs the check; returns what it found, which is in result.json too.  Raises HarnessError."""
    started = time.monotonic()
    document: dict[str, Any] = {
        **run_facts(),
        "shape": options.shape.name,
        "acceptance": dict(acceptance.ASSUMED),
    }
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="speculation-gpu-check-")))
        check = _Check(options, scratch, terminal, stack)
        # What is found is kept as it is found: a check is long, and engines end.
        for part in options.parts:
            check.prepare(part, document)
            getattr(check, part)(document)
            document["seconds"] = round(time.monotonic() - started, 1)
            write_result(document, options.output)
    return document


class _Check(Harness):
    """The running processes; each public method is one part and adds what it found."""

    def __init__(
        self, options: GpuCheckOptions, scratch: Path, terminal: Terminal, stack: ExitStack
    ) -> None:
        self._options, self._shape = options, options.shape
        super().__init__(Workplace(options.output, scratch), terminal, stack)
        self._setting = EngineSetting(
            options.shape, options.shape.write(scratch), options.on_cpu, options.engine_options
        )
        accepting = acceptance.environment(scratch)
        self._acceptance = accepting | syncs.environment(scratch, accepting["PYTHONPATH"])
        self._ledger = syncs.ledger_path(scratch)
        self._sidecars = {
            policy: stack.enter_context(SidecarHandle(self._place.address, policy))
            for policy in (STEERED, PINNED, exact.EXACT, exact.NO_OVERLAP, learning.LEARNING)
        }
        self._stream = build_stream(options.shape, options.shape.loads, _SEED)

    def prepare(self, part: str, document: dict[str, Any]) -> None:
        """Starts what the part needs and does not run yet: the sidecar, the steered engine."""
        if self._sidecar_child is None:
            self._start_sidecar(self._sidecars[STEERED])
        if part in ("exact", "learning") or "startup" in document:
            return
        self._terminal.heading("Starting the steered engine")
        seconds = self._start(STEERED)
        said = self._status()
        document["startup"] = {
            "seconds": {STEERED: seconds},
            "prepared": said["prepared"],
            "without_graphs": said["eager"]["without_graphs"],
        }
        document["graphs_expected"] = engines.graphs_expected(
            self._options.engine_options, on_cpu=self._options.on_cpu
        )

    def exact(self, document: dict[str, Any]) -> None:
        """Compares every token of the trained small models under random arms with plain decoding.

        With and without the overlap schedule, where SGLang has one.
        """
        self._terminal.heading("Tokens under random arms, against plain decoding")
        on_cpu = self._options.on_cpu
        prompts, new_tokens, plays = _EXACT_SIZES_ON_CPU if on_cpu else _EXACT_SIZES
        plain = self._start_exact(exact.PLAIN)
        comparison = Comparison(self._play, plain.url, exact.build_stream(prompts, new_tokens))
        for policy in steered_policies(on_cpu=on_cpu):
            self._start_exact(policy)
            comparison.compare(policy, self._sidecars[policy], plays)
            self._stop(policy)
        self._stop(exact.PLAIN)
        document["exact"] = comparison.document()

    def learning(self, document: dict[str, Any]) -> None:
        """Has a drafter learn online; compares its tokens, and counts what waits for the device."""
        self._terminal.heading("A drafter that learns while it serves")
        requests, new_tokens, plays = (
            _LEARNING_SIZES_ON_CPU if self._options.on_cpu else _LEARNING_SIZES
        )
        stream = learning.build_stream(requests, new_tokens)
        plain = self._start_exact(exact.PLAIN)
        expected = self._play(exact.PLAIN, stream, "plain decoding").answers
        scratch = self._place.scratch / learning.LEARNING
        scratch.mkdir()
        watched = syncs.environment(scratch, os.environ.get("PYTHONPATH", ""))
        self._start_exact(learning.LEARNING, learning.environment(self._place.address) | watched)
        differing, lengths = [], []
        ledger = syncs.ledger_path(scratch)
        with overridden(self._place.address, *learning.RULE):
            syncs.switch_path(ledger).touch()
            for number in range(plays):
                title = f"{learning.LEARNING}: {number + 1} of {plays}"
                found = self._play(learning.LEARNING, stream, title).answers
                lengths.append(acceptance_length(found))
                differing += exact.differences(
                    learning.LEARNING, expected, found,
                    lambda context: exact.top_two(plain.url, context), f"eagle3 {learning.GAMMA}",
                )  # fmt: skip
            syncs.switch_path(ledger).unlink()
            self._play(learning.LEARNING, stream, "the last steps")
        status = self._status(learning.LEARNING)
        self._stop(learning.LEARNING, exact.PLAIN)
        document["learning"] = learning.document(differing, lengths, status, syncs.read(ledger))

    def graphs(self, document: dict[str, Any]) -> None:
        """Runs every arm at every batch size; counts eager steps and device synchronisations."""
        self._terminal.heading("Graphs and synchronisations, every arm at every batch size")
        sizes = self._shape.batch_sizes
        captured = self._sidecars[STEERED].status().engine.fingerprint.graph_batch_sizes
        switch = syncs.switch_path(self._ledger)
        switch.touch()
        found = graphs.EagerSteps(tuple(captured), document["startup"]["prepared"])
        for arm in self._shape.arms():
            for size in sizes:
                stream = steady_stream(self._shape, size, _SEED + 4)
                found.add(self._play_pinned(STEERED, arm, stream)[1].reports)
        switch.unlink()
        # The engine writes its ledger at the next step.
        self._play(STEERED, steady_stream(self._shape, 1, _SEED + 5), "the last step")
        document["graphs"] = {
            **found.document(),
            "passes": self._status()["eager"]["steps"],
            "syncs": syncs.read(self._ledger),
        }

    def costs(self, document: dict[str, Any]) -> None:
        """Measures C(drafter, B, gamma, kv); from then on the sidecar plans with it."""
        sizes = ",".join(map(str, self._shape.batch_sizes))
        text = self._measure_profile(
            STEERED, self._sidecars[STEERED], self._options.profile_seconds, "--batch-sizes", sizes
        )
        gpus = document["machine"]["gpus"] or ["cpu"]
        gpu = re.sub(r"[^a-z0-9]+", "-", gpus[0].split(",")[0].lower()).strip("-")
        for folder in filter(None, (self._options.output, self._options.keep_profile)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self._shape.name}-{gpu}.json").write_text(text)
        document["profile"] = json.loads(text)

    def arms(self, document: dict[str, Any]) -> None:
        """Plays the moving load held to each arm, then the best arms against the steered engine."""
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
        document["steered"] = {
            "tokens_per_second": phase_rates(plays[None]).as_json(),
            "over": [
                {
                    "drafter": arm[0],
                    "gamma": arm[1],
                    **paired_ratio(plays[None], plays[arm]).as_json(),
                }
                for arm in finalists
            ],
            "phases": _phase_rates(plays),
        }

    def switches(self, document: dict[str, Any]) -> None:
        """Measures how much longer a step takes that runs another arm than the step before it."""
        self._terminal.heading("Changing the arm under a steady load")
        size = sorted(self._shape.batch_sizes)[len(self._shape.batch_sizes) // 2]
        stream = steady_stream(self._shape, size, _SEED + 1, _SWITCHING_TIMES)
        gammas = [gamma for gamma in self._shape.gammas if gamma]
        corners = (("eagle3", gammas[0]), ("dflash", gammas[-1]), ("eagle3", gammas[-1]))
        arms = [arm for arm in corners if arm in self._shape.arms()]
        with self._sidecars[STEERED].pinned(arms[0][1], arms[0][0]) as pin:
            with switches.ArmRotation(pin, arms):
                for _ in range(self._options.repeats):
                    self._play(STEERED, stream, f"×{size}, {len(arms)} arms in turn")
            document["switch"] = {"batch_size": size, **switches.cost(pin.reports, size)}

    def asleep(self, document: dict[str, Any]) -> None:
        """Compares the steered engine at gamma 0 with one that has no speculation configured."""
        self._terminal.heading("Not speculating: against an engine without speculation")
        document["startup"]["seconds"][OFF] = self._start(OFF)
        found = {}
        for size in dict.fromkeys(load.concurrency for load in self._shape.loads):
            stream = steady_stream(self._shape, size, _SEED + 2, _ASLEEP_TIMES)
            found[str(size)] = self._ratio((STEERED, ("eagle3", 0)), (OFF, None), stream)
        document["asleep"] = found
        self._stop(OFF)

    def overhead(self, document: dict[str, Any]) -> None:
        """Compares one draft length with the plugin and the sidecar, and in SGLang alone."""
        self._terminal.heading("The same draft length with and without the plugin")
        self._stop(STEERED)
        seconds = document["startup"]["seconds"]
        seconds[STATIC] = self._start(STATIC)
        seconds[PINNED] = self._start(PINNED)
        arm = ("eagle3", self._shape.static_gamma)
        ratio = self._ratio((PINNED, arm), (STATIC, None), self._stream)
        document["pinned"] = {"gamma": arm[1], **ratio}
        self._stop(STATIC, PINNED)

    def _status(self, policy: str = STEERED) -> dict[str, Any]:
        """Returns what the plugin says in an engine's /server_info."""
        url = f"{self._engines[policy].url}/server_info"
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # our own engine
            states: list[dict[str, Any]] = json.load(answer)["internal_states"]
        found: dict[str, Any] = states[0]["speculation_controller"]
        return found

    def _ratio(self, ours: Held, theirs: Held, stream: Sequence[StreamPhase]) -> dict[str, Any]:
        """Compares tokens/s in pairs, in reverse order every second time, after a warm-up pair."""
        plays: dict[Held, list[Play]] = {ours: [], theirs: []}
        for repeat in range(self._options.repeats + 1):
            for held in (ours, theirs) if repeat % 2 == 0 else (theirs, ours):
                plays[held].append(self._play_held(held, stream))
        return paired_ratio(plays[ours][1:], plays[theirs][1:]).as_json()

    def _start(self, policy: str) -> float:
        """Starts an engine and warms it up; returns the seconds until it was ready."""
        began = time.monotonic()
        with self._terminal.working(f"engine: {policy}") as work:
            engine = self._keep(
                engines.launch(policy, self._setting, self._place, self._acceptance)
            )
            engine.wait_ready(
                engines.READY_SECONDS,
                lambda: work.update(f"{time.monotonic() - began:.0f} s"),
                self._sidecars.get(policy),
            )
            seconds = round(time.monotonic() - began, 1)
            work.result = f"ready after {seconds} s"
        for size in dict.fromkeys(load.concurrency for load in self._shape.loads):
            self._play(policy, steady_stream(self._shape, size, _SEED + 3), f"{policy}: warm-up")
        return seconds

    def _start_exact(self, policy: str, variables: Mapping[str, str] | None = None) -> Engine:
        """Starts an engine with small trained models.  variables: instead of `exact`'s."""
        on_cpu, options = self._options.on_cpu, self._options.engine_options
        draft = learning.DRAFT if policy == learning.LEARNING else exact.DRAFT
        engine = self._keep(
            launch_engine(
                policy,
                lambda port: exact.command(policy, port, options, draft, on_cpu=on_cpu),
                variables or exact.environment(policy, self._place.address),
                self._place,
                popen,
            )
        )
        with self._terminal.working(f"engine: {policy}"):
            engine.wait_ready(engines.READY_SECONDS, sidecar=self._sidecars.get(policy))
        return engine

    def _stop(self, *policies: str) -> None:
        for policy in policies:
            self._engines.pop(policy).child.stop()

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


def _arms_of(reports: Iterable[engine_pb2.StepReport]) -> list[Arm]:
    return [(report.drafter if report.gamma else "eagle3", report.gamma) for report in reports]


def _phase_rates(plays: Mapping[Arm | None, Sequence[Play]]) -> list[dict[str, Any]]:
    """Tokens/s of each phase on the steered engine, and on it when held to each finalist."""
    return [
        {
            "phase": phase.phase.name,
            **{
                f"{arm[0]} {arm[1]}" if arm else "steered": phase_rates(found, number).as_json()
                for arm, found in plays.items()
            },
        }
        for number, phase in enumerate(plays[None][0].phases)
    ]

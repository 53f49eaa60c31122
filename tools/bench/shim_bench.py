"""Measures the shim's share of an engine's decode steps: `python -m tools.bench.shim_bench`.

Real CPU engines answer under a scripted sidecar, as most GPUs' do: with graphs, the overlap
schedule, and no context lengths on the host.  One has an EAGLE3 drafter, the other a DFlash drafter
beside it.  Every hook of the shim is timed in the scheduler's process (hook_spans.py), with
SGLang's wrapping of it and without what it wraps; a step costs what its hooks cost together.

"warm" is the same code around steps that compute nothing, in this process, in a tight loop: what
is left when nothing of it has to come from memory.  An engine on a GPU lies in between, because its
thread runs SGLang's code between the hooks, but no model.

Timed in the same steps: a hook that does nothing, a send to a socket on which no process waits, and
SGLang's adaptive policy, at the place where SGLang asks it.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from lab.harness.scripted_sidecar import Script, ScriptedSidecar, scripted_sidecar
from tests.support.engine import (
    DFLASH,
    EAGLE3,
    MODES,
    EngineProcess,
    install_plugin,
    running_engine,
)
from tests.support.eventually import eventually
from tests.support.hooked_steps import HookedSteps
from tests.unit.engine_shim.link.in_process_agents import linked
from tools.bench.hook_spans import (
    CALLED,
    CALLS,
    EMPTY,
    OPERATORS,
    PARTS,
    POLICY,
    PROCESSOR,
    REFERENCES,
    SEND,
    TIMERS,
    WALL,
)
from tools.bench.measurement import RATIO, Measurement, command_line, percentiles, run
from tools.bench.pairs import make_prompts

_BATCHES = (1, 8, 64)
_DETAILED = 8
_GAMMA = 3
_VARIABLES = {
    **MODES["overlapped"],
    "SPECULATION_GAMMAS": "0,1,2,3,5,7",
}
_OPTIONS = (
    *EAGLE3, "--max-running-requests", "64", "--max-total-tokens", "32768",
    "--cuda-graph-bs-decode", "1", "8", "64",
)  # fmt: skip
# A record of hook_spans.
_Step: TypeAlias = dict[str, Any]
# The bar of a step's p50, in microseconds.
_AT_MOST = 40.0


@dataclass(frozen=True)
class _Case:
    """An arm, and whether a new plan is to come with each step."""

    name: str
    script: Script
    plan_each_step: bool = False


_EAGLE3_CASES = (
    _Case("EAGLE3, one plan", lambda _: (_GAMMA, False)),
    _Case("EAGLE3, a plan and a draft length in each step", lambda n: (1 + n % 3, False), True),
    _Case("asleep, one plan", lambda _: (0, True)),
)
_DFLASH_CASES = (
    _Case("DFlash beside EAGLE3, one plan", lambda _: (_GAMMA, False, 1)),
    _Case("both asleep, one plan", lambda _: (0, True)),
)


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Figures of each case and batch size."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        plugin = install_plugin(
            place / "plugin", "tools.bench.hook_spans:time_hooks", name="zz_hook_spans"
        )
        for number, (cases, variables) in enumerate((
            (_EAGLE3_CASES, {}),
            (_DFLASH_CASES, {"SPECULATION_DFLASH_MODEL_PATH": str(DFLASH)}),
        )):  # fmt: skip
            folder = place / str(number)
            folder.mkdir()
            with scripted_sidecar(folder) as sidecar:
                environment = _VARIABLES | variables | {
                    "PYTHONPATH": str(plugin), "SPECULATION_SIDECAR": sidecar.target
                }  # fmt: skip
                with running_engine(folder, _OPTIONS, environment) as engine:
                    eventually(lambda s=sidecar: s.introductions, description="an introduction")  # type: ignore[misc]
                    for case in cases:
                        for size in _BATCHES:
                            yield from _figures(engine, sidecar, case, size, options)
    for name, gamma in (("EAGLE3, one plan", _GAMMA), ("asleep, one plan", 0)):
        for size in _BATCHES:
            medians = [_warm(gamma, size) for _ in range(options.repeats)]
            yield Measurement(f"{name}, B = {size}: warm", "us", medians)


def _figures(
    engine: EngineProcess, sidecar: ScriptedSidecar, case: _Case, size: int,
    options: argparse.Namespace,
) -> Iterator[Measurement]:  # fmt: skip
    label = f"{case.name}, B = {size}"
    rounds = _rounds(engine, sidecar, case, size, options)
    step_times = [_hook_times(steps) for steps in map(_select_kind(WALL), rounds)]
    yield from percentiles(label, "us", step_times, {50.0: _AT_MOST})
    yield Measurement(
        f"{label}: processor time, mean", "us",
        [mean(_hook_times(steps)) for steps in map(_select_kind(PROCESSOR), rounds)],
    )  # fmt: skip
    for kind, name in ((CALLS, "function calls"), (OPERATORS, "operators of torch")):
        counts = [[_sum(step) for step in steps] for steps in map(_select_kind(kind), rounds)]
        yield Measurement(f"{label}: {name}", "", [median(sample) for sample in counts])
    reference = [
        median(_amounts(steps, SEND)) + median(_amounts(steps, POLICY))
        for steps in map(_select_kind(WALL), rounds)
    ]
    yield Measurement(
        f"{label}: over a bare send and SGLang's own policy together", RATIO,
        [median(sample) / reference_time
         for sample, reference_time in zip(step_times, reference, strict=True)],
    )  # fmt: skip
    if size == _DETAILED:
        yield from _parts(label, rounds)


def _warm(gamma: int, size: int, steps: int = 2000) -> float:
    """Microseconds of a step's hooks in a tight loop."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with linked() as (link, _, agent):
        engine = HookedSteps(link, agent, size)
        engine.set_plan(gamma, asleep=gamma == 0)
        for step in range(steps):
            hooked = step % 2 == 0
            start = time.perf_counter()
            engine.step(hooked=hooked)
            times[hooked].append(1e6 * (time.perf_counter() - start))
            if hooked:
                engine.next_report()
    return median(times[True]) - median(times[False])


def _parts(label: str, rounds: list[list[_Step]]) -> Iterator[Measurement]:
    """Each hook by itself, what some of them call, and the references."""
    names = {name for steps in rounds for step in steps for name in step["own"]}
    for name in sorted(names - set(REFERENCES) - set(CALLED)):
        yield Measurement(f"{label}: {name}", "us", _medians(rounds, WALL, name, less_timers=True))
    for name in CALLED:
        yield Measurement(f"{label}: of which {name}", "us", _medians(rounds, PARTS, name))
    for name in REFERENCES:
        less_timers = name == EMPTY
        yield Measurement(
            f"{label}: {name}", "us", _medians(rounds, WALL, name, less_timers=less_timers)
        )


def _rounds(
    engine: EngineProcess, sidecar: ScriptedSidecar, case: _Case, size: int,
    options: argparse.Namespace,
) -> list[list[_Step]]:  # fmt: skip
    """Records of the steps over `size` sequences, of each repeat."""
    sidecar.plans_once = not case.plan_each_step
    sidecar.run(case.script)
    rounds = []
    for repeat in range(options.repeats + 1):
        engine.internal_state()  # takes what was recorded before
        engine.generate(make_prompts("json", size), [options.tokens] * size)
        records = engine.internal_state()["speculation_controller"]["hook_spans"]
        if repeat:  # the first one warms up
            rounds.append([
                step for step in records
                if step["size"] == size and step["plan"] == case.plan_each_step
            ])  # fmt: skip
    return rounds


def _select_kind(kind: str) -> Callable[[list[_Step]], list[_Step]]:
    return lambda steps: [step for step in steps if step["kind"] == kind]


def _hook_times(steps: list[_Step]) -> list[float]:
    """Microseconds that the hooks took of each step, without what the timers took."""
    timers = median(_amounts(steps, TIMERS))
    return [1e-3 * _sum(step) - step["left_out"] * timers for step in steps]


def _sum(step: _Step) -> float:
    amounts: dict[str, float] = step["own"]
    return sum(amount for name, amount in amounts.items() if name not in REFERENCES)


def _amounts(steps: list[_Step], name: str) -> list[float]:
    return [1e-3 * step["own"][name] for step in steps if name in step["own"]]


def _medians(
    rounds: list[list[_Step]], kind: str, name: str, *, less_timers: bool = False
) -> list[float]:
    medians = []
    for steps in map(_select_kind(kind), rounds):
        amounts = _amounts(steps, name)
        if amounts:
            timers = median(_amounts(steps, TIMERS)) if less_timers else 0.0
            medians.append(median(amounts) - timers)
    return medians


PARSER = command_line(__doc__, repeats=3, repeats_help="answers to each batch")
PARSER.add_argument("--tokens", type=int, default=300, help="new tokens of each request")

if __name__ == "__main__":
    run(PARSER, measure)

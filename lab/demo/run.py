"""Runs the demo: computes, starts the engines, profiles, plays the day, proves exact tokens."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.pace.step_costs import OWN
from lab.demo import exact, picture, report
from lab.demo.outcome import DemoOutcome, as_json
from lab.harness.engines import Workplace
from lab.harness.errors import HarnessError
from lab.harness.measured import run_facts, write_result
from lab.harness.processes import preferred
from lab.harness.terminal import Terminal
from lab.paced.engines import ADAPTIVE, OFF, STEERED, static
from lab.paced.lost_time import Oracle, StepValues, compute, lost_time
from lab.paced.plays import StreamPlay
from lab.paced.run import DILATIONS, PacedHarness, profile_sizes
from lab.paced.traffic import Stream, own_curves
from simulator.errors import InvalidInputError

GAMMAS = (0, 1, 2, 3, 4, 5, 7)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a run.

    streams: one for each repeat, which may be the same.  dilation: None, it is found.
    neighbours: the draft lengths next to the best static one are played as well.  unpaced: the
    exact part is run.
    """

    table: str
    streams: tuple[Stream, ...]
    dilation: float | None
    profile_seconds: float
    output: Path
    neighbours: bool = False
    unpaced: bool = True


@preferred()  # the clients of the load must not wait for a busy machine either
def run(options: DemoOptions, terminal: Terminal) -> DemoOutcome:
    """Plays the whole demo and writes result.json and demo.png.  Raises HarnessError."""
    began = time.monotonic()
    facts = run_facts()
    with Workplace.temporary(options.output, "demo") as place:
        outcome = _paced(options, place, terminal)
        if options.unpaced:
            terminal.heading("Exact tokens, with the small trained models and without a pace")
            own = Workplace(options.output / "exact", place.scratch / "exact")
            own.scratch.mkdir()
            found = exact.run(outcome.policies, own, terminal, options.streams[0].seed)
            outcome = replace(outcome, exact=found)
    seconds = round(time.monotonic() - began, 1)
    document = {**facts, "seconds": seconds, **as_json(outcome)}
    write_result(document, options.output)
    picture.draw(document, options.output / "demo.png")
    return outcome


def _paced(options: DemoOptions, place: Workplace, terminal: Terminal) -> DemoOutcome:
    stream, curves = options.streams[0], own_curves()
    pace = Pace(
        options.table, options.dilation or DILATIONS[0], gammas=GAMMAS,
        max_batch_size=stream.max_concurrency, curves=curves,
    )  # fmt: skip
    try:
        costs = pace.costs()
    except InvalidInputError as error:
        raise HarnessError(f"--pace {error}") from error
    costs = replace(costs, surface=costs.surface.only(OWN))
    oracles = tuple(compute(one, curves, costs) for one in options.streams)
    report.show_table(stream, oracles[0], costs.source, terminal)
    order = _policies(oracles[0], neighbours=options.neighbours)
    terminal.heading("Starting: the real SGLang, with small dummy weights, at the table's pace")
    with ExitStack() as stack:
        harness = PacedHarness(place, terminal, stack, pace, stream.max_concurrency)
        harness.start(order)
        harness.find_dilation(order, fixed=options.dilation is not None)
        harness.start_sidecar(order)
        profiles: list[Mapping[str, Any]] = []

        def profiled() -> StreamPlay:
            sizes = profile_sizes(stream.max_concurrency)
            profiles.append(harness.profile(STEERED, options.profile_seconds, sizes))
            return harness.play_paced(STEERED, stream)

        plays: dict[str, list[StreamPlay]] = {policy: [] for policy in order}
        # What takes longest begins: the profile with its play, and the slowest policy.
        longest_first = (order[-1], *order[:-1])
        for repeat, one in enumerate(options.streams):
            jobs: dict[str, Callable[[], StreamPlay]] = {
                policy: partial(harness.play_paced, policy, one) for policy in longest_first
            }
            text = f"repeat {repeat + 1}/{len(options.streams)}, two engines at a time"
            if repeat == 0:
                jobs[STEERED] = profiled
                text = f"controller profile beside the first plays; {text}"
            for policy, found in harness.play_all(jobs, text).items():
                plays[policy].append(found)
        plans = harness.plans(STEERED)
        with terminal.working("stopping"):
            harness.stop()
    report.show_profile(profiles[0], harness.dilation, terminal)
    (options.output / "profile.json").write_text(json.dumps(profiles[0], indent=1) + "\n")
    values = StepValues(costs, curves)
    return DemoOutcome(
        stream,
        costs,
        harness.dilation,
        oracles,
        {policy: tuple(found) for policy, found in plays.items()},
        tuple(lost_time(play.decode_steps, plans, values) for play in plays[STEERED]),
        (),
        profiles[0],
    )


def _policies(oracle: Oracle, *, neighbours: bool) -> tuple[str, ...]:
    """Off, the best fixed draft length of the table, SGLang's own adaptive mode, steered."""
    ranked = sorted(oracle.statics, key=lambda arm: -oracle.statics[arm].rate)
    best = next(arm.gamma for arm in ranked if arm.gamma > 0)
    at = GAMMAS.index(best)
    beside = (
        [g for g in (*GAMMAS[at - 1 : at], *GAMMAS[at + 1 : at + 2]) if g] if neighbours else []
    )
    return (OFF, static(best), *map(static, beside), ADAPTIVE, STEERED)

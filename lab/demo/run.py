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
from lab.harness.processes import raised_priority
from lab.harness.terminal import Terminal
from lab.paced.engines import ADAPTIVE, OFF, STEERED, static_policy
from lab.paced.lost_time import Oracle, StepValues, compute_oracle, lost_time
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


@raised_priority()  # the clients of the load must not wait for a busy machine either
def run(options: DemoOptions, terminal: Terminal) -> DemoOutcome:
    """Plays the whole demo and writes result.json and demo.png.  Raises HarnessError."""
    start_time = time.monotonic()
    facts = run_facts()
    with Workplace.temporary(options.output, "demo") as place:
        outcome = _play_paced(options, place, terminal)
        if options.unpaced:
            terminal.heading("Exact tokens, with the small trained models and without a pace")
            exact_place = Workplace(options.output / "exact", place.scratch / "exact")
            exact_place.scratch.mkdir()
            exact_plays = exact.run(
                outcome.policies, exact_place, terminal, options.streams[0].seed
            )
            outcome = replace(outcome, exact=exact_plays)
    seconds = round(time.monotonic() - start_time, 1)
    document = {**facts, "seconds": seconds, **as_json(outcome)}
    write_result(document, options.output)
    picture.draw(document, options.output / "demo.png")
    return outcome


def _play_paced(options: DemoOptions, place: Workplace, terminal: Terminal) -> DemoOutcome:
    stream, curves = options.streams[0], own_curves()
    pace = Pace(
        options.table, options.dilation or DILATIONS[0], gammas=GAMMAS,
        max_batch_size=stream.max_concurrency, curves=curves,
    )  # fmt: skip
    try:
        costs = pace.costs()
    except InvalidInputError as error:
        raise HarnessError(f"--pace {error}") from error
    costs = replace(costs, surface=costs.surface.with_drafters(OWN))
    oracles = tuple(
        compute_oracle(repeat_stream, curves, costs) for repeat_stream in options.streams
    )
    report.show_table(stream, oracles[0], costs.source, terminal)
    order = _policies(oracles[0], neighbours=options.neighbours)
    terminal.heading("Starting: the real SGLang, with small dummy weights, at the table's pace")
    with ExitStack() as stack:
        harness = PacedHarness(place, terminal, stack, pace, stream.max_concurrency)
        harness.start(order)
        harness.find_dilation(order, fixed=options.dilation is not None)
        harness.start_sidecar(order)
        profiles: list[Mapping[str, Any]] = []

        def profile_then_play() -> StreamPlay:
            sizes = profile_sizes(stream.max_concurrency)
            profiles.append(harness.profile(STEERED, options.profile_seconds, sizes))
            return harness.play_paced(STEERED, stream)

        plays: dict[str, list[StreamPlay]] = {policy: [] for policy in order}
        # What takes longest begins: the profile with its play, and the slowest policy.
        longest_first = (order[-1], *order[:-1])
        for repeat, repeat_stream in enumerate(options.streams):
            jobs: dict[str, Callable[[], StreamPlay]] = {
                policy: partial(harness.play_paced, policy, repeat_stream)
                for policy in longest_first
            }
            text = f"repeat {repeat + 1}/{len(options.streams)}, two engines at a time"
            if repeat == 0:
                jobs[STEERED] = profile_then_play
                text = f"controller profile beside the first plays; {text}"
            for policy, policy_plays in harness.play_all(jobs, text).items():
                plays[policy].append(policy_plays)
        plans = harness.plans(STEERED)
        with terminal.show_progress("stopping"):
            harness.stop()
    report.show_profile(profiles[0], harness.dilation, terminal)
    (options.output / "profile.json").write_text(json.dumps(profiles[0], indent=1) + "\n")
    values = StepValues(costs, curves)
    return DemoOutcome(
        stream,
        costs,
        harness.dilation,
        oracles,
        {policy: tuple(policy_plays) for policy, policy_plays in plays.items()},
        tuple(lost_time(play.decode_steps, plans, values) for play in plays[STEERED]),
        (),
        profiles[0],
    )


def _policies(oracle: Oracle, *, neighbours: bool) -> tuple[str, ...]:
    """Off, the best fixed draft length of the table, SGLang's own adaptive mode, steered."""
    ranked = sorted(oracle.statics, key=lambda arm: -oracle.statics[arm].rate)
    best = next(arm.gamma for arm in ranked if arm.gamma > 0)
    best_index = GAMMAS.index(best)
    neighbour_gammas = (
        [
            g
            for g in (
                *GAMMAS[best_index - 1 : best_index],
                *GAMMAS[best_index + 1 : best_index + 2],
            )
            if g
        ]
        if neighbours
        else []
    )
    return (OFF, static_policy(best), *map(static_policy, neighbour_gammas), ADAPTIVE, STEERED)

"""Measures the plugin's cost beside an H100's steps: `python -m tools.bench.paced_bench`.

Real SGLang engines, small dummy weights, every step held to the time of a published table (see
lab/cpu_engine/pace).  Two engines answer the same requests side by side; a ratio is that of their
tokens/s in the model's time.  The plugin's work runs while a step lasts, as it does beside a GPU
with the overlap schedule, so each ratio is reported twice: as measured, and as it would be if
nothing hid that work: the seconds of the plugin's hooks (wall clock, not dilated) added to every
step.  About 6 minutes.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from lab.cpu_engine.pace.pacer import Pace
from lab.harness.engines import Workplace
from lab.harness.processes import raised_priority
from lab.harness.sidecar import temporary_override
from lab.harness.terminal import Terminal
from lab.paced.engines import OFF, static_policy
from lab.paced.plays import StreamPlay
from lab.paced.run import DILATIONS, PacedHarness
from lab.paced.traffic import PhasePlan, Stream, build_stream, own_curves
from tools.bench.measurement import RATIO, Measurement, command_line, run

_TABLE: Final = "h100-llama3.1-8b"
_GAMMA: Final = 3
_BATCHES: Final = (1, 8, 64)
PINNED, ASLEEP, COLLECTING = "steered-pinned", "steered-asleep", "steered-collecting"
# What is compared: ours, theirs, the bar, in words.
_PAIRS: Final = (
    (PINNED, static_policy(_GAMMA), 0.995, f"pinned to gamma = {_GAMMA}, over SGLang's own"),
    (ASLEEP, OFF, 0.97, "gamma = 0 asleep, over no speculation"),
    (COLLECTING, PINNED, 0.99, f"collecting signals at gamma = {_GAMMA}, over not"),
)


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Two ratios and the plugin's microseconds for each pair and batch."""
    with ExitStack() as stack:
        stack.enter_context(raised_priority())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = Workplace(Path("build/bench/paced"), scratch)
        dilation = options.dilation or DILATIONS[0]
        pace = Pace(_TABLE, dilation, gammas=(0, _GAMMA), max_batch_size=64, curves=own_curves())
        harness = PacedHarness(place, Terminal(), stack, pace, max(_BATCHES))
        policies = [OFF, static_policy(_GAMMA), PINNED, ASLEEP, COLLECTING]
        harness.start(
            policies, {COLLECTING: {"SPECULATION_SIGNALS_FOLDER": str(scratch / "signals")}}
        )
        harness.find_dilation(policies, fixed=options.dilation is not None)
        harness.start_sidecar(policies)
        pinned = ("--gamma", str(_GAMMA))
        for engine, rule in (
            (PINNED, pinned),
            (ASLEEP, ("--gamma", "0")),
            (COLLECTING, (*pinned, "--regime", "collect")),
        ):
            stack.enter_context(temporary_override(place.address, *rule, engine_id=engine))
        for size in _BATCHES:
            stream = build_stream(
                "steady", (PhasePlan("", ("chat",), size, size, options.tokens),), 3
            )
            for candidate, baseline, bar, text in _PAIRS:
                yield from _compare_pair(
                    harness, stream, candidate, baseline, bar, f"{text}, B = {size}", options
                )


def _compare_pair(
    harness: PacedHarness,
    stream: Stream,
    candidate: str,
    baseline: str,
    bar: float,
    text: str,
    options: argparse.Namespace,
) -> Iterable[Measurement]:
    hidden, added, plugin_times = [], [], []
    for repeat in range(options.repeats + 1):
        order = (candidate, baseline) if repeat % 2 else (baseline, candidate)
        jobs: Mapping[str, Callable[[], StreamPlay]] = {
            policy: lambda policy=policy: harness.play_paced(policy, stream)  # type: ignore[misc]
            for policy in order
        }
        plays = harness.play_all(jobs, f"{text}, {repeat}")
        if repeat == 0:
            continue  # the plan has to come first, and caches have to fill
        _check(plays[candidate], candidate)
        candidate_play, baseline_play = plays[candidate], plays[baseline]
        hidden.append(candidate_play.tokens_per_second / baseline_play.tokens_per_second)
        added.append(_rate_without_overlap(candidate_play) / _rate_without_overlap(baseline_play))
        steps = candidate_play.decode_steps
        plugin_times.append(1e6 * sum(step.shim_seconds for step in steps) / len(steps))
    yield Measurement(f"{text}: tokens/s", RATIO, hidden, at_least=bar)
    yield Measurement(f"{text}: if nothing hid the plugin's work", RATIO, added, at_least=bar)
    yield Measurement(f"{text}: the plugin's work in a step", "us", plugin_times, at_most=40.0)


def _rate_without_overlap(play: StreamPlay) -> float:
    """Tokens/s of the model's time if the plugin's work were added to every step."""
    work = sum(step.shim_seconds for step in play.decode_steps)
    return play.stream.tokens / (play.seconds + work)


def _check(play: StreamPlay, policy: str) -> None:
    """Raises RuntimeError when the engine did not run what it was held to."""
    gamma = 0 if policy == ASLEEP else _GAMMA
    wrong_steps = [step for step in play.decode_steps if step.gamma != gamma]
    awake = [step for step in play.decode_steps if policy == ASLEEP and not step.asleep]
    if wrong_steps or awake:
        raise RuntimeError(
            f"{policy} ran {len(wrong_steps) + len(awake)} other steps: {wrong_steps[:1]}"
        )


PARSER = command_line(__doc__, repeats=3, repeats_help="pairs for each figure")
PARSER.add_argument("--tokens", type=int, default=300, help="new tokens of a request, mean")
PARSER.add_argument("--dilation", type=float, help="seconds for each second of the model")

if __name__ == "__main__":
    run(PARSER, measure)

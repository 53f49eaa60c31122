"""Runs the envelope: one steered engine, one without speculation, and a sidecar a concurrency.

A profile holds under one dilation.  So at each concurrency a sidecar is started with its time
constants dilated, and `controller profile` measures the steered engine; nothing is known before.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.pace.step_costs import OWN, SECOND, load_step_costs
from lab.harness.engines import Workplace, launch_sidecar, measure_profile, wait_serving
from lab.harness.errors import HarnessError
from lab.harness.measured import ForeignLoad, run_facts, write_result
from lab.harness.processes import raised_priority
from lab.harness.sidecar import SidecarHandle
from lab.harness.terminal import Terminal
from lab.paced import engines
from lab.paced.envelope import report
from lab.paced.envelope.outcome import (
    DFLASH,
    GAMMAS,
    MTP,
    OFF,
    PLAIN,
    STEERED,
    TABLE,
    Point,
    Run,
    arm_name,
    as_json,
    best_arm,
    closed_loop,
    dilation_for,
    measure,
    suggest_dilation,
    table_rates,
)
from lab.paced.plays import LATE_SHARE_MAX
from lab.paced.run import PacedHarness, dilated_planner
from lab.paced.traffic import Stream, published_curves
from lab.papers.drafters import Floats


@dataclass(frozen=True, slots=True)
class EnvelopeOptions:
    """The options of a run.

    dilation: at one sequence.  grid: drafter -> [gamma, concurrency] published goodput.
    resumed_points: the points of an earlier run.  quick: short runs, none of which is rejected.
    """

    concurrencies: tuple[int, ...]
    dilation: float
    grid: Mapping[str, Floats] | None
    output: Path
    resumed_points: tuple[Point, ...] = ()
    quick: bool = False

    @property
    def remaining_concurrencies(self) -> tuple[int, ...]:
        """The concurrencies that are to be run."""
        return tuple(
            sorted(set(self.concurrencies) - {point.concurrency for point in self.resumed_points})
        )

    @property
    def output_tokens(self) -> int:
        """Output tokens of a request; in a whole run, as many as were published."""
        return 192 if self.quick else 1024

    @property
    def min_tokens(self) -> int:
        """The fewest output tokens of a run: with fewer, the draws decide the result."""
        return 192 if self.quick else 4096

    @property
    def profile_seconds(self) -> float:
        """The budget of a profile."""
        return 8.0 if self.quick else 12.0

    @property
    def late_share_max(self) -> float:
        """The largest share of late steps; any share is accepted in a quick run."""
        return 1.0 if self.quick else LATE_SHARE_MAX


@raised_priority()
def run(options: EnvelopeOptions, terminal: Terminal) -> tuple[Point, ...]:
    """Runs everything and writes result.json and envelope.png.  Raises HarnessError."""
    started, facts = time.monotonic(), run_facts()
    points = list(options.resumed_points)
    source = load_step_costs(TABLE, GAMMAS).source
    with ExitStack() as stack:
        place = stack.enter_context(Workplace.temporary(options.output, "envelope"))
        sweep = _Sweep(place, terminal, stack, options)
        if options.remaining_concurrencies:
            sweep.start((STEERED, OFF))
        for concurrency in options.remaining_concurrencies:
            points.append(sweep.run_point(concurrency))
            points.sort(key=lambda point: point.concurrency)
            document = {
                **facts,
                "seconds": round(time.monotonic() - started, 1),
                "label": report.label(source),
                "dilation": options.dilation,
                "quick": options.quick,
                "points": as_json(points),
            }
            # Written after every concurrency, so that a later failure loses no result.
            write_result(document, options.output)
        sweep.stop()
    report.draw(points, options.grid, source, options.output / "envelope.png")
    report.show(points, source, terminal)
    return tuple(points)


class _Sweep(PacedHarness):
    """The running processes, and what is done with them."""

    def __init__(
        self, place: Workplace, terminal: Terminal, stack: ExitStack, options: EnvelopeOptions
    ) -> None:
        largest = max(options.concurrencies)
        pace = Pace(
            TABLE, options.dilation, gammas=GAMMAS, max_batch_size=largest,
            curves=published_curves(TABLE),
        )  # fmt: skip
        super().__init__(place, terminal, stack, pace, largest, second=True, predictor=True)
        self._options = options
        self._costs = pace.costs()

    def run_point(self, concurrency: int) -> Point:
        """Runs a concurrency: off, the best arm of each drafter, and steered."""
        options = self._options
        rates = table_rates(self._costs, concurrency)
        self.dilation = dilation_for(options.dilation, self._costs, concurrency)
        self._write_dilation()
        self._terminal.heading(f"{concurrency} at a time, dilation {self.dilation:g}")
        tokens, min_tokens = options.output_tokens, options.min_tokens
        stream = closed_loop("envelope", concurrency, min_tokens, tokens)
        # Without speculation nothing is drawn, so a few steps at the same context tell the rate.
        plain = closed_loop("off", concurrency, 1, tokens // 4, tokens // 2 - tokens // 8)
        warm_up = closed_loop("warm-up", concurrency, 1, tokens // 2)
        runs: dict[str, Run] = {}
        with ExitStack() as stack, ForeignLoad() as load:
            runs[OFF] = self._run(OFF, PLAIN, plain)
            sidecar = self._start_fresh_sidecar(stack)
            with self._terminal.show_progress("profile"):
                profile = measure_profile(
                    self._place, self._engines[STEERED], sidecar, options.profile_seconds,
                    "--force", "--batch-sizes", str(concurrency),
                )  # fmt: skip
                (options.output / f"profile-{concurrency}.json").write_text(profile)
            for policy, drafter in ((MTP, OWN), (DFLASH, SECOND)):
                arm = best_arm(rates, drafter)
                name = self.setting.own_drafter if drafter == OWN else drafter
                with sidecar.pinned(arm.gamma, name):
                    runs[policy] = self._run(policy, arm, stream)
            with self._terminal.show_progress("warming up"):
                self.play_once(STEERED, warm_up)
            runs[STEERED] = self._run(STEERED, None, stream)
            sidecar.status()  # raises if the sidecar has ended meanwhile
        return Point(concurrency, self.dilation, rates, runs, load.cores)

    def _start_fresh_sidecar(self, stack: ExitStack) -> SidecarHandle:
        """Starts a sidecar whose decisions take as long in the model's time as on a real GPU."""
        variables = dilated_planner(self.dilation)
        child = stack.enter_context(launch_sidecar(self._place, environment=variables))
        child.raise_priority()
        sidecar = stack.enter_context(SidecarHandle(self._place.address, STEERED))
        wait_serving(child, sidecar)
        self._engines[STEERED].wait_ready(engines.READY_SECONDS, sidecar=sidecar)
        return sidecar

    def _run(self, policy: str, arm: Arm | None, stream: Stream) -> Run:
        """Plays a stream, once more if too many steps were late.

        Raises HarnessError when the second play was late too.
        """
        (phase,) = stream.phases
        text = policy if arm is None else f"{policy}: {arm_name(arm)}"
        for _ in range(2):
            with self._terminal.show_progress(text) as work:
                steps = self.play_once(OFF if policy == OFF else STEERED, stream).decode_steps
                measured_run = measure(policy, arm, steps, phase.concurrency, self.dilation)
                work.result = (
                    f"{measured_run.rate:.0f} tokens/s, {measured_run.steps} steps, "
                    f"{measured_run.late_share:.1%} late"
                )
            if measured_run.late_share <= self._options.late_share_max:
                return measured_run
        larger = suggest_dilation(self._options.dilation, measured_run, self.dilation)
        raise HarnessError(
            f"{policy} at {phase.concurrency}: {measured_run.late_share:.1%} of the steps took the "
            f"machine longer than their pace allows, twice; try --dilation {larger}"
        )

"""Runs the envelope: one steered engine, one without speculation, and a sidecar a concurrency.

A profile holds under one dilation.  So at each concurrency the sidecar starts anew, with its own
time constants dilated, and measures the steered engine; what it knew before is gone.
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from controller.core.engine_spec import Arm
from controller.core.settings import PlannerSettings
from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.pace.step_costs import OWN, SECOND
from lab.cpu_engine.pace.step_log import PacedStep, read_log
from lab.harness.engines import Harness, Workplace, launch_sidecar, measure_profile, wait_serving
from lab.harness.errors import HarnessError
from lab.harness.foreign_load import ForeignLoad
from lab.harness.machine import run_facts, write_result
from lab.harness.processes import prefer
from lab.harness.sidecar import SidecarHandle
from lab.harness.terminal import Terminal
from lab.paced import engines
from lab.paced.day import Stream
from lab.paced.engines import Setting
from lab.paced.envelope import picture, report
from lab.paced.envelope.arms import (
    GAMMAS,
    PLAIN,
    TABLE,
    best_arm,
    closed_loop,
    dilation_at,
    name_of,
    table_rates,
)
from lab.paced.envelope.outcome import (
    DFLASH,
    LATE_SHARE_MAX,
    MTP,
    OFF,
    STEERED,
    Point,
    Run,
    as_json,
    dilation_to_try,
    measure,
)
from lab.paced.player import play
from lab.paced.traffic import published_curves
from lab.papers.drafters import Floats

_LOG_SECONDS = 20.0
_PLANNER_SECONDS = (
    "lease_seconds", "replan_seconds", "payback_seconds", "probe_credit_start_seconds",
    "probe_credit_max_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EnvelopeOptions:
    """The options of a run.

    dilation: at one sequence.  grid: drafter -> [gamma, concurrency] published goodput.  quick:
    short runs, none of which is rejected.
    """

    concurrencies: tuple[int, ...]
    dilation: float
    grid: Mapping[str, Floats] | None
    output: Path
    quick: bool = False

    @property
    def output_tokens(self) -> int:
        """Of a request; in a whole run, as many as were published."""
        return 256 if self.quick else 1024

    @property
    def least_tokens(self) -> int:
        """Of a run: few sequences are lucky or not for long."""
        return 256 if self.quick else 8192

    @property
    def profile_seconds(self) -> float:
        """Budget of a profile."""
        return 8.0 if self.quick else 30.0

    @property
    def late_share_max(self) -> float:
        """A run with more late steps is rejected; a short one shows that it works, and no more."""
        return 1.0 if self.quick else LATE_SHARE_MAX


def run(options: EnvelopeOptions, terminal: Terminal) -> tuple[Point, ...]:
    """Runs everything and writes result.json and envelope.png.  Raises HarnessError."""
    started, facts = time.monotonic(), run_facts()
    prefer(os.PRIO_PROCESS, 0)
    points: list[Point] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="speculation-envelope-")))
        sweep = _Sweep(Workplace(options.output, scratch), terminal, stack, options)
        sweep.start()
        for concurrency in options.concurrencies:
            points.append(sweep.point(concurrency))
            document = {
                **facts,
                "seconds": round(time.monotonic() - started, 1),
                "label": report.label(sweep.source),
                "dilation": options.dilation,
                "quick": options.quick,
                "points": as_json(points),
            }
            # After every concurrency: what was found is kept whatever comes next.
            write_result(document, options.output)
        sweep.stop()
    picture.draw(points, options.grid, sweep.source, options.output / "envelope.png")
    report.show(points, sweep.source, terminal)
    return tuple(points)


class _Sweep(Harness):
    """The running processes, and what is done with them."""

    def __init__(
        self, place: Workplace, terminal: Terminal, stack: ExitStack, options: EnvelopeOptions
    ) -> None:
        super().__init__(place, terminal, stack)
        self._options = options
        self._dilation_file = place.scratch / "dilation"
        self._dilation_file.write_text(f"{options.dilation}")
        largest = max(options.concurrencies)
        pace = Pace(
            TABLE, options.dilation, gammas=GAMMAS, max_batch_size=largest,
            curves=published_curves(TABLE), dilation_file=str(self._dilation_file),
        )  # fmt: skip
        self._costs = pace.costs()
        self._setting = Setting.make(pace, place.scratch / "models", largest, second=True)

    @property
    def source(self) -> str:
        """Where the imposed step times come from."""
        return self._costs.source

    def start(self) -> None:
        """Starts both engines and waits until they serve."""
        with self._terminal.working("engines: steered, off"):
            for policy in (STEERED, OFF):
                engine = self._keep(engines.launch(policy, self._setting, self._place))
                engine.child.prefer()
            for engine in self._engines.values():
                engine.wait_ready(engines.READY_SECONDS)

    def stop(self) -> None:
        """Asks both engines to end at once; the context waits for each."""
        for engine in self._engines.values():
            engine.child.terminate()

    def point(self, concurrency: int) -> Point:
        """Runs a concurrency: off, the best arm of each drafter, and steered."""
        options = self._options
        rates = table_rates(self._costs, concurrency)
        dilation = dilation_at(options.dilation, self._costs, concurrency)
        self._dilation_file.write_text(f"{dilation}")
        self._terminal.heading(f"{concurrency} at a time, dilation {dilation:g}")
        tokens, least = options.output_tokens, options.least_tokens
        stream = closed_loop("envelope", concurrency, least, tokens)
        # Without speculation nothing is drawn, so a few steps at the same context tell the rate.
        plain = closed_loop("off", concurrency, 1, tokens // 4, tokens // 2 - tokens // 8)
        warm_up = closed_loop("warm-up", concurrency, 1, tokens // 2)
        runs: dict[str, Run] = {}
        with ExitStack() as stack, ForeignLoad() as load:
            runs[OFF] = self._run(OFF, PLAIN, plain, dilation)
            sidecar = self._start_dilated_sidecar(stack, dilation)
            with self._terminal.working("profile"):
                measure_profile(
                    self._place, self._engines[STEERED], sidecar, options.profile_seconds,
                    "--force", "--batch-sizes", str(concurrency),
                )  # fmt: skip
            for policy, drafter in ((MTP, OWN), (DFLASH, SECOND)):
                arm = best_arm(rates, drafter)
                with sidecar.pinned(arm.gamma, drafter):
                    runs[policy] = self._run(policy, arm, stream, dilation)
            with self._terminal.working("warming up"):
                self._played(STEERED, warm_up)
            runs[STEERED] = self._run(STEERED, None, stream, dilation)
            sidecar.status()  # raises if the sidecar has ended meanwhile
        return Point(concurrency, dilation, rates, runs, load.cores)

    def _start_dilated_sidecar(self, stack: ExitStack, dilation: float) -> SidecarHandle:
        """Starts a sidecar whose decisions take as long in the model's time as they do in life."""
        defaults = PlannerSettings()
        variables = {
            f"CONTROLLER_PLANNER__{name.upper()}": f"{getattr(defaults, name) * dilation:g}"
            for name in _PLANNER_SECONDS
        }
        child = stack.enter_context(launch_sidecar(self._place, environment=variables))
        child.prefer()
        sidecar = stack.enter_context(SidecarHandle(self._place.address, STEERED))
        wait_serving(child, sidecar)
        self._engines[STEERED].wait_ready(engines.READY_SECONDS, sidecar=sidecar)
        return sidecar

    def _run(self, policy: str, arm: Arm | None, stream: Stream, dilation: float) -> Run:
        """Plays a stream, once more if too many steps were late.

        Raises HarnessError when the second play was late too.
        """
        (phase,) = stream.phases
        text = policy if arm is None else f"{policy}: {name_of(arm)}"
        for _ in range(2):
            with self._terminal.working(text) as work:
                steps = self._played(OFF if policy == OFF else STEERED, stream)
                found = measure(policy, arm, steps, phase.plan.concurrency, dilation)
                work.result = (
                    f"{found.rate:.0f} tokens/s, {found.steps} steps, {found.late_share:.1%} late"
                )
            if found.late_share <= self._options.late_share_max:
                return found
        larger = dilation_to_try(self._options.dilation, found, dilation)
        raise HarnessError(
            f"{policy} at {phase.plan.concurrency}: {found.late_share:.1%} of the steps took the "
            f"machine longer than their pace allows, twice; try --dilation {larger}"
        )

    def _played(self, policy: str, stream: Stream) -> tuple[PacedStep, ...]:
        """Plays a stream; returns the engine's steps."""
        log = engines.log_path(policy, self._place)
        begin = read_log(log).end
        play(stream, self._engines[policy].url)
        deadline = time.monotonic() + _LOG_SECONDS
        while len((part := read_log(log, begin)).requests) < stream.requests:
            if time.monotonic() > deadline:
                raise HarnessError(f"{policy} has not logged all of its requests: see {log}")
            time.sleep(0.1)
        return part.steps

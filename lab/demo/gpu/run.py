"""Runs the day at a GPU's own pace: one engine after the other, and a result after every play."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import OWN, StepCosts, load_step_costs
from lab.demo import report
from lab.demo.gpu import engines, page
from lab.demo.gpu.plan import (
    ORDER,
    SHARES,
    STATIC_BEST,
    DaySetting,
    Forecast,
    Piece,
    pieces,
    planned_share,
    total,
)
from lab.demo.outcome import DemoOutcome, as_json
from lab.gpu_check.shapes import Device
from lab.harness.engines import Workplace
from lab.harness.errors import HarnessError
from lab.harness.measured import run_facts, write_result
from lab.harness.terminal import Terminal
from lab.paced.engines import ADAPTIVE, OFF, STEERED, is_steered, static_policy
from lab.paced.lost_time import Oracle, StepValues, compute_oracle, lost_time
from lab.paced.plays import StreamPlay
from lab.paced.run import StreamHarness, profile_sizes
from lab.paced.traffic import Stream, own_curves
from simulator.errors import InvalidInputError

# Measured costs are averages: a play's clients, prompts and switches come on top.
_MARGIN = 1.15


class BudgetReachedError(SystemExit):
    """The minutes are over.  As any other end of the process, it ends all children."""


@dataclass(frozen=True, slots=True)
class GpuDemoOptions:
    """The options of a run.

    seconds: that it may take.  engine_options: further ones for SGLang.
    """

    day: DaySetting
    seconds: float
    profile_seconds: float
    output: Path
    device: Device = Device.GPU
    engine_options: tuple[str, ...] = ()


def plan(options: GpuDemoOptions) -> tuple[float, tuple[Piece, ...]]:
    """Returns the share of the day's answers that fits by the price list, and the pieces.

    Raises HarnessError when not even the shortest day fits.
    """
    share = planned_share(options.day, options.seconds, options.profile_seconds)
    if share is None:
        min_seconds = total(pieces(options.day, SHARES[-1], options.profile_seconds))
        raise HarnessError(
            f"{options.seconds / 60:g} minutes are too few: the shortest day takes about "
            f"{min_seconds / 60 + 0.5:.1f} minutes"
        )
    return share, pieces(options.day, share, options.profile_seconds)


def run(options: GpuDemoOptions, terminal: Terminal) -> dict[str, Any]:
    """Plays the day with every policy that the time allows; returns what result.json holds.

    result.json and page.md are written before the first engine starts and after every play, so
    that a run that is cut off leaves what it has.  Raises HarnessError.
    """
    start_time = time.monotonic()
    _, planned = plan(options)
    record = _Record(options, planned, start_time)
    try:
        record.write()
    except OSError as error:
        raise HarnessError(f"nothing can be written to {options.output}: {error}") from error
    with ExitStack() as stack:
        place = stack.enter_context(Workplace.temporary(options.output, "demo-gpu"))
        try:
            _Day(options, place, terminal, stack, record).run()
        except BaseException as error:
            # Written before the engines end: the process may be killed before they have.
            record.mark_cut_off(error)
            raise
    record.mark_complete()
    return record.document


class _Record:
    """Holds what is known so far, and writes the files."""

    def __init__(
        self, options: GpuDemoOptions, planned: tuple[Piece, ...], start_time: float
    ) -> None:
        self._output, self._start_time = options.output, start_time
        self.outcome: DemoOutcome | None = None
        self.document: dict[str, Any] = {
            **run_facts(),
            "complete": False,
            "stopped": "the run was killed, or has not ended yet",
            "shape": options.day.shape.name,
            "device": options.device.value,
            "seconds_allowed": options.seconds,
            "planned": [asdict(piece) for piece in planned],
            "took": [],
            "not_played": {},
        }

    def add_duration(self, name: str, policy: str, seconds: float) -> None:
        """Notes what a piece took."""
        entry = {"name": name, "policy": policy, "seconds": round(seconds, 1)}
        self.document["took"].append(entry)

    def write(self) -> None:
        """Writes result.json and page.md."""
        if self.outcome is not None:
            self.document |= as_json(self.outcome)
        self.document["seconds"] = round(time.monotonic() - self._start_time, 1)
        write_result(self.document, self._output)
        (self._output / "page.md").write_text(page.markdown(self.document), encoding="utf-8")

    def mark_cut_off(self, error: BaseException) -> None:
        """Notes why the run ends before its time."""
        if isinstance(error, BudgetReachedError):
            reason = f"the {self.document['seconds_allowed']:.0f} seconds were over"
        elif isinstance(error, SystemExit | KeyboardInterrupt):
            reason = "the run was told to end"
        else:
            reason = str(error) if isinstance(error, HarnessError) else repr(error)
        self.document["stopped"] = reason
        self.write()

    def mark_complete(self) -> None:
        """Notes that the run came to its end."""
        self.document |= {"complete": True, "stopped": ""}
        self.write()


class _Day(StreamHarness):
    """The sidecar, and one engine at a time."""

    def __init__(
        self,
        options: GpuDemoOptions,
        place: Workplace,
        terminal: Terminal,
        stack: ExitStack,
        record: _Record,
    ) -> None:
        super().__init__(place, terminal, stack)
        self._options, self._record, self._day = options, record, options.day
        self._deadline = time.monotonic() + options.seconds
        self._curves = {kind: own_curves()[kind] for kind in options.day.kinds}
        self._setting = engines.EngineSetting(
            options.day,
            options.day.shape.write(place.scratch / "models"),
            self._curves,
            options.device,
            options.engine_options,
        )
        self._forecast = Forecast(options.day)

    def run(self) -> None:
        """Plays the day with one policy after the other."""
        self._terminal.heading("The day at this machine's own pace: steered first, for its profile")
        start_time = time.monotonic()
        self._record_sidecar([STEERED], {})
        self._record.add_duration("sidecar", "", time.monotonic() - start_time)
        self._start(STEERED)
        profile = self._measure_costs()
        costs = self._load_costs(profile)
        full_stream = self._day.stream(SHARES[0])
        share = self._choose_share(full_stream, compute_oracle(full_stream, self._curves, costs))
        stream = self._day.stream(share)
        oracle = compute_oracle(stream, self._curves, costs)
        report.show_table(stream, oracle, costs.source, self._terminal, imposed=False)
        self._record.document |= {"share_of_answers": share, "graph_sizes": self._graph_sizes()}
        plays: dict[str, tuple[StreamPlay, ...]] = {STEERED: (self._play_day(STEERED, stream),)}
        values = StepValues(costs, self._curves)
        plans = self.plans(STEERED)
        lost_times = tuple(lost_time(play.decode_steps, plans, values) for play in plays[STEERED])
        best = static_policy(next(arm.gamma for arm in _rank_statics(oracle) if arm.gamma > 0))
        order = (OFF, best, ADAPTIVE, STEERED)

        def save_outcome() -> None:
            played = {policy: plays[policy] for policy in order if policy in plays}
            self._record.outcome = DemoOutcome(
                stream, costs, 1.0, (oracle,), played, lost_times, (), profile, paced=False
            )
            self._record.write()

        save_outcome()
        self._stop(STEERED)
        for planned in ORDER[1:]:
            policy = best if planned == STATIC_BEST else planned
            if self._has_time(planned, policy, plays[STEERED][0]):
                self._start(policy)
                plays[policy] = (self._play_day(policy, stream),)
                save_outcome()
                self._stop(policy)
        outcome = self._record.outcome
        assert outcome is not None
        report.show_profile(profile, 1.0, self._terminal)
        report.show(outcome, self._terminal)

    def _start(self, policy: str) -> None:
        """Starts an engine and warms it up."""
        start_time = time.monotonic()
        with self._terminal.show_progress(f"engine: {policy}") as work:
            engine = self._register_engine(engines.launch(policy, self._setting, self._place))
            sidecar = self._sidecars[policy] if is_steered(policy) else None
            engine.wait_ready(
                engines.READY_SECONDS,
                lambda: work.update(f"{time.monotonic() - start_time:.0f} s"),
                sidecar,
            )
        seconds = time.monotonic() - start_time
        self._record.add_duration("start", policy, seconds)
        if policy == STEERED:
            self._forecast.record_start(policy, seconds)
        start_time = time.monotonic()
        with self._terminal.show_progress(f"{policy}: warm-up"):
            self.play_once(policy, self._day.warm_up())
        self._record.add_duration("warm up", policy, time.monotonic() - start_time)

    def _stop(self, policy: str) -> None:
        start_time = time.monotonic()
        self._engines.pop(policy).child.stop()
        self._record.add_duration("stop", policy, time.monotonic() - start_time)

    def _play_day(self, policy: str, stream: Stream) -> StreamPlay:
        start_time = time.monotonic()
        with self._terminal.show_progress(f"{policy}: the day") as work:
            play = self.play_once(policy, stream)
            work.result = f"{play.tokens_per_second:.0f} tokens/s"
        self._record.add_duration("play", policy, time.monotonic() - start_time)
        return play

    def _measure_costs(self) -> Mapping[str, Any]:
        start_time = time.monotonic()
        sizes = profile_sizes(self._day.max_batch_size)
        with self._terminal.show_progress("controller profile"):
            profile = self.profile(STEERED, self._options.profile_seconds, sizes)
        self._record.add_duration("profile", STEERED, time.monotonic() - start_time)
        return profile

    def _load_costs(self, profile: Mapping[str, Any]) -> StepCosts:
        """Keeps the profile, and makes the costs of it that the oracle is computed from.

        Raises HarnessError for a profile that has no price for the engine's arms.
        """
        path = self._options.output / "profile.json"
        path.write_text(json.dumps(profile, indent=1) + "\n")
        day = self._day
        try:
            costs = load_step_costs(str(path), day.gammas, day.max_batch_size, self._graph_sizes())
        except InvalidInputError as error:
            raise HarnessError(f"the measured profile cannot be used: {error}") from error
        return replace(costs, surface=costs.surface.with_drafters(OWN))

    def _graph_sizes(self) -> tuple[int, ...]:
        """The batch sizes that the steered engine has graphs for; none where it has no graphs."""
        return tuple(self._sidecars[STEERED].status().engine.fingerprint.graph_batch_sizes)

    def _choose_share(self, full_stream: Stream, oracle: Oracle) -> float:
        """Chooses the share of the day's answers by the costs that were measured here."""
        seconds = _MARGIN * full_stream.tokens / oracle.statics[Arm(OWN, 0)].rate
        return self._forecast.choose_share(self._remaining_seconds(), seconds)

    def _has_time(self, planned: str, policy: str, steered: StreamPlay) -> bool:
        """Whether an engine can start and play; otherwise the reason is in the record.

        If in doubt, the answer is True: a play that is cut off wastes only the remaining time.
        """
        needed, remaining_seconds = (
            self._forecast.min_seconds(planned, steered.seconds),
            self._remaining_seconds(),
        )
        if needed <= remaining_seconds:
            return True
        reason = f"{remaining_seconds:.0f} s were left, and it takes at least {needed:.0f} s"
        self._record.document["not_played"][policy] = reason
        self._record.write()
        self._terminal.say(f"{policy} is not played: {reason}")
        return False

    def _remaining_seconds(self) -> float:
        return self._deadline - time.monotonic()


def _rank_statics(oracle: Oracle) -> list[Arm]:
    """The static arms, the fastest over the whole stream first."""
    return sorted(oracle.statics, key=lambda arm: -oracle.statics[arm].rate)

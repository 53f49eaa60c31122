"""Measures C(drafter, B, gamma, kv): the grid, and the context sweep.

At each batch size a load runs while the arms take turns, alternately in ascending and descending
order.  Every batch size is measured twice.  Drift (of the machine, and from growing contexts) then
affects all arms alike and can be removed, and the ratios are accurate even if the absolute times
are not.  Once a cell's median is accurate enough, its time goes to the other cells.
"""

from collections.abc import Callable
from datetime import datetime

from controller.core.clock import Clock
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.model_shapes import WEIGHTLESS, DrafterKind
from controller.profiling.bench import Bench
from controller.profiling.errors import (
    EngineRefusedError,
    MeasurementError,
    MeasurementStalledError,
)
from controller.profiling.fit import summarise_column
from controller.profiling.load import LoadSource
from controller.profiling.profile_file import PartialMeasurement
from controller.profiling.progress import Reporter
from controller.profiling.samples import Cells, Context
from controller.profiling.schedule import (
    PartKind,
    ProfilePart,
    ProfilingSettings,
    TimeBudget,
    batch_sizes_for,
    context_sweep_arms,
    is_measured,
    long_context_tokens,
    profile_parts,
)
from controller.profiling.sidecar import MeasureStream
from controller.profiling.wake_cost import WakeUpRecorder

_SAVE_SECONDS = 5.0


class ProfileMeasurement:
    """Measures one engine.  `save` is called repeatedly with all steps measured so far."""

    def __init__(
        self,
        spec: EngineSpec,
        settings: ProfilingSettings,
        clock: Clock,
        reporter: Reporter,
        save: Callable[[PartialMeasurement], None],
        started_at: datetime,
    ) -> None:
        self.cells: Cells = {}
        self._spec = spec
        self._settings = settings
        self._clock = clock
        self._reporter = reporter
        self._save = save
        self._started_at = started_at
        self._saved_at = clock.now()
        self.wake_ups = WakeUpRecorder(spec)
        self._finished: set[str] = set()
        self._parts = profile_parts(batch_sizes_for(spec, settings.batch_sizes))
        self._budget = TimeBudget(settings, self._parts, len(self._parts))

    def resume(self, partial: PartialMeasurement) -> int:
        """Continues an interrupted run; returns the number of its finished parts."""
        self._started_at = partial.started_at
        self.cells = partial.cells_by_key()
        names = {
            part.name
            for part in self._parts
            if part.name in partial.finished
            and (part.kind is PartKind.CONTEXT or self._is_measured(part))
        }
        self._finished = names
        remaining_parts = [part for part in self._parts if part.name not in names]
        self._budget = TimeBudget(self._settings, remaining_parts, len(self._parts))
        return len(names)

    async def run(self, stream: MeasureStream, loads: LoadSource) -> None:
        """Measures all parts, and fills `cells`.

        Raises MeasurementError if no cell of the grid was measured, if the engine or the sidecar
        ended, or if the engine does not run the requested arms.
        """
        uneven = [d.name for d in self._spec.drafters if d.kind in WEIGHTLESS]
        bench = Bench(stream, loads, self._settings, self._clock, self.cells, self.wake_ups, uneven)
        self._budget.start(self._clock.now())
        for part in self._parts:
            if part.name in self._finished:
                continue
            try:
                if part.kind is PartKind.GRID:
                    await self._measure_grid(part, bench, loads)
                else:
                    await self._measure_context(part, bench, loads)
            except (MeasurementStalledError, EngineRefusedError) as error:
                if not self._finished:
                    # If the smallest batch fails, larger ones would fail too.
                    raise
                self._reporter.note(f"left out B={part.batch_size}: {error}")
            else:
                self._finished.add(part.name)
            self._budget.finish_part(part)
            self.save()
        if not any(self._is_measured(part) for part in self._parts):
            raise MeasurementError(
                "the engine's KV pool or context length is too small for any load of the grid"
            )
        self._note_short_rows(bench)

    def _note_short_rows(self, bench: Bench) -> None:
        """Warns of costs that are too low because a lookup found no match in most rows."""
        lookups = [d.name for d in self._spec.drafters if d.kind is DrafterKind.NGRAM]
        for name in lookups:
            if 2 * bench.short_rows[name] > bench.rows[name]:
                share = bench.short_rows[name] / bench.rows[name]
                self._reporter.note(
                    f"the profile is doubtful: {name} drafted fewer tokens than requested in "
                    f"{share:.0%} of the rows, so that a step with full drafts may take longer; "
                    "measure again with --prompts and a text that repeats itself"
                )

    def save(self) -> None:
        """Saves the steps measured so far."""
        self._saved_at = self._clock.now()
        finished = tuple(sorted(self._finished))
        self._save(
            PartialMeasurement.from_cells(self._spec, self._started_at, finished, self.cells)
        )

    def _is_measured(self, part: ProfilePart) -> bool:
        arms = self._arms_of(part)
        return is_measured(part, arms, self.cells, self._settings.visit_steps)

    def _arms_of(self, part: ProfilePart) -> list[Arm]:
        """Returns the arms that the engine can run at the part's batch size."""
        return [arm for arm in self._spec.arms if self._spec.can_run(arm, part.batch_size)]

    async def _measure_grid(self, part: ProfilePart, bench: Bench, loads: LoadSource) -> None:
        seconds = self._budget.part_seconds(part, self._clock.now())
        if part.is_second_pass and not (seconds and self._is_measured(part)):
            return  # out of time, or left out before, with a note
        if not loads.new_tokens_for(part.batch_size, self._settings.context_tokens):
            self._reporter.note(
                f"left out B={part.batch_size}: the engine's KV pool or context length is too "
                "small for such a load"
            )
            return
        begun_at = self._clock.now()
        deadline = begun_at + seconds
        arms = self._arms_of(part)
        turn_number = 0
        bench.round_number = self._next_round(part)
        async with bench.hold_batch(
            part.batch_size, self._settings.context_tokens, Context.GRID, arms[0]
        ):
            while True:
                unsettled = self._unsettled_arms(part)
                is_late = self._clock.now() >= deadline
                enough = turn_number >= self._settings.rounds and not unsettled
                if enough or (is_late and self._is_measured(part)):
                    return
                remaining_seconds = max(deadline - self._clock.now(), 0.0)
                remaining_visits = max(len(unsettled), 1) * max(
                    self._settings.rounds - turn_number, 1
                )
                for arm in arms if turn_number % 2 == 0 else reversed(arms):
                    # A settled arm is visited briefly, to show the round's drift.
                    await bench.visit_arm(
                        arm, remaining_seconds / remaining_visits if arm in unsettled else 0.0
                    )
                    self._report_progress(
                        part, arm, (self._clock.now() - begun_at) / max(seconds, 1e-9)
                    )
                turn_number += 1
                bench.round_number += 1

    def _batch_cells(self, part: ProfilePart) -> Cells:
        return {
            key: samples
            for key, samples in self.cells.items()
            if key.batch_size == part.batch_size and key.context is Context.GRID and len(samples)
        }

    def _next_round(self, part: ProfilePart) -> int:
        return 1 + max((max(s.rounds) for s in self._batch_cells(part).values()), default=-1)

    def _unsettled_arms(self, part: ProfilePart) -> set[Arm]:
        """Returns the arms whose medians are not accurate enough yet."""
        settled = {
            key.arm
            for key, summary in summarise_column(self._batch_cells(part), 0.0, 0.0)
            if summary.steps >= self._settings.cell_steps
            and summary.half_width <= self._settings.tolerance
        }
        return set(self._arms_of(part)) - settled

    async def _measure_context(self, part: ProfilePart, bench: Bench, loads: LoadSource) -> None:
        begun_at = self._clock.now()
        seconds = self._budget.part_seconds(part, begun_at)
        if not self._is_measured(part):
            return
        bench.round_number = 0
        prepared = self._arms_of(part)
        arms = [arm for arm in context_sweep_arms(self._spec) if arm in prepared] or prepared[:1]
        # Short, long, short: so that a drift of the machine affects both contexts alike.
        for context, time_share in (
            (Context.SHORT, 0.25),
            (Context.LONG, 0.5),
            (Context.SHORT, 0.25),
        ):
            tokens = self._settings.context_tokens
            if context is Context.LONG:
                tokens = long_context_tokens(
                    part.batch_size, self._settings, loads, bench.prefill_seconds_per_token, seconds
                )
                if not tokens:
                    self._reporter.note(
                        f"no context sweep at B={part.batch_size}: not enough memory or time for a "
                        f"context of more than {self._settings.context_tokens} tokens"
                    )
                    return
            deadline = self._clock.now() + time_share * seconds
            async with bench.hold_batch(part.batch_size, tokens, context, arms[0]):
                remaining_seconds = max(deadline - self._clock.now(), 0.0)
                for arm in (*arms, *reversed(arms)):
                    await bench.visit_arm(arm, remaining_seconds / (2 * len(arms)))
                    part_share = (self._clock.now() - begun_at) / max(seconds, 1e-9)
                    self._report_progress(part, arm, part_share, tokens)

    def _report_progress(
        self, part: ProfilePart, arm: Arm, part_share: float, context_tokens: int = 0
    ) -> None:
        share, remaining_seconds = self._budget.progress(part_share, self._clock.now())
        position = f"B={part.batch_size} {arm.drafter} gamma={arm.gamma}"
        if context_tokens:
            position += f" context={context_tokens}"
        self._reporter.progress(share, position, remaining_seconds)
        if self._clock.now() - self._saved_at >= _SAVE_SECONDS:
            self.save()

"""Runs loads on one engine, forces its arms, and sorts the usable steps into cells.

    hold(batch size, prompt length)     keeps a batch of this size decoding
    visit(arm, seconds)                 forces the arm for a while; its steps go to the cell

A step goes to the cell of the arm that it ran.  Steps of the previous arm after a switch are
therefore kept, and no step is attributed to an arm that was only requested.
"""

from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from controller.core.clock import Clock
from controller.core.engine_spec import Arm
from controller.core.step_report import StepReport
from controller.profiling.engine_http import Generation
from controller.profiling.errors import MeasurementStalledError, OtherWidthError
from controller.profiling.load import LoadSource
from controller.profiling.samples import CellKey, Cells, Context, Samples
from controller.profiling.schedule import ProfilingSettings
from controller.profiling.sidecar import MeasureStream
from controller.profiling.wake_cost import WakeUpRecorder

_LISTEN_SECONDS = 0.1
# After a load has ended, its last reports may still arrive.
_QUIET_SECONDS = 0.05
_QUIET_SECONDS_MAX = 1.0
_REASONS_TOLD = 3
# Consecutive steps of other draft lengths under the plan with the requested one, and seconds since
# the request, after which the engine is found not to follow; a switch takes a few steps.
_OTHER_WIDTH_STEPS = 40
_OTHER_WIDTH_SECONDS = 2.0
# Most loads that may end before a step of the requested batch size is reported: if the machine is
# busy and delays the agent or the sidecar, all reports of a load can be lost.
_LOADS_MAX = 5
# Slack factor of the context lengths, which tell a load's steps from late ones of the load before.
_CONTEXT_SLACK = 1.1


class Bench:
    """Fills `cells` and `wakings` from the reported steps.

    uneven: as in StepFilter.  rows, short_rows: by uneven drafter, the rows of steps that drafted,
    and of these the rows that verified fewer drafts.  prefill_seconds_per_token: from a
    load's request to its full batch; inf before the first.
    """

    def __init__(
        self,
        stream: MeasureStream,
        loads: LoadSource,
        settings: ProfilingSettings,
        clock: Clock,
        cells: Cells,
        wakings: WakeUpRecorder,
        uneven: Collection[str] = (),
    ) -> None:
        self.cells = cells
        self._wake_ups = wakings
        self.rows: Counter[str] = Counter()
        self.short_rows: Counter[str] = Counter()
        self.prefill_seconds_per_token = float("inf")
        # The current round of visits, which is stored with each step.
        self.round_number = 0
        self._stream = stream
        self._loads = loads
        self._settings = settings
        self._clock = clock
        self._uneven = frozenset(uneven)
        self._filter = StepFilter(settings.settle_steps, uneven)
        self._load: Generation | None = None
        self._batch_size = 0
        self._prompt_tokens = 0
        self._context = Context.GRID
        self._requested_arm: Arm | None = None
        # Number of steps of each other draft length under the plan with the requested one.
        self._other_gamma_steps: Counter[int] = Counter()
        self._requested_at = 0.0
        # The stream's epoch at the request; the plan with the requested arm has a later one.
        self._epoch_before = 0
        # The requested batch size was reached under this load; the last report had a smaller one.
        self._has_full_batch = False
        self._has_shrunk = False
        self._begun_at = 0.0
        self._counted_at = 0.0

    @asynccontextmanager
    async def hold_batch(
        self, batch_size: int, prompt_tokens: int, context: Context, first_arm: Arm
    ) -> AsyncIterator[None]:
        """Keeps a decode batch of this size running inside the block, at first with `first_arm`.

        Raises MeasurementStalledError if the batch is not reached, and EngineUnreachableError.
        """
        self._batch_size, self._prompt_tokens = batch_size, prompt_tokens
        self._context = context
        await self._request_arm(first_arm)
        try:
            await self._fill_batch()
            yield
        finally:
            await self._stop_load()

    async def visit_arm(self, arm: Arm, seconds: float) -> None:
        """Runs the arm for this time or until enough of its steps counted, but at least a few.

        Raises MeasurementStalledError, OtherWidthError, EngineUnreachableError, MeasurementError.
        """
        await self._request_arm(arm)
        samples = self.samples(arm)
        steps_min = len(samples) + self._settings.visit_steps
        steps_max = len(samples) + self._settings.visit_steps_most
        deadline = self._clock.now() + seconds
        while len(samples) < steps_min or (
            len(samples) < steps_max and self._clock.now() < deadline
        ):
            await self._read_reports()
            if self._has_load_ended():
                await self._stop_load()
                await self._start_load()

    def samples(self, arm: Arm) -> Samples:
        """Returns the current cell of this arm."""
        key = CellKey(arm.drafter, arm.gamma, self._batch_size, self._context)
        return self.cells.setdefault(key, Samples())

    async def _request_arm(self, arm: Arm) -> None:
        await self._stream.force(arm)
        self._requested_arm = arm
        self._filter.left_out.clear()
        self._other_gamma_steps.clear()
        self._requested_at = self._clock.now()
        self._epoch_before = self._stream.forced_epoch
        self._counted_at = self._clock.now()

    async def _fill_batch(self) -> None:
        for _ in range(_LOADS_MAX):
            await self._start_load()
            has_ended = False
            while not (self._has_full_batch or has_ended):
                has_ended = self._load is not None and self._load.has_ended
                await self._read_reports()
            if self._has_full_batch:
                return
            await self._stop_load()
        raise MeasurementStalledError(self._stall_text(f"while {_LOADS_MAX} loads ran"))

    async def _start_load(self) -> None:
        await self._wait_until_quiet()
        self._wake_ups.begin_load()
        self._filter.expect(self._batch_size, self._expected_contexts())
        self._has_full_batch = False
        self._begun_at = self._clock.now()
        self._load = self._loads.start(self._batch_size, self._prompt_tokens)

    async def _stop_load(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            await load.stop()

    async def _wait_until_quiet(self) -> None:
        deadline = self._clock.now() + _QUIET_SECONDS_MAX
        while await self._stream.reports(_QUIET_SECONDS) and self._clock.now() < deadline:
            pass

    def _expected_contexts(self) -> range:
        """Returns the context lengths of the load, with slack for how engines count tokens."""
        grown = self._prompt_tokens + self._loads.new_tokens_for(
            self._batch_size, self._prompt_tokens
        )
        slack = _CONTEXT_SLACK
        return range(int(self._prompt_tokens / slack), int(grown * slack) + 1)

    def _has_load_ended(self) -> bool:
        if self._load is None or self._load.has_ended:
            return True
        # After the full batch, a smaller one means that a sequence has ended.
        return self._has_full_batch and self._has_shrunk

    async def _read_reports(self) -> None:
        """Processes the reports that arrive within a short time."""
        self._has_shrunk = False
        for report in await self._stream.reports(_LISTEN_SECONDS):
            self._count_report(report)
        if self._clock.now() - self._counted_at > self._settings.stall_seconds:
            # If the engine refused the load, `ended` raises a more specific error.
            if self._load is not None:
                _ = self._load.has_ended
            waited = f"for {self._settings.stall_seconds:.0f} s"
            raise MeasurementStalledError(self._stall_text(waited))

    def _count_report(self, report: StepReport) -> None:
        self._wake_ups.observe(report)
        self._require_requested_gamma(report)
        if report.batch_size == self._batch_size and not self._has_full_batch:
            self._has_full_batch = True
            tokens = self._batch_size * self._prompt_tokens
            seconds_per_token = (self._clock.now() - self._begun_at) / tokens
            self.prefill_seconds_per_token = min(self.prefill_seconds_per_token, seconds_per_token)
        self._has_shrunk = report.batch_size < self._batch_size
        if self._filter.accepts(report):
            self.samples(report.arm).add(report.step_seconds, report.kv_tokens, self.round_number)
            self._count_rows(report)
            if report.arm == self._requested_arm:
                self._counted_at = self._clock.now()
            else:
                self._filter.left_out[f"{report.drafter} gamma {report.gamma}"] += 1

    def _count_rows(self, report: StepReport) -> None:
        if report.gamma and report.drafter in self._uneven:
            self.rows[report.drafter] += report.batch_size
            self.short_rows[report.drafter] += sum(
                sum(group.accepted_counts) for group in report.groups if group.gamma < report.gamma
            )

    def _require_requested_gamma(self, report: StepReport) -> None:
        """Raises OtherWidthError if the engine has run other draft lengths for too long.

        The agent has a low priority, so a plan can be seconds late: steps under earlier plans do
        not count.
        """
        requested, other_steps = self._requested_arm, self._other_gamma_steps
        if requested is None or report.drafter != requested.drafter or report.flags.unsteered:
            return
        requested_epoch = self._stream.forced_epoch
        if requested_epoch == self._epoch_before or report.plan_epoch < requested_epoch:
            return
        verified_gamma = self._filter.verified_gamma(report)
        if verified_gamma == requested.gamma:
            other_steps.clear()
            return
        other_steps[verified_gamma] += 1
        seconds = self._clock.now() - self._requested_at
        if other_steps.total() < _OTHER_WIDTH_STEPS or seconds < _OTHER_WIDTH_SECONDS:
            return
        verified = " and ".join(f"gamma {gamma}" for gamma in sorted(other_steps))
        raise OtherWidthError(
            f"{requested.drafter}: gamma {requested.gamma} was requested, but the engine verified "
            f"{verified} "
            f"in {other_steps.total()} consecutive steps since then: it does not follow the draft "
            "length (docs/engines.md lists what its version, method and model runner "
            "support; shim and sidecar may have different versions); no profile is written"
        )

    def _stall_text(self, period: str) -> str:
        reasons = self._filter.left_out.most_common(_REASONS_TOLD)
        detail = "unusable steps: " + ", ".join(f"{n} x {reason}" for reason, n in reasons)
        if not reasons and self._stream.earlier_steps:
            detail = (
                f"the engine has reported {self._stream.earlier_steps} steps under earlier plans, "
                "and none under the measurement's: its shim does not follow plans, or has another "
                "version"
            )
        elif not reasons:
            detail = (
                "the engine reports no steps: check that the engine at this URL is the one that "
                "introduced itself to the sidecar"
            )
        requested = self._requested_arm
        arm = f" of {requested.drafter} gamma {requested.gamma}" if requested else ""
        return f"no usable step{arm} with a batch of {self._batch_size} {period}; {detail}"


class StepFilter:
    """Selects usable steps from reports in order.

    settle_steps: how many steps are left out after a change.  uneven: names of drafters whose rows
    differ in draft length: mixtures, and lookups, which find no match in some rows.
    """

    def __init__(self, settle_steps: int, uneven: Collection[str] = ()) -> None:
        self._settle_steps = settle_steps
        self._uneven = frozenset(uneven)
        self._unsettled = 0
        self._batch_size = 0
        self._context_tokens = range(0)
        self._last_arm_and_batch: tuple[Arm, int] | None = None
        # Number of left-out reports by reason, for people; the caller clears it.
        self.left_out: Counter[str] = Counter()

    def expect(self, batch_size: int, context_tokens: range) -> None:
        """Accepts only steps of this batch size and of these mean contexts from now on."""
        self._batch_size = batch_size
        self._context_tokens = context_tokens
        self._last_arm_and_batch = None

    def accepts(self, report: StepReport) -> bool:
        """Whether the step's seconds are those of its arm at the requested batch size."""
        reason = self._rejection_reason(report)
        if reason:
            self.left_out[reason] += 1
        return not reason

    def _rejection_reason(self, report: StepReport) -> str:
        arm_and_batch = (report.arm, report.batch_size)
        if arm_and_batch != self._last_arm_and_batch:
            self._last_arm_and_batch = arm_and_batch
            self._unsettled = self._settle_steps
        if report.batch_size != self._batch_size:
            return f"batch of {report.batch_size}"
        context = report.kv_tokens // report.batch_size
        if context not in self._context_tokens:
            return f"context of about {round(context, -2)} tokens"
        if report.flags.unsteered:
            return "ran without a valid plan"
        return self._disturbance_reason(report)

    def _disturbance_reason(self, report: StepReport) -> str:
        flags = report.flags
        if flags.is_unusable_for_cost or flags.switched:
            # The disturbance may also affect the next step.
            self._unsettled = max(self._unsettled - 1, 1)
            names = (
                "after_gap", "eager_fallback", "first_use", "mixed_choice", "switched", "updating",
            )  # fmt: skip
            return f"flagged {next(name for name in names if getattr(flags, name))}"
        if report.prefill_tokens:
            return "prefilled while decoding"
        if (widths := other_gammas_text(report)) and report.drafter not in self._uneven:
            return f"verified {widths} in some rows of gamma {report.gamma}"
        settled, self._unsettled = not self._unsettled, max(self._unsettled - 1, 0)
        return "" if settled else "right after a change"

    def verified_gamma(self, report: StepReport) -> int:
        """Returns the draft length that a step verified: the largest of its rows.

        For an uneven drafter, returns the step's own, since all rows may verify less.
        """
        if not report.groups or report.drafter in self._uneven:
            return report.gamma
        return max(group.gamma for group in report.groups)


def other_gammas_text(report: StepReport) -> str:
    """Names the draft lengths of rows that differ from their step's; "" if none does."""
    widths = {group.gamma for group in report.groups} - {report.gamma}
    return " and ".join(f"gamma {width}" for width in sorted(widths))

"""Checks one engine's reports, and makes warnings for operators.

No decision uses them.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from controller.core.checks.step_time_check import FlatStepTime, StepTimeCheck
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.model_shapes import WEIGHTLESS
from controller.core.plan import Plan
from controller.core.step_report import StepReport

# A drafter is suspect if a sequence gains fewer tokens than this per drafted step.  A wrong
# checkpoint was observed at 1.02 to 1.07; a right one stays above 1.3 even on text that is hard to
# predict.
SUSPECT_TOKENS = 1.1
# A block of drafts with this many tokens on average shows that the drafter works.  A block with a
# mean of 1.1 exceeds it (three standard deviations of its first position) once in a thousand times.
WORKING_TOKENS = 1.2
# Verified drafts before a drafter is suspect, and the standard errors by which it must be below the
# limit: a right drafter at 1.15 tokens is verified rarely, so bad luck would accuse it for long.
_MIN_DRAFTS = 50
_STANDARD_ERRORS = 2.0
# Verified drafts of a block, and the minimum number of steps that they come from: copies of one
# prompt in a batch are not independent evidence.
_BLOCK_DRAFTS = 100
_BLOCK_STEPS = 10
# Steps of the engine since its first draft before a drafter is suspect.
_MIN_STEPS = 200
# Plans that a delayed report may refer to; reports of older plans are not compared.
_PLANS_KEPT = 64
# Steps planned with one draft length: window of the mean share of other lengths, and its minimum.
_WINDOW_STEPS = 50
# Share of these steps above which the engine does not follow the plan.
_MISMATCH_SHARE = 0.5
_NO_ACCEPTANCE_ADVICE = (
    "the drafter does not fit: check that the method matches its checkpoint (not EAGLE-3 under "
    "EAGLE, or the reverse), it was trained for this target and revision, vocabulary or hot-token "
    "map are the target's, it reads the layers that it was trained on (vLLM's second model runner "
    "ignores eagle_config.eagle_aux_hidden_state_layer_ids), and quantization and rope settings "
    "match; see docs/failures.md, 'Engine warnings'"
)
_MISMATCH_ADVICE = (
    "the engine does not follow the draft length of its plan: see docs/engines.md for its "
    "version, method and model runner, and install one version of shim and sidecar; until then a "
    "choice has no effect"
)
_FLAT_ADVICE = (
    "the engine may draft its full length whatever the plan is (see docs/engines.md for its "
    "version, method and model runner), or its steps wait for something other than the GPU"
)


class WarningKind(Enum):
    """Names the kinds of warnings in logs, metrics and the contract."""

    NO_ACCEPTANCE = "no-acceptance"
    OTHER_WIDTH = "other-width"
    FLAT_STEP_TIME = "flat-step-time"


@dataclass(frozen=True, slots=True)
class EngineWarning:
    """Warns operators that an engine works worse than it could; no decision uses it.

    drafter: the affected drafter.  found: evidence in the reports, in one line.  advice: likely
    causes and remedies, in one line.
    """

    kind: WarningKind
    drafter: str
    found: str
    advice: str


class AcceptanceCheck:
    """Counts the acceptance of one drafter of `gamma_max` positions until it has worked.

    Detects a drafter with almost no accepted tokens, which does not fit its target.  A wrong
    checkpoint changes no output and fails no request; its only symptom is an acceptance length that
    stays close to 1.  Hard traffic has the same symptom but is no fault, so a drafter that has
    worked once is never suspect again.

    Acceptance is counted position by position, from the first step on.  Positions cut off by a
    sequence's end, by a grammar or by the draft length are censored and not counted, so that short
    answers do not look like rejections.

    drafts, steps: verified drafts, and the steps since the first of them.
    """

    def __init__(self, gamma_max: int) -> None:
        self.has_worked = False
        self.steps = 0
        self._total = _PositionCounts(gamma_max)
        self._block = _PositionCounts(gamma_max)
        self._block_steps = 0

    @property
    def drafts(self) -> int:
        """Number of verified drafts."""
        return self._total.exposures[0]

    @property
    def tokens(self) -> float:
        """Mean tokens that a sequence gained per drafted step so far, bonus token included."""
        return self._total.tokens

    @property
    def is_suspect(self) -> bool:
        """Whether it has drafted for long and almost no tokens were accepted."""
        return (
            not self.has_worked
            and self.steps >= _MIN_STEPS
            and self.drafts >= _MIN_DRAFTS
            and self.tokens + _STANDARD_ERRORS * self._standard_error < SUSPECT_TOKENS
        )

    @property
    def _standard_error(self) -> float:
        """Standard error of `tokens`, as for a count of rare events plus one."""
        return math.sqrt((self.tokens - 1 + 1 / self.drafts) / self.drafts)

    def observe(self, accepted_counts: Sequence[int], censored_counts: Sequence[int]) -> None:
        """Adds a step in which it drafted; counts as in `AcceptanceEstimator.observe`."""
        self._total.add(accepted_counts, censored_counts)
        block = self._block
        block.add(accepted_counts, censored_counts)
        self._block_steps += 1
        if block.exposures[0] >= _BLOCK_DRAFTS and self._block_steps >= _BLOCK_STEPS:
            self.has_worked = block.tokens >= WORKING_TOKENS
            self._block = _PositionCounts(len(block.exposures))
            self._block_steps = 0

    def count_step(self) -> None:
        """Counts a step of the engine, whether or not it drafted in it."""
        if self.drafts:
            self.steps += 1


class _PositionCounts:
    """Counts by position the sequences that reached it, and those that accepted it."""

    def __init__(self, gamma_max: int) -> None:
        self.exposures = [0] * gamma_max
        self._successes = [0] * gamma_max

    def add(self, accepted_counts: Sequence[int], censored_counts: Sequence[int]) -> None:
        """Counts a step's sequences, by the counts of its report."""
        reached = sum(accepted_counts) + sum(censored_counts)
        for k in range(min(len(accepted_counts) - 1, len(self.exposures))):
            if censored_counts:
                reached -= censored_counts[k]
            successes = reached - accepted_counts[k]
            self.exposures[k] += reached
            self._successes[k] += successes
            if not successes:
                break
            reached = successes

    @property
    def tokens(self) -> float:
        """1 + s_1 + s_2 + ..., as far as there is evidence."""
        survival, total = 1.0, 1.0
        for reached, successes in zip(self.exposures, self._successes, strict=True):
            if not successes:
                break
            survival *= successes / reached
            total += survival
        return total


@dataclass(slots=True)
class _RequestedArm:
    """Counts the steps that were planned with one arm.

    mismatch_share: of the last ones, those that ran another draft length; last_mismatch_gamma: the
    last such length.
    """

    steps: int = 0
    mismatch_share: float = 0.0
    last_mismatch_gamma: int = 0


@dataclass(frozen=True, slots=True)
class DraftLengthMismatch:
    """Reports that steps planned with `arm` verified another draft length.

    mismatch_share: of the last `steps` such steps.
    """

    arm: Arm
    verified_gamma: int
    mismatch_share: float
    steps: int


class DraftLengthCheck:
    """Compares the reports of one engine with its plans.

    In every engine a few steps differ, because a drafter wakes up or the batch changes between
    choice and step.  In an engine that does not follow the draft length, nearly all of them differ.
    The check compares the draft length of the whole step.  Rows that verified fewer drafts (a
    grammar forbade them, or a lookup found none) are no evidence.

    allow_larger_batch: the choice may have been made for a larger batch than the report's
    (data-parallel attention, where all ranks run the choice for the largest batch).
    """

    def __init__(self, *, allow_larger_batch: bool) -> None:
        self._allow_larger_batch = allow_larger_batch
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._counts_by_arm: dict[Arm, _RequestedArm] = {}
        self._last_batch_size = 0
        # The last query and its answer: most steps repeat it.
        self._last_query: tuple[int, ...] = ()
        self._last_answer: tuple[Arm, set[int], _RequestedArm] | None = None

    def expect_plan(self, plan: Plan) -> None:
        """Records a plan, to which later steps refer by its epoch."""
        self._plans[plan.epoch] = plan
        if len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)

    def observe(self, report: StepReport) -> None:
        """Adds a step.  Steps without a plan, with mixed choices or without drafts are ignored."""
        # An engine may choose one step ahead, for the previous batch size.
        batch_size = report.batch_size
        previous_batch_size = self._last_batch_size or batch_size
        self._last_batch_size = batch_size
        flags = report.flags
        if flags.unsteered or flags.mixed_choice or not has_drafted_row(report):
            return
        query = (report.plan_epoch, previous_batch_size, report.probe_id, batch_size)
        if query != self._last_query:
            self._last_query, self._last_answer = query, self._requested_arms(*query)
        if self._last_answer is None:
            return
        requested_arm, allowed_gammas, count = self._last_answer
        if report.drafter != requested_arm.drafter:
            return
        is_mismatch = report.gamma not in allowed_gammas
        count.steps += 1
        count.mismatch_share += (is_mismatch - count.mismatch_share) / min(
            count.steps, _WINDOW_STEPS
        )
        if is_mismatch:
            count.last_mismatch_gamma = report.gamma

    def _requested_arms(
        self, epoch: int, previous_batch_size: int, probe_id: int, batch_size: int
    ) -> tuple[Arm, set[int], _RequestedArm] | None:
        """Returns a plan's arm for a batch size, and the counts of the steps planned with it.

        Between them: the draft lengths of its drafter for all sizes that may have been meant.
        """
        plan = self._plans.get(epoch)
        if plan is None:
            return None
        min_batch_size, max_batch_size = sorted((previous_batch_size, batch_size))
        rows = [row for row in plan.rows if row.max_batch_size >= min_batch_size] or [plan.rows[-1]]
        if not self._allow_larger_batch:
            last_row = next(
                (i for i, row in enumerate(rows) if row.max_batch_size >= max_batch_size), len(rows)
            )
            rows = rows[: last_row + 1]
        arms = {row.arm for row in rows}
        requested_arm = plan.row_for(batch_size).arm
        if probe_id:
            probes = [row.probe for row in rows if row.probe is not None]
            probe = next((probe for probe in probes if probe.probe_id == probe_id), None)
            if probe is None:
                return None
            requested_arm = probe.arm
            arms = {requested_arm}
        allowed_gammas = {arm.gamma for arm in arms if arm.drafter == requested_arm.drafter}
        count = self._counts_by_arm.setdefault(requested_arm, _RequestedArm())
        return requested_arm, allowed_gammas, count

    def find_mismatches(self) -> list[DraftLengthMismatch]:
        """Returns the arms that the engine does not follow, the longest draft length first."""
        mismatches = [
            DraftLengthMismatch(
                arm,
                count.last_mismatch_gamma,
                count.mismatch_share,
                min(count.steps, _WINDOW_STEPS),
            )
            for arm, count in self._counts_by_arm.items()
            if count.steps >= _WINDOW_STEPS and count.mismatch_share > _MISMATCH_SHARE
        ]
        return sorted(mismatches, key=lambda mismatch: (mismatch.arm.drafter, -mismatch.arm.gamma))


def has_drafted_row(report: StepReport) -> bool:
    """Returns whether a step had a row that allows drafting and whose request had not ended."""
    return not report.groups or any(group.drafter and not group.ended for group in report.groups)


class EngineChecks:
    """Holds the checks of one engine; `observe`, `observe_step_time`, `expect_plan` update them.

    acceptance: by drafter, for drafters with weights.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.acceptance = {
            d.name: AcceptanceCheck(d.gammas[-1])
            for d in spec.drafters
            if d.kind not in WEIGHTLESS and d.gammas[-1]
        }
        self._draft_length_check = DraftLengthCheck(
            allow_larger_batch=spec.fingerprint.data_parallel_size > 1
        )
        self._step_time_check = StepTimeCheck(spec.drafters)

    def expect_plan(self, plan: Plan) -> None:
        """Records an issued plan."""
        self._draft_length_check.expect_plan(plan)

    def observe(self, report: StepReport, *, is_measurement: bool) -> None:
        """Adds a step.  is_measurement: its load was a measurement's, whose text is not traffic."""
        self._draft_length_check.observe(report)
        if is_measurement:
            return
        if report.flags.drafter_reset:
            self._forget_learner()
        proposal_counts = report.proposal_counts_by_drafter if report.proposals else {}
        for name, check in self.acceptance.items():
            if check.has_worked:
                continue
            if name == report.drafter and report.gamma:
                check.observe(*report.drafted_counts)
            elif name in proposal_counts:
                check.observe(*proposal_counts[name])
            check.count_step()

    def _forget_learner(self) -> None:
        """Restarts the check of the learner, whose weights were reset, unless it has worked."""
        learner = self.spec.learner
        check = self.acceptance.get(learner.name)
        if check is not None and not check.has_worked:
            self.acceptance[learner.name] = AcceptanceCheck(learner.gammas[-1])

    def observe_step_time(self, report: StepReport, seconds: float) -> None:
        """Adds the seconds of a plain step, without the cost of a change of arm."""
        self._step_time_check.observe(report, seconds)

    def continue_from(self, previous: "EngineChecks") -> None:
        """Adopts the acceptance checks of the engine's previous session if its spec is the same.

        If its fingerprint or a drafter differs, a drafter that worked before may no longer fit.
        """
        current_spec, previous_spec = self.spec, previous.spec
        if (current_spec.fingerprint, current_spec.drafters) == (
            previous_spec.fingerprint,
            previous_spec.drafters,
        ):
            self.acceptance = previous.acceptance

    def warnings(self) -> tuple[EngineWarning, ...]:
        """Returns the present warnings, in a fixed order."""
        return (
            *self._acceptance_warnings(),
            *map(_mismatch_warning, self._draft_length_check.find_mismatches()),
            *self._step_time_warnings(),
        )

    def _acceptance_warnings(self) -> Iterator[EngineWarning]:
        for name, check in self.acceptance.items():
            if check.is_suspect:
                yield EngineWarning(
                    WarningKind.NO_ACCEPTANCE,
                    name,
                    f"drafter {name} has never worked: {check.tokens:.2f} tokens per sequence and "
                    f"step in {check.drafts} verified drafts since its first one, {check.steps} "
                    f"steps ago; below {SUSPECT_TOKENS:g} almost no draft is accepted",
                    _NO_ACCEPTANCE_ADVICE,
                )

    def _step_time_warnings(self) -> Iterator[EngineWarning]:
        for flat in self._step_time_check.find_flat_pairs():
            yield EngineWarning(
                WarningKind.FLAT_STEP_TIME, flat.drafter, _flat_text(flat), _FLAT_ADVICE
            )


def _mismatch_warning(mismatch: DraftLengthMismatch) -> EngineWarning:
    arm = mismatch.arm
    return EngineWarning(
        WarningKind.OTHER_WIDTH,
        arm.drafter,
        f"the plan asks for {arm.drafter} gamma {arm.gamma}, the engine verifies gamma "
        f"{mismatch.verified_gamma}: {mismatch.mismatch_share:.0%} of the last {mismatch.steps} "
        "such steps ran another "
        "draft length",
        _MISMATCH_ADVICE,
    )


def _flat_text(flat: FlatStepTime) -> str:
    return (
        f"a step of {flat.drafter} takes no longer at gamma {flat.long_gamma} than at gamma "
        f"{flat.short_gamma} "
        f"({flat.relative_difference:+.1%} +- {flat.standard_error:.1%}, {flat.step_pairs} pairs "
        "of steps in batches of "
        f"up to {flat.batch_size})"
    )

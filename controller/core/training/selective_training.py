"""Decides when a drafter is trained beside its engine, and which of its versions serves.

Paper: TIDE, arXiv:2602.05145, Algorithm 1.  There are two moving averages of the acceptance rate.
When the short one falls below the long one by a margin, training signals are collected.  Once
enough are stored, the trainer is asked for a new version, which is deployed only if its acceptance
on the held-out split is higher than the old version's; otherwise collecting ends.

The paper's acceptance rate of a request is here that of `unit_drafts` drafted sequences, since
reports name no requests: accepted drafts over verified drafts up to the first rejection.  This is
the paper's alpha (its Eq. 2) and does not depend on the draft length.

Weights changed by online updates do not count as a version: while they serve, no version is judged
and no round begins.  The engine stores them as a version once signals are collected, and that
version replaces the one from which they were learnt.

Beyond the paper: a version must also be better than the old one on the same held-out signals, and
one whose acceptance in service falls by more than the margin is rolled back.
"""

import json
import math
from dataclasses import asdict, astuple, dataclass, field, replace

from controller.core.errors import MALFORMED_JSON_ERRORS, InvalidTrainingError
from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport

# Rounds that are remembered, for display.
_REMEMBERED_ROUNDS = 16
# Units after a deployment: those that are skipped, because requests that were running at the change
# have a cache of the old version; those before an early verdict, which needs twice the margin; and
# those before the final verdict.
_SKIPPED_UNITS = 3
_EARLY_VERDICT_UNITS = 5
_VERDICT_UNITS = 20
MAX_VERSION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The paper's lambda_short, lambda_long, epsilon, N_init and N_threshold, in this order.

    threshold: in stored signals.  unit_drafts: drafted sequences per acceptance rate.  Raises
    ValueError for invalid values.
    """

    short_decay: float = 0.9
    long_decay: float = 0.99
    margin: float = 0.05
    initial: int = 20
    threshold: int = 64
    unit_drafts: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.short_decay < self.long_decay < 1:
            raise ValueError(
                f"decays {self.short_decay} and {self.long_decay}: the short one must be smaller, "
                "both in [0, 1)"
            )
        if not 0 < self.margin < 1:
            raise ValueError(f"margin {self.margin} must be in (0, 1)")
        if min(self.initial, self.unit_drafts) < 1 or self.threshold < 2:
            raise ValueError(
                "initial and unit_drafts must be 1 or more, and threshold 2 or more, since one "
                "signal is held out"
            )


@recorded("training_result")
@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Holds the trainer's result of a round.  Raises InvalidTrainingError.

    version: of the new weights, 0 if the round failed (error: the reason).  alpha_train: acceptance
    rate in service of the training signals.  alpha_eval: of the new version on the held-out
    signals; alpha_before: of the serving version on the same signals.
    """

    round: int
    version: int = 0
    alpha_train: float = 0.0
    alpha_eval: float = 0.0
    alpha_before: float = 0.0
    error: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.version <= MAX_VERSION or self.round < 1:
            raise InvalidTrainingError(
                f"round {self.round}, version {self.version}: a round must be 1 or more, a version "
                f"in [0, {MAX_VERSION}]",
                field_path="round",
            )
        rates = (self.alpha_train, self.alpha_eval, self.alpha_before)
        if not all(0 <= rate <= 1 for rate in rates):
            raise InvalidTrainingError(
                f"acceptance rates {rates} must be in [0, 1]", field_path="alpha_eval"
            )
        if bool(self.version) == bool(self.error):
            raise InvalidTrainingError(
                "a round must end with either a version or an error", field_path="version"
            )

    @property
    def is_better(self) -> bool:
        """Whether the new version meets the paper's condition and beats the serving version."""
        return bool(self.version) and self.alpha_eval > max(self.alpha_train, self.alpha_before)


@recorded("training_round")
@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Records how a round ended: deployed, kept, rejected, failed or rolled-back."""

    result: TrainingResult
    outcome: str


@recorded("training_trial")
@dataclass(frozen=True, slots=True)
class Trial:
    """State of the trial of a version in service.

    before: acceptance rate of its predecessor.  units, total: number and sum of its own rates.
    """

    before: float
    units: int = 0
    total: float = 0.0


@recorded("training_state")
@dataclass(frozen=True, slots=True)
class TrainingState:
    """Holds the stored state.  short, long: moving averages; measured: number of rates so far.

    round: the last requested round of training; training: it is running.  version: the version that
    must serve, 0 = as loaded; parent: the rollback version.
    """

    measured: int = 0
    short: float = 0.0
    long: float = 0.0
    collecting: bool = False
    round: int = 0
    training: bool = False
    version: int = 0
    parent: int = 0
    trial: Trial | None = None
    history: tuple[RoundRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingView:
    """Holds a state for display.

    stored: number of stored signals; served_version: the version in the last report; learnt: online
    updates have changed its weights.
    """

    state: TrainingState
    attended: bool
    stored: int
    signals_needed: int
    served_version: int
    learnt: bool

    @property
    def phase(self) -> str:
        """Name of the training's present phase."""
        state = self.state
        if not self.attended:
            return "no trainer"
        if state.training:
            return "training"
        if state.collecting:
            return "collecting"
        return "watching"


@recorded("training_unit", "accepted drafts", tried="verified")
@dataclass(slots=True)
class _AcceptanceUnit:
    accepted: int = 0
    verified: int = 0
    drafts: int = 0

    def add(self, report: StepReport) -> None:
        """Counts the drafts of a step."""
        exact, censored = report.drafted_counts
        accepted = sum(k * count for part in (exact, censored) for k, count in enumerate(part))
        self.accepted += accepted
        # A sequence that accepted all of its drafts has no rejection.
        self.verified += accepted + sum(exact[:-1])
        self.drafts += sum(exact) + sum(censored)


@recorded(
    "selective_training",
    "state _unit",
    attended="is_trainer_connected",
    stored="stored_signals",
    served="served_version",
    learnt="has_online_updates",
    skip="_units_to_skip",
)
@dataclass(slots=True)
class SelectiveTraining:
    """Runs the algorithm for one engine.  drafter: name of the drafter that is trained.

    is_trainer_connected: a trainer is connected.  Without a trainer nothing is collected or
    requested; the deployed version keeps serving and is judged.  has_online_updates: online updates
    have changed the weights of the served version, and the engine has not stored them.
    """

    drafter: str
    settings: TrainingSettings
    state: TrainingState = field(default_factory=TrainingState)
    is_trainer_connected: bool = False
    stored_signals: int = 0
    served_version: int = 0
    has_online_updates: bool = False
    _unit: _AcceptanceUnit = field(default_factory=_AcceptanceUnit)
    _units_to_skip: int = 0

    @property
    def is_collecting(self) -> bool:
        """Whether the engine must collect training signals now."""
        return self.is_trainer_connected and self.state.collecting

    @property
    def view(self) -> TrainingView:
        """The present state, for display."""
        return TrainingView(
            self.state,
            self.is_trainer_connected,
            self.stored_signals,
            self.settings.threshold,
            self.served_version,
            self.has_online_updates,
        )

    def observe(self, report: StepReport) -> None:
        """Adds a step."""
        if report.draft_version != self.served_version:
            self.served_version = report.draft_version
            self._unit, self._units_to_skip = _AcceptanceUnit(), _SKIPPED_UNITS
        self.has_online_updates = report.learnt_from == report.draft_version
        if not self.has_online_updates and report.learnt_from == self.state.version:
            self._adopt_version(report.draft_version)
        if report.drafter != self.drafter or not report.gamma:
            return
        self._unit.add(report)
        if self._unit.drafts >= self.settings.unit_drafts:
            unit, self._unit = self._unit, _AcceptanceUnit()
            self.observe_rate(unit.accepted / unit.verified)

    def observe_rate(self, alpha: float) -> None:
        """Adds one acceptance rate: updates the averages, collecting and the trial."""
        state, settings = self.state, self.settings
        count = state.measured + 1
        if count <= settings.initial:
            mean = state.short + (alpha - state.short) / count
            self.state = replace(state, measured=count, short=mean, long=mean)
            return
        short_average = settings.short_decay * state.short + (1 - settings.short_decay) * alpha
        long_average = settings.long_decay * state.long + (1 - settings.long_decay) * alpha
        collecting = state.collecting or short_average < long_average - settings.margin
        self.state = replace(
            state, measured=count, short=short_average, long=long_average, collecting=collecting
        )
        if (
            state.trial is not None
            and self.served_version == state.version
            and not self.has_online_updates
        ):
            self._judge_trial(state.trial, alpha)

    def record_stored_signals(self, stored_signals: int) -> int:
        """Records the number of stored signals; returns the round to train now, 0 for none.

        A running round is returned again, because its trainer may have restarted.  If the serving
        weights are not a version, collecting begins, so that the engine stores them as one.
        """
        self.stored_signals = stored_signals
        state = self.state
        if state.training:
            return state.round
        if stored_signals < self.settings.threshold:
            return 0
        if self.has_online_updates:
            self.state = replace(state, collecting=True)
            return 0
        self.state = replace(state, round=state.round + 1, training=True)
        return self.state.round

    def finish_round(self, result: TrainingResult) -> None:
        """Ends a round.  Raises InvalidTrainingError for one that is not running."""
        state = self.state
        if not state.training or result.round != state.round:
            raise InvalidTrainingError(
                f"round {result.round} is not running"
                + (f": {state.round} is" if state.training else ""),
                field_path="round",
            )
        self.stored_signals = 0
        if result.is_better:
            self._deploy(result)
            return
        if result.error:
            outcome, collecting = "failed", False
        elif result.alpha_eval == result.alpha_train:
            outcome, collecting = "kept", state.collecting
        else:
            outcome, collecting = "rejected", False
        self.state = replace(
            state, training=False, collecting=collecting,
            history=_append_record(state, RoundRecord(result, outcome)),
        )  # fmt: skip

    def _deploy(self, result: TrainingResult) -> None:
        state, trial = self.state, self.state.trial
        # A version that is still on trial is no rollback version.
        self.state = replace(
            state,
            training=False,
            version=result.version,
            parent=state.version if trial is None else state.parent,
            trial=Trial(before=state.short if trial is None else trial.before),
            history=_append_record(state, RoundRecord(result, "deployed")),
        )

    def _adopt_version(self, version: int) -> None:
        """Replaces the version by the engine's stored version that was learnt from it.

        A trial continues, with the same rollback version.
        """
        state = self.state
        if 0 < version <= MAX_VERSION:
            parent = state.version if state.trial is None else state.parent
            self.state = replace(state, version=version, parent=parent)

    def _judge_trial(self, trial: Trial, alpha: float) -> None:
        if self._units_to_skip:
            self._units_to_skip -= 1
            return
        units, total = trial.units + 1, trial.total + alpha
        fall = trial.before - total / units
        is_early_failure = units >= _EARLY_VERDICT_UNITS and fall > 2 * self.settings.margin
        if is_early_failure or (units >= _VERDICT_UNITS and fall > self.settings.margin):
            self._roll_back()
        elif units >= _VERDICT_UNITS:
            self.state = replace(self.state, trial=None)
        else:
            self.state = replace(self.state, trial=replace(trial, units=units, total=total))

    def _roll_back(self) -> None:
        state = self.state
        history = tuple(
            replace(record, outcome="rolled-back")
            if record.outcome == "deployed" and record.result.version == state.version
            else record
            for record in state.history
        )
        self.state = replace(
            state, version=state.parent, trial=None, collecting=False, history=history
        )


def _append_record(state: TrainingState, record: RoundRecord) -> tuple[RoundRecord, ...]:
    return (*state.history, record)[-_REMEMBERED_ROUNDS:]


def to_json(state: TrainingState) -> str:
    """Returns the state as text for a file."""
    return json.dumps(asdict(state))


def from_json(text: str) -> TrainingState:
    """Reads what `to_json` wrote.  Raises InvalidTrainingError for anything else."""
    try:
        body = json.loads(text)
        trial = body.pop("trial")
        history = tuple(
            RoundRecord(TrainingResult(**item["result"]), str(item["outcome"]))
            for item in body.pop("history")
        )
        state = TrainingState(
            **body, trial=None if trial is None else Trial(**trial), history=history
        )
        _check_state(state)
    except MALFORMED_JSON_ERRORS as error:
        raise InvalidTrainingError(
            f"the text does not contain a state of training: {error}"
        ) from error
    return state


def _check_state(state: TrainingState) -> None:
    counts = (state.measured, state.round, state.version, state.parent)
    if not all(type(count) is int and 0 <= count <= MAX_VERSION for count in counts):
        raise ValueError(f"counts {counts} must be integers in [0, {MAX_VERSION}]")
    if not all(type(flag) is bool for flag in (state.collecting, state.training)):
        raise ValueError("collecting and training must be true or false")
    trial = state.trial or Trial(0.0)
    if not all(map(math.isfinite, (state.short, state.long, *astuple(trial)))):
        raise ValueError("acceptance rates must be finite")

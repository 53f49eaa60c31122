"""The values that the decision core takes and gives.  All frozen; docstrings carry units.

Words as in the field: gamma is the draft length, B the decode batch, accepted counts exclude the
bonus token.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from controller.core.capabilities import LostCapability, able, require_known
from controller.core.errors import (
    InvalidEngineError,
    InvalidReportError,
    UnknownArmError,
)
from controller.core.model_shapes import DrafterKind, DrafterShape, ModelShape

MAX_GAMMA = 64
MAX_BATCH_SIZE = 65_536
MAX_STEP_SECONDS = 3600.0
MIN_STEP_SECONDS = 1e-6  # nothing decodes in less, and less would overflow what divides by it
MAX_DRAFTERS = 8
MAX_ARMS = 130  # drafters times draft lengths: two with every one of 0..64
MAX_REPORT_CLASSES = 64
MAX_PLAN_ROWS = 512  # what an engine's link takes
MAX_LABEL_CHARACTERS = 64


class Reason(Enum):
    """Names why a plan or a row is what it is; `explain` gives the numbers."""

    EXPLOIT = "exploit"
    PROBE = "probe"
    HOLD = "hold"
    PROFILE_MISSING = "profile-missing"
    PROFILING = "profiling"
    LEASE = "lease"
    OVERRIDE = "override"


class RegimeMode(Enum):
    """Names the online-update regimes of the drafter."""

    OFF = "off"
    ONLINE = "online"
    COLLECT = "collect"


@dataclass(frozen=True, slots=True)
class Regime:
    """Pairs a mode with its stride: rounds between gradient steps, 0 unless ONLINE."""

    mode: RegimeMode = RegimeMode.OFF
    stride: int = 0

    def __str__(self) -> str:
        return f"{self.mode.value}:{self.stride}" if self.stride else self.mode.value


@dataclass(frozen=True, slots=True)
class Arm:
    """Is one possible choice: a drafter and a draft length.  gamma = 0 is plain decoding."""

    drafter: str
    gamma: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies the engine that a cost profile belongs to, as proto `Fingerprint` does."""

    target_model: str
    target_revision: str = ""
    engine: str = ""
    engine_version: str = ""
    device: str = ""
    dtype: str = ""
    quantization: str = ""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    attention_backend: str = ""
    graph_batch_sizes: tuple[int, ...] = ()
    shim_version: str = ""


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Describes a drafter and the draft lengths, ascending, that the engine has prepared for it.

    shape: its sizes, when known.  batch_limits: (gamma, largest batch) of draft lengths that are
    prepared for small batches only.
    """

    name: str
    kind: DrafterKind
    gammas: tuple[int, ...]
    model: str = ""
    revision: str = ""
    shape: DrafterShape | None = None
    batch_limits: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not (1 <= len(self.name) <= 64 and self.name.isprintable()):
            raise InvalidEngineError(
                f"drafter name {self.name[:64]!r}: 1 to 64 printable characters are needed"
            )
        if not self.gammas:
            raise InvalidEngineError(f"drafter {self.name!r}: no draft length is listed")
        if list(self.gammas) != sorted(set(self.gammas)):
            raise InvalidEngineError(
                f"drafter {self.name!r}: draft lengths {list(self.gammas)} "
                "are not ascending and unique"
            )
        if self.gammas[0] < 0 or self.gammas[-1] > MAX_GAMMA:
            raise InvalidEngineError(
                f"drafter {self.name!r}: draft lengths {list(self.gammas)} are not all in "
                f"0..{MAX_GAMMA}"
            )
        limited = [gamma for gamma, _ in self.batch_limits]
        if len(set(limited)) < len(limited) or not set(limited) <= set(self.gammas):
            raise InvalidEngineError(
                f"drafter {self.name!r}: batches are limited for draft lengths {limited[:16]}; "
                f"each must be one of {list(self.gammas)} and appear once"
            )

    def largest_batch(self, gamma: int) -> int:
        """Returns the largest batch that this draft length is prepared for."""
        return dict(self.batch_limits).get(gamma, MAX_BATCH_SIZE)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Lists what the engine side is able to do, as proto `Capabilities` does."""

    can_sleep: bool = False
    can_switch_drafter: bool = False
    can_update_online: bool = False
    can_collect: bool = False
    can_take_versions: bool = False
    overlap_steps: int = 0
    drafters_follow: bool = False
    catch_up_steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Describes an engine as it introduces itself.  Raises InvalidEngineError for contradictions.

    shape: the target model's sizes, when known, for the prior.  safe_gamma: the draft length of its
    first drafter that it runs without a plan, None if unknown.  lost: what it can no longer do;
    `drafters` and `capabilities` stay as introduced.
    """

    engine_id: str
    fingerprint: Fingerprint
    drafters: tuple[DrafterSpec, ...]
    max_batch_size: int
    capabilities: Capabilities = field(default_factory=Capabilities)
    shape: ModelShape | None = None
    safe_gamma: int | None = None
    lost: tuple[LostCapability, ...] = ()

    def __post_init__(self) -> None:
        allowed = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-")
        if not 1 <= len(self.engine_id) <= 128 or not set(self.engine_id) <= allowed:
            raise InvalidEngineError(
                f"engine_id {self.engine_id[:140]!r}: 1 to 128 of A-Z a-z 0-9 . _ : - are needed"
            )
        if not self.drafters:
            raise InvalidEngineError("no drafter is listed: at least one is needed")
        names = [d.name for d in self.drafters]
        if len(set(names)) != len(names):
            raise InvalidEngineError(f"drafter names {names} are not unique")
        if len(names) > MAX_DRAFTERS:
            raise InvalidEngineError(f"{len(names)} drafters are listed, {MAX_DRAFTERS} at most")
        if (arms := len(self.arms)) > MAX_ARMS:
            raise InvalidEngineError(f"{arms} draft lengths are listed, {MAX_ARMS} at most")
        graphs = self.fingerprint.graph_batch_sizes
        if list(graphs) != sorted(set(graphs)) or (graphs and graphs[0] < 1):
            raise InvalidEngineError(
                f"graph_batch_sizes {list(graphs)[:16]} are not ascending, unique and above 0"
            )
        if not 1 <= self.max_batch_size <= MAX_BATCH_SIZE:
            raise InvalidEngineError(
                f"max_batch_size {self.max_batch_size} is outside 1..{MAX_BATCH_SIZE}"
            )
        if not any(self.is_prepared(arm, self.max_batch_size) for arm in self.arms):
            raise InvalidEngineError(
                f"every draft length is limited to batches below {self.max_batch_size}: "
                "nothing could run in the largest one"
            )
        if self.safe_gamma not in {None, *self.drafters[0].gammas}:
            raise InvalidEngineError(f"{names[0]!r} has not prepared safe_gamma {self.safe_gamma}")
        require_known(self.lost, self)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All drafters and draft lengths that the engine introduced, gamma = 0 included."""
        return tuple(Arm(d.name, gamma) for d in self.drafters for gamma in d.gammas)

    def can_run(self, arm: Arm, batch_size: int) -> bool:
        """Returns whether the arm is prepared for a batch of this size, and not lost."""
        return self.is_prepared(arm, batch_size) and self.loss_of(arm) is None

    def loss_of(self, arm: Arm) -> LostCapability | None:
        """Returns the loss that takes this arm away; None while the engine has it."""
        return next((loss for loss in self.lost if loss.covers(arm)), None)

    @property
    def able(self) -> Capabilities:
        """The capabilities that are left after all losses."""
        return able(self.capabilities, self.lost)

    def is_prepared(self, arm: Arm, batch_size: int) -> bool:
        """Returns whether the arm, one of `arms`, is prepared for a batch of this size."""
        return batch_size <= self.drafter(arm.drafter).largest_batch(arm.gamma)

    def drafter(self, name: str) -> DrafterSpec:
        """Returns the drafter of that name.  Raises UnknownArmError."""
        for drafter in self.drafters:
            if drafter.name == name:
                return drafter
        raise UnknownArmError(
            f"unknown drafter {name!r}: this engine introduced {[d.name for d in self.drafters]}"
        )

    def require(self, arm: Arm) -> None:
        """Raises UnknownArmError unless the engine introduced this drafter with this gamma."""
        gammas = self.drafter(arm.drafter).gammas
        if arm.gamma not in gammas:
            raise UnknownArmError(
                f"gamma {arm.gamma} is out of range for drafter {arm.drafter!r}: "
                f"this engine introduced {list(gammas)}"
            )


@dataclass(frozen=True, slots=True)
class StepFlags:
    """Describes the circumstances of a step, as proto `StepFlags` does."""

    after_gap: bool = False
    eager_fallback: bool = False
    first_use: bool = False
    unsteered: bool = False
    switched: bool = False
    updating: bool = False
    drafter_reset: bool = False

    @property
    def distorts_shape(self) -> bool:
        """Whether the step's seconds differ from those of any other step of its shape."""
        return self.after_gap or self.eager_fallback or self.first_use

    @property
    def distorts_cost(self) -> bool:
        """Whether the step's seconds differ from those of a plain step, run by itself."""
        return self.distorts_shape or self.updating


NO_FLAGS = StepFlags()


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Holds a request class's part of a step: gamma + 1 counts, as in `StepReport`."""

    label: str
    accepted_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Holds the telemetry of one decode step.  Raises InvalidReportError for values out of range.

    accepted_counts: gamma + 1 counts, entry k = sequences that accepted exactly k draft tokens;
    they sum to batch_size.  step_seconds: wall clock, end of previous step to end of this one.
    kv_tokens: sum of context lengths before the step.  classes: the same counts by request class,
    for engines that know one.  confidences: the drafter's own mean probability of each of the gamma
    drafted positions, or empty; they are checked and recorded, and no decision uses them yet.
    update_seconds: duration of the drafter's update that landed before this step, 0 without one.
    draft_version: of the drafter that served the step, 0 = as loaded.
    """

    step: int
    batch_size: int
    kv_tokens: int
    drafter: str
    gamma: int
    accepted_counts: tuple[int, ...]
    step_seconds: float
    flags: StepFlags = NO_FLAGS
    plan_epoch: int = 0
    probe_id: int = 0
    classes: tuple[ClassCounts, ...] = ()
    confidences: tuple[float, ...] = ()
    update_seconds: float = 0.0
    draft_version: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size > MAX_BATCH_SIZE:
            raise InvalidReportError(
                f"step {self.step}: batch_size {self.batch_size} is outside 1..{MAX_BATCH_SIZE}"
            )
        if not 0 <= self.gamma <= MAX_GAMMA:
            raise InvalidReportError(
                f"step {self.step}: gamma {self.gamma} is outside 0..{MAX_GAMMA}"
            )
        if len(self.accepted_counts) != self.gamma + 1:
            raise InvalidReportError(
                f"step {self.step}: accepted_counts has {len(self.accepted_counts)} entries, "
                f"gamma {self.gamma} needs {self.gamma + 1}"
            )
        if min(self.accepted_counts) < 0 or sum(self.accepted_counts) != self.batch_size:
            raise InvalidReportError(
                f"step {self.step}: accepted_counts {list(self.accepted_counts)} do not sum to "
                f"batch_size {self.batch_size}"
            )
        if not MIN_STEP_SECONDS <= self.step_seconds <= MAX_STEP_SECONDS:
            raise InvalidReportError(
                f"step {self.step}: step_seconds {self.step_seconds} is not a positive time "
                f"of {MIN_STEP_SECONDS:g} s to {MAX_STEP_SECONDS:.0f} s"
            )
        if self.kv_tokens < 0:
            raise InvalidReportError(f"step {self.step}: kv_tokens {self.kv_tokens} is negative")
        updated = self.update_seconds
        if updated and not MIN_STEP_SECONDS <= updated <= MAX_STEP_SECONDS:
            raise InvalidReportError(
                f"step {self.step}: update_seconds {updated} is neither 0 nor a time of "
                f"{MIN_STEP_SECONDS:g} s to {MAX_STEP_SECONDS:.0f} s"
            )
        if self.classes:
            self._check_classes()
        if self.confidences:
            self._check_confidences()

    def _check_classes(self) -> None:
        labels = [part.label for part in self.classes]
        if len(labels) > MAX_REPORT_CLASSES or len(set(labels)) != len(labels):
            raise InvalidReportError(
                f"step {self.step}: {len(labels)} classes, unique ones and at most "
                f"{MAX_REPORT_CLASSES} are needed"
            )
        left = list(self.accepted_counts)
        for part in self.classes:
            if not (1 <= len(part.label) <= MAX_LABEL_CHARACTERS and part.label.isprintable()):
                raise InvalidReportError(
                    f"step {self.step}: class {part.label[:80]!r}: 1 to {MAX_LABEL_CHARACTERS} "
                    "printable characters are needed"
                )
            counts = part.accepted_counts
            if len(counts) != len(left) or min(counts) < 0 or not any(counts):
                raise InvalidReportError(
                    f"step {self.step}: class {part.label!r}: accepted_counts {list(counts)[:80]} "
                    f"are not {len(left)} counts of at least one sequence"
                )
            left = [all_ - mine for all_, mine in zip(left, counts, strict=True)]
        if min(left) < 0:
            raise InvalidReportError(
                f"step {self.step}: its classes count more sequences than the step has"
            )

    def _check_confidences(self) -> None:
        good = all(math.isfinite(p) and 0 <= p <= 1 for p in self.confidences)
        if len(self.confidences) != self.gamma or not good:
            raise InvalidReportError(
                f"step {self.step}: confidences {list(self.confidences)[:80]} are not {self.gamma} "
                "probabilities"
            )

    @property
    def arm(self) -> Arm:
        """The drafter and the draft length that really ran."""
        return Arm(self.drafter, self.gamma)


@dataclass(frozen=True, slots=True)
class Probe:
    """Tries another arm for `steps` steps in its row's bucket.  `probe_id` is never reused."""

    probe_id: int
    arm: Arm
    steps: int


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Holds the choice for batch sizes up to `max_batch_size` (and above the previous row's).

    drafter_asleep: in its steps at gamma = 0 (its probe's included) the drafter does not run.
    """

    max_batch_size: int
    arm: Arm
    reason: Reason
    probe: Probe | None = None
    drafter_asleep: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Maps batch sizes to choices.  `rows` ascend; the last one also serves every larger batch.

    overrides: ids of those that count anywhere in it.  draft_version: of the drafter that is to
    serve, 0 = as loaded.
    """

    epoch: int
    rows: tuple[PlanRow, ...]
    regime: Regime
    lease_seconds: float
    reason: Reason
    reason_detail: str
    overrides: tuple[str, ...] = ()
    draft_version: int = 0

    def row_for(self, batch_size: int) -> PlanRow:
        """Returns the row that serves this batch size."""
        for row in self.rows:
            if batch_size <= row.max_batch_size:
                return row
        return self.rows[-1]

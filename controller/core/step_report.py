"""Defines what an engine reports about a decode step.

gamma is the draft length; accepted counts exclude the bonus token.
"""

import math
from dataclasses import dataclass

from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA, Arm
from controller.core.errors import InvalidReportError

MAX_STEP_SECONDS = 3600.0
MIN_STEP_SECONDS = 1e-6  # nothing decodes in less, and less would overflow what divides by it
MAX_REPORT_CLASSES = 64
MAX_LABEL_CHARACTERS = 64


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

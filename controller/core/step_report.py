"""Defines what an engine reports about a decode step.

gamma is the draft length; accepted counts exclude the bonus token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeVar, dataclass_transform

from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA, Arm
from controller.core.errors import InvalidReportError

MAX_STEP_SECONDS = 3600.0
MIN_STEP_SECONDS = 1e-6  # no engine decodes faster, and divisions by less could overflow
MAX_REPORT_CLASSES = 64
MAX_LABEL_CHARACTERS = 64
MAX_PREFILL_TOKENS = 1 << 24
# Upper bound on the tokens of all waiting prompts together.
MAX_WAITING_TOKENS = 1 << 40
MAX_GROUPS = 16
MAX_PROPOSALS = 64
_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True)
def _quick_dataclass(kind: type[_Class]) -> type[_Class]:
    """Makes a dataclass whose fields only the type checker protects from assignment.

    `frozen=True` would triple the time to build an object of twenty fields.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)


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
    mixed_choice: bool = False

    @property
    def has_distorted_duration(self) -> bool:
        """Whether the step took longer or shorter than other steps of its shape."""
        return self.after_gap or self.eager_fallback or self.first_use or self.mixed_choice

    @property
    def is_unusable_for_cost(self) -> bool:
        """Whether the duration differs from that of a plain step with nothing running beside it."""
        return self.has_distorted_duration or self.updating


NO_FLAGS = StepFlags()


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Holds one request class's share of a step: gamma + 1 counts, as in `StepReport`.

    censored_counts: empty, or gamma counts.  Entry k counts further sequences with at least k
    accepted drafts whose later positions are unknown because the answer ended there.
    """

    label: str
    accepted_counts: tuple[int, ...]
    censored_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Holds the rows of a step with the same drafter and draft length: gamma + 1 counts.

    drafter: "" for rows that opted out of drafting.  ended: the requests of these rows had ended
    before the result was read, and the engine discarded their tokens; gamma is 0 then.
    """

    drafter: str
    gamma: int
    accepted_counts: tuple[int, ...]
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ProposalCounts:
    """Counts how many tokens of a drafter's proposals the target would have accepted.

    It mirrors proto `ProposalCounts`.  match_length: of a lookup; 0 = no match, or not a lookup.
    accepted_counts: width + 1 counts, entry k = rows in which exactly k tokens would have been
    accepted.  censored_counts: empty, or width counts, entry k = rows in which at least k would.
    """

    drafter: str
    match_length: int
    accepted_counts: tuple[int, ...]
    censored_counts: tuple[int, ...] = ()

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return sum(self.accepted_counts) + sum(self.censored_counts)


@_quick_dataclass
class StepReport:
    """Holds the telemetry of one decode step.  Raises InvalidReportError for values out of range.

    accepted_counts: gamma + 1 counts, entry k = sequences that accepted exactly k draft tokens;
    they sum to batch_size.  step_seconds: wall clock, end of previous step to end of this one.
    kv_tokens: sum of context lengths before the step.  classes: the same counts by request class,
    for engines that report classes.  confidences: empty, or the drafter's mean probability at each
    of the gamma drafted positions; they are checked and recorded, but no decision uses them yet.
    update_seconds: duration of the drafter update that landed before this step, 0 without one.
    draft_version: version of the drafter that served the step, 0 = as loaded.  groups: rows with
    the same drafter and draft length; empty if all rows are alike.  accepted_counts is the sum of
    the groups, and no group is wider than gamma.  proposals: counts of all proposals, used or not;
    an entry for `drafter` replaces accepted_counts and groups as evidence about it.
    prefill_tokens: prompt tokens that the step processed beside its decoding.  learnt_from: the
    version from which online updates made the present weights, None if no update has changed them.
    It equals draft_version until the engine stores the weights as a version, which draft_version
    then names.  delivered_tokens: tokens that the step added to answers, without first tokens, or
    None if the engine does not report them.  waiting_prompt_tokens: prompt tokens of requests that
    wait for their first pass, or None if not reported.
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
    groups: tuple[RowGroup, ...] = ()
    proposals: tuple[ProposalCounts, ...] = ()
    prefill_tokens: int = 0
    learnt_from: int | None = None
    delivered_tokens: int | None = None
    waiting_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        batch_size, gamma, counts = self.batch_size, self.gamma, self.accepted_counts
        if not 1 <= batch_size <= MAX_BATCH_SIZE:
            raise self._error(
                "batch_size", f"batch_size {batch_size} must be in [1, {MAX_BATCH_SIZE}]"
            )
        if not 0 <= gamma <= MAX_GAMMA:
            raise self._error("gamma", f"gamma {gamma} must be in [0, {MAX_GAMMA}]")
        if len(counts) != gamma + 1:
            raise self._error(
                "accepted_counts",
                f"accepted_counts has {len(counts)} entries, gamma {gamma} needs {gamma + 1}",
            )
        if min(counts) < 0 or sum(counts) != batch_size:
            raise self._error(
                "accepted_counts",
                f"accepted_counts {list(counts)} do not sum to batch_size {batch_size}",
            )
        if not MIN_STEP_SECONDS <= self.step_seconds <= MAX_STEP_SECONDS:
            raise self._error(
                "step_seconds",
                f"step_seconds {self.step_seconds} is not a positive time "
                f"of {MIN_STEP_SECONDS:g} s to {MAX_STEP_SECONDS:.0f} s",
            )
        if self.kv_tokens < 0:
            raise self._error("kv_tokens", f"kv_tokens {self.kv_tokens} is negative")
        update_seconds = self.update_seconds
        if update_seconds and not MIN_STEP_SECONDS <= update_seconds <= MAX_STEP_SECONDS:
            raise self._error(
                "update_seconds",
                f"update_seconds {update_seconds} is neither 0 nor a time of "
                f"{MIN_STEP_SECONDS:g} s to {MAX_STEP_SECONDS:.0f} s",
            )
        if self.classes:
            self._check_classes()
        if self.confidences:
            self._check_confidences()
        if self.groups or self.proposals or self.prefill_tokens:
            self._check_rows()
        if self.delivered_tokens or self.waiting_prompt_tokens:
            self._check_answers()

    def _error(self, field_path: str, message: str) -> InvalidReportError:
        return InvalidReportError(f"step {self.step}: {message}", field_path=field_path)

    def _check_answers(self) -> None:
        delivered_tokens = self.delivered_tokens
        if delivered_tokens and delivered_tokens > self.batch_size * (self.gamma + 1):
            raise self._error(
                "delivered_tokens",
                f"delivered_tokens {delivered_tokens} are more than {self.batch_size} sequences "
                "get at "
                f"gamma {self.gamma}",
            )
        waiting_tokens = self.waiting_prompt_tokens
        if waiting_tokens and waiting_tokens > MAX_WAITING_TOKENS:
            raise self._error(
                "waiting_prompt_tokens",
                f"waiting_prompt_tokens {waiting_tokens}, at most {MAX_WAITING_TOKENS} are "
                "possible",
            )

    def _check_classes(self) -> None:
        labels = [part.label for part in self.classes]
        if len(labels) > MAX_REPORT_CLASSES or len(set(labels)) != len(labels):
            raise self._error(
                "classes",
                f"{len(labels)} classes, unique ones and at most {MAX_REPORT_CLASSES} are needed",
            )
        unassigned_counts, censored_total = list(self.accepted_counts), 0
        for part in self.classes:
            if not (1 <= len(part.label) <= MAX_LABEL_CHARACTERS and part.label.isprintable()):
                raise self._error(
                    "classes",
                    f"class {part.label[:80]!r}: 1 to {MAX_LABEL_CHARACTERS} printable characters "
                    "are needed",
                )
            counts, censored = part.accepted_counts, part.censored_counts
            has_valid_widths = len(counts) == len(unassigned_counts) and len(censored) in {
                0,
                self.gamma,
            }
            if not has_valid_widths or min(counts + censored) < 0 or not any(counts + censored):
                raise self._error(
                    "classes",
                    f"class {part.label!r}: accepted_counts {list(counts)[:80]} "
                    f"and censored_counts {list(censored)[:80]} are not {len(unassigned_counts)} "
                    "counts, and "
                    f"{self.gamma} or none, of at least one sequence",
                )
            unassigned_counts = [
                remaining_count - class_count
                for remaining_count, class_count in zip(unassigned_counts, counts, strict=True)
            ]
            censored_total += sum(censored)
        if min(unassigned_counts) < 0 or sum(unassigned_counts) < censored_total:
            raise self._error("classes", "its classes count more sequences than the step has")

    def _check_confidences(self) -> None:
        are_probabilities = all(math.isfinite(p) and 0 <= p <= 1 for p in self.confidences)
        if len(self.confidences) != self.gamma or not are_probabilities:
            raise self._error(
                "confidences",
                f"confidences {list(self.confidences)[:80]} are not {self.gamma} probabilities",
            )

    def _check_rows(self) -> None:
        if not 0 <= self.prefill_tokens <= MAX_PREFILL_TOKENS:
            raise self._error(
                "prefill_tokens",
                f"prefill_tokens {self.prefill_tokens} must be in [0, {MAX_PREFILL_TOKENS}]",
            )
        if self.groups:
            self._check_groups()
        if self.proposals:
            self._check_proposals()

    def _check_groups(self) -> None:
        if len(self.groups) > MAX_GROUPS:
            raise self._error("groups", f"{len(self.groups)} groups of rows, {MAX_GROUPS} at most")
        total = [0] * (self.gamma + 1)
        for group in self.groups:
            counts = group.accepted_counts
            has_valid_width = len(counts) == group.gamma + 1 and group.gamma <= self.gamma
            is_undrafted = group.ended or not group.drafter
            if not has_valid_width or min(counts) < 0 or (group.gamma and is_undrafted):
                raise self._error(
                    "groups",
                    f"a group of gamma {group.gamma} with counts "
                    f"{list(counts)[:80]} in a step of gamma {self.gamma}",
                )
            for k, count in enumerate(counts):
                total[k] += count
        if tuple(total) != tuple(self.accepted_counts):
            raise self._error(
                "groups",
                f"its groups accepted {total}, accepted_counts are {list(self.accepted_counts)}",
            )

    def _check_proposals(self) -> None:
        if len(self.proposals) > MAX_PROPOSALS:
            raise self._error(
                "proposals", f"{len(self.proposals)} entries of proposals, {MAX_PROPOSALS} at most"
            )
        keys = {(part.drafter, part.match_length) for part in self.proposals}
        if len(keys) < len(self.proposals):
            raise self._error(
                "proposals", "a drafter's proposals of one match length are counted twice"
            )
        rows: dict[str, int] = {}
        for part in self.proposals:
            exact, censored = part.accepted_counts, part.censored_counts
            has_valid_widths = 2 <= len(exact) <= MAX_GAMMA + 1 and len(censored) in {
                0,
                len(exact) - 1,
            }
            if not has_valid_widths or min(exact) < 0 or min(censored, default=0) < 0:
                raise self._error(
                    "proposals",
                    f"proposals of {part.drafter[:64]!r}: counts "
                    f"{list(exact)[:80]} and censored {list(censored)[:80]} are not of one width",
                )
            rows[part.drafter] = rows.get(part.drafter, 0) + part.row_count
            if rows[part.drafter] > self.batch_size:
                raise self._error(
                    "proposals",
                    f"{rows[part.drafter]} proposals of {part.drafter[:64]!r} in "
                    f"a batch of {self.batch_size}",
                )

    @property
    def undrafted_share(self) -> float:
        """Returns the share of the rows that opted out of drafting."""
        rows = sum([group.accepted_counts[0] for group in self.groups if not group.drafter])
        return rows / self.batch_size

    @property
    def drafted_counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Returns accepted and censored counts of the rows that had drafts.

        If the report has proposals of the running drafter, the counts are theirs.  Otherwise a
        group narrower than `gamma` is censored beyond its own width.
        """
        if self.gamma == 0 or not (self.groups or self.proposals):
            return self.accepted_counts, ()
        if any(part.drafter == self.drafter for part in self.proposals):
            own_accepted, own_censored = self.proposal_counts_by_drafter[self.drafter]
            return own_accepted, own_censored if any(own_censored) else ()
        if not self.groups:
            return self.accepted_counts, ()
        accepted, censored = [0] * (self.gamma + 1), [0] * self.gamma
        for group in self.groups:
            if group.gamma == self.gamma:
                _add_counts(accepted, group.accepted_counts, 0)
            elif group.gamma:
                _add_counts(accepted, group.accepted_counts[:-1], 0)
                censored[group.gamma] += group.accepted_counts[-1]
        return accepted, censored if any(censored) else ()

    @property
    def ended_rows(self) -> int:
        """Number of rows whose requests had ended before the result was read."""
        return sum([group.accepted_counts[0] for group in self.groups if group.ended])

    @property
    def decoded_rows(self) -> int:
        """Number of rows that gained a token, i.e. whose requests had not ended."""
        return self.batch_size - self.ended_rows if self.groups else self.batch_size

    @property
    def accepted_tokens(self) -> int:
        """Accepted draft tokens of all rows."""
        return sum(map(mul, self.accepted_counts, range(self.gamma + 1)))

    @property
    def generated_tokens(self) -> int:
        """Accepted draft tokens, plus one target token for each decoded row."""
        return self.decoded_rows + self.accepted_tokens

    @property
    def proposal_counts_by_drafter(self) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
        """Returns by drafter its accepted and censored counts, over all match lengths."""
        counts_by_drafter: dict[str, tuple[list[int], list[int]]] = {}
        for part in self.proposals:
            width = len(part.accepted_counts)
            accepted, censored = counts_by_drafter.setdefault(part.drafter, ([], []))
            _add_counts(accepted, part.accepted_counts, width)
            _add_counts(censored, part.censored_counts, width - 1)
        return dict(counts_by_drafter)

    @property
    def arm(self) -> Arm:
        """The drafter and the draft length that ran in the step."""
        return Arm(self.drafter, self.gamma)


def _add_counts(total: list[int], counts: Sequence[int], min_length: int) -> None:
    """Adds counts to a total, after extending the total to at least `min_length` entries."""
    total.extend([0] * (min_length - len(total)))
    for k, count in enumerate(counts):
        total[k] += count

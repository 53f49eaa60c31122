"""Adds up an engine's reports, for metrics and people."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.core.plan import Reason
from controller.core.step_report import NO_FLAGS, RowGroup, StepReport

# What a uint64 holds: counters that clients feed stop there.
COUNT_MAX = 2**64 - 1


@dataclass(slots=True)
class Received:
    """Counts what has arrived on a stream.  reports: used or refused; dropped: reported as lost."""

    reports: int = 0
    dropped: int = 0


@dataclass(slots=True)
class StepCounters:
    """Counts what an engine's session has seen since its start; no counter ever decreases.

    messages: those with reports. drafts: sequences, step by step, for which something was drafted;
    drafted_tokens: theirs. by_length: entry k = sequences that accepted exactly k draft tokens,
    drafted for or not, with those of ended. ended: sequences, step by step, whose requests had
    ended before. delivered: tokens added to answers, None if no report says it. unsteered, eager,
    switched, probing: steps. lease_losses: times that steered steps were followed by one that was
    not. resets: times that the drafter went back to earlier weights or was given others; swaps:
    that its version changed. alone: the last step was not steered (None before the first).
    """

    reports: int = 0
    messages: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    plans: Counter[Reason] = field(default_factory=Counter)
    step_seconds: float = 0.0
    drafts: int = 0
    drafted_tokens: int = 0
    by_length: list[int] = field(default_factory=lambda: [0])
    ended: int = 0
    delivered: int | None = None
    unsteered: int = 0
    lease_losses: int = 0
    alone: bool | None = None
    eager: int = 0
    switched: int = 0
    probing: int = 0
    drafter_changes: int = 0
    updates: int = 0
    resets: int = 0
    swaps: int = 0
    rounds: Counter[str] = field(default_factory=Counter)

    def count(self, report: StepReport, before: StepReport | None) -> None:
        """Adds one report that was used.  before: the one that was used last."""
        self.reports += 1
        self.step_seconds += report.step_seconds
        lengths, counts = self.by_length, report.accepted_counts
        if len(counts) > len(lengths):
            lengths += [0] * (len(counts) - len(lengths))
        for k, sequences in enumerate(counts):
            lengths[k] += sequences
        if report.groups:
            self._count_groups(report.groups)
        elif report.gamma:
            self.drafts += report.batch_size
            self.drafted_tokens += report.gamma * report.batch_size
        if report.delivered_tokens is not None:
            self.delivered = (self.delivered or 0) + report.delivered_tokens
        if report.probe_id:
            self.probing += 1
        self.updates += report.update_seconds > 0
        if before is not None:
            self.drafter_changes += report.drafter != before.drafter
            self.swaps += report.draft_version != before.draft_version
        alone = False
        if (flags := report.flags) is not NO_FLAGS:
            alone = flags.unsteered
            self.unsteered += alone
            self.eager += flags.eager_fallback
            self.switched += flags.switched
            self.resets += flags.drafter_reset
        if alone is not self.alone:
            self.lease_losses += alone and self.alone is not None
            self.alone = alone

    def _count_groups(self, groups: Sequence[RowGroup]) -> None:
        for group in groups:
            rows = sum(group.accepted_counts)
            if group.gamma:
                self.drafts += rows
                self.drafted_tokens += group.gamma * rows
            elif group.ended:
                self.ended += rows

    @property
    def sequence_steps(self) -> int:
        """Sequences that decoded, step by step: each of them gained one token at least."""
        return sum(self.by_length) - self.ended

    @property
    def drafts_by_length(self) -> list[int]:
        """Drafts of which exactly k tokens were accepted, from k = 0."""
        undrafted = sum(self.by_length) - self.drafts
        return [self.by_length[0] - undrafted, *self.by_length[1:]]

    @property
    def accepted_by_position(self) -> list[int]:
        """Draft tokens accepted, by position, from the first."""
        accepted, total = [], 0
        for sequences in reversed(self.by_length[1:]):
            total += sequences
            accepted.append(total)
        return accepted[::-1]

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens accepted."""
        return sum(k * sequences for k, sequences in enumerate(self.by_length))

    @property
    def generated_tokens(self) -> int:
        """Accepted draft tokens, and one bonus token per sequence and step."""
        return self.accepted_tokens + self.sequence_steps

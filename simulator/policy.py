"""The interface of a policy: it chooses before each step and observes the result afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from controller.core.plan import MixtureRule
from controller.core.step_report import ProposalCounts, RowGroup, StepFlags


@dataclass(slots=True)
class ArmChoice:
    """Describes what the next step runs: an arm, by its index in `CostSurface.arms`.

    probe_id: returned in the step's record.  asleep: at gamma = 0, no drafter stays awake.
    rules: of the engine's mixtures.  Without rules a mixture uses its main drafter in every row,
    and the step's record has no counts of unused drafters.
    """

    arm: int
    probe_id: int = 0
    asleep: bool = True
    rules: Sequence[MixtureRule] = ()


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """The rows of a step by drafter, and the acceptance that other proposals would have had.

    groups: empty if all rows are alike.
    """

    groups: tuple[RowGroup, ...]
    proposals: tuple[ProposalCounts, ...]


@dataclass(frozen=True, slots=True)
class IdleCounts:
    """Evaluation of an idle drafter on the tokens that a step verified.

    reached, accepted: [positions] counts of sequences, for the draft positions 1, 2, ...; a
    position past a sequence's verified tokens is unknown, and counts as not reached.
    """

    drafter: str
    reached: list[int]
    accepted: list[int]


@dataclass(slots=True)
class StepRecord:
    """Telemetry of one decode step.

    arm: index of the arm that ran.  counts: gamma + 1 counts of accepted lengths.  classes: (label,
    counts) of the batch's request classes, empty if there is only one.  kv_tokens: before the step.
    idle_counts: the idle drafters, only for a policy with `FullInformation`.  row_evidence: for a
    choice with rules, None if nothing was drafted.
    """

    step: int
    batch_size: int
    kv_tokens: int
    arm: int
    counts: list[int]
    step_seconds: float
    flags: StepFlags
    probe_id: int
    classes: Sequence[tuple[str, list[int]]] = ()
    idle_counts: Sequence[IdleCounts] = ()
    row_evidence: RowEvidence | None = None


class Policy(Protocol):
    """Chooses arms from an engine's telemetry; only an oracle knows the true values."""

    def choose(self, batch_size: int, now: float, /) -> ArmChoice:
        """Chooses before a step: the batch that will run, and the virtual time in seconds."""

    def observe(self, record: StepRecord, now: float, /) -> None:
        """Receives the record of a step, after the engine's lag."""


class NonLearningPolicy:
    """Base class of a policy that ignores reports: the engine makes none for it."""

    def observe(self, record: StepRecord, now: float, /) -> None:
        """Ignores the record."""


@dataclass(slots=True)
class Situation:
    """The true state before a step, which no real engine knows.

    segment: of the workload.  kv_tokens: of the batch that will run.  running: [kinds] sequences of
    each true kind, numbered as in `workload.distinct_pools`.  catch_up_seconds: [drafters] cost of
    catching up if this step used the drafter.  accepted_share: accepted share of the drafts that
    would usually be accepted (below 1 after a sleep that left holes in a drafter's KV cache).
    """

    segment: int
    kv_tokens: int
    running: tuple[int, ...]
    catch_up_seconds: list[float]
    accepted_share: float = 1.0


@runtime_checkable
class Clairvoyant(Protocol):
    """A policy that receives the true situation before it chooses."""

    def set_situation(self, situation: Situation) -> None:
        """Receives the situation of the next step."""


@runtime_checkable
class FullInformation(Protocol):
    """A policy that has every drafter evaluated on the tokens that each step verifies.

    The engine keeps all drafters in step for it and fills `StepRecord.idle_counts`.  Every step
    pays the cost: each idle drafter reads the step's tokens at its catch-up cost, and no drafter
    sleeps.
    """

    @property
    def idle_positions(self) -> int:
        """Returns the number of draft positions to evaluate, at least 1."""

"""Defines a policy: the simulated engine asks it before a step and informs it afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from controller.core.plan import MixtureRule
from controller.core.step_report import ProposalCounts, RowGroup, StepFlags


@dataclass(slots=True)
class ArmChoice:
    """Names what the next step runs: an arm by its index in `CostSurface.arms`.

    probe_id: passed back in the step's record.  asleep: at gamma = 0, no drafter is kept in step.
    rules: of the engine's mixtures.  Without them a mixture uses its main drafter in every row, and
    the step's record does not say what drafters that were not used would have given.
    """

    arm: int
    probe_id: int = 0
    asleep: bool = True
    rules: Sequence[MixtureRule] = ()


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """Says what was verified in the rows of a step, and what other proposals would have given.

    groups: none where all rows are alike.
    """

    groups: tuple[RowGroup, ...]
    proposals: tuple[ProposalCounts, ...]


@dataclass(frozen=True, slots=True)
class IdleCounts:
    """Says how a drafter that did not draft would have done on the tokens that a step verified.

    reached, accepted: [positions] of sequences, for the draft positions 1, 2, ...; a position that
    lies past a sequence's verified tokens is not known, and counts as not reached.
    """

    drafter: str
    reached: list[int]
    accepted: list[int]


@dataclass(slots=True)
class StepRecord:
    """One decode step as an engine's telemetry has it.

    arm: index of what ran.  counts: gamma + 1 counts of accepted lengths.  classes: (label, counts)
    of the batch's request classes, empty when there is only one.  kv_tokens: before the step.
    idle: the drafters that did not draft, for a policy with `FullInformation` only.  rows: for a
    choice with rules, None where nothing was drafted.
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
    idle: Sequence[IdleCounts] = ()
    rows: RowEvidence | None = None


class Policy(Protocol):
    """Chooses arms from what an engine can see, never from the truth (unless it is an oracle)."""

    def choose(self, batch_size: int, now: float, /) -> ArmChoice:
        """Chooses before a step: the batch that will run, and the virtual time in seconds."""

    def observe(self, record: StepRecord, now: float, /) -> None:
        """After a step, as late as the engine's lag says."""


@dataclass(slots=True)
class Situation:
    """Holds what is true before a step and no engine could tell its policy.

    segment: of the workload.  kv_tokens: of the batch that will run.  running: [kinds] sequences of
    each true kind, numbered as `workload.distinct_pools` says.  catch_up_seconds: [drafters] what
    each would pay for what it missed if this step drafted with it.  accepted_share: of the drafts
    that would be accepted usually, those that are accepted in this step (less than 1 after a sleep
    that left holes in a drafter's KV cache).
    """

    segment: int
    kv_tokens: int
    running: NDArray[np.int64]
    catch_up_seconds: list[float]
    accepted_share: float = 1.0


@runtime_checkable
class Clairvoyant(Protocol):
    """A policy with hindsight: it is shown the true situation before it chooses."""

    def enter(self, situation: Situation) -> None:
        """The next step runs in this situation."""


@runtime_checkable
class FullInformation(Protocol):
    """A policy that has every drafter evaluated on the tokens that each step verifies.

    The engine keeps all drafters in step for it and fills `StepRecord.idle`.  Every step pays for
    that: each idle drafter reads the step's tokens at its catch-up price, and no drafter sleeps.
    """

    @property
    def idle_positions(self) -> int:
        """Draft positions to evaluate, at least 1."""

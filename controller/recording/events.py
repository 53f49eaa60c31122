"""Defines the events of a session's core as values: inputs in their order.

The plans that came out.

All frozen.  The core's clock stands still while it works on one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from controller.core.acceptance.warm_start import Belief
from controller.core.cost.profile import Profile
from controller.core.engine.checkpoint import Tree
from controller.core.engine_spec import Arm, EngineSpec, LostCapability
from controller.core.plan import Plan
from controller.core.planning.overrides import Override
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.core.training.selective_training import TrainingSettings, TrainingState
from speculation.v1 import plan_pb2


@dataclass(frozen=True, slots=True)
class Term:
    """Pairs an override with its end: Unix seconds, None without an end or if unknown."""

    override: Override
    ends_at: float | None


@dataclass(frozen=True, slots=True)
class Opening:
    """Everything that a core is made of at one moment.

    wall_seconds: Unix time then.  session: tells sessions apart; part: which of its openings this
    is, from 1.  lost: records that were lost before it.  cost_source: "profile", or the prior's
    name.
    """

    spec: EngineSpec
    planner: PlannerSettings
    training: TrainingSettings
    profile: Profile | None
    terms: tuple[Term, ...]
    state: Mapping[str, Tree]
    wall_seconds: float
    session: int
    part: int
    lost: int
    versions: Mapping[str, str]
    cost_source: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A report that was folded."""

    report: StepReport


@dataclass(frozen=True, slots=True)
class Decided:
    """The plan was considered again; None: the old one stays."""

    plan: plan_pb2.Plan | None


@dataclass(frozen=True, slots=True)
class Issued:
    """A plan as the core made it; the recorder's thread converts it into a `Decided`."""

    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Forced:
    """A measurement has chosen an arm; None: it has ended."""

    arm: Arm | None
    plan: plan_pb2.Plan


@dataclass(frozen=True, slots=True)
class Configured:
    """The constants are these from now on."""

    planner: PlannerSettings
    training: TrainingSettings


@dataclass(frozen=True, slots=True)
class Parted:
    """The sidecar stops: the last plan, to be held for so long."""

    lease_seconds: float
    plan: plan_pb2.Plan


@dataclass(frozen=True, slots=True)
class Overridden:
    """All overrides that are for this engine from now on."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine can no longer do these."""

    losses: tuple[LostCapability, ...]


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile was put into use."""

    profile: Profile


@dataclass(frozen=True, slots=True)
class Warmed:
    """Estimates were brought from elsewhere."""

    beliefs: tuple[Belief, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Trained:
    """The training beside the engine stands like this now."""

    state: TrainingState
    attended: bool
    stored: int


class NoteKind(Enum):
    """Names what a note is about."""

    DROPPED = "dropped"
    REJECTED = "rejected"
    STREAM_OPENED = "stream opened"
    STREAM_CLOSED = "stream closed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Noted:
    """Informs people only; the core does not see it.

    count: of reports that were lost on their way.
    """

    kind: NoteKind
    count: int = 0
    text: str = ""


Event: TypeAlias = (
    Opening
    | Reported
    | Decided
    | Issued
    | Forced
    | Configured
    | Parted
    | Overridden
    | Lost
    | Profiled
    | Warmed
    | Trained
    | Noted
)


@dataclass(frozen=True, slots=True)
class Moment:
    """An event and the core's clock at it."""

    seconds: float
    event: Event

"""Describes an engine as it introduces itself, and the capabilities that it has lost since.

A drafter that ran out of memory, for example, cannot draft until the engine restarts.  The engine
reports each lost capability with its reason; the planner then neither chooses nor probes it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from controller.core.errors import InvalidEngineError, InvalidLossError, UnknownArmError
from controller.core.model_shapes import DrafterKind, DrafterShape, ModelShape
from controller.core.recorded_state import recorded

MAX_GAMMA = 64
MAX_BATCH_SIZE = 65_536
MAX_DRAFTERS = 8
MAX_ARMS = 130  # drafters times draft lengths: two drafters, each with 0..64
MAX_REASON_CHARACTERS = 512


@recorded("arm")
@dataclass(frozen=True, slots=True)
class Arm:
    """One possible choice: a drafter and a draft length.  gamma = 0 is plain decoding."""

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
class Mixture:
    """Names the two drafters of a mixture, which uses one of them in each row of a step.

    free: a prompt lookup, whose proposals cost next to nothing.
    """

    main: str
    free: str


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Describes a drafter and the draft lengths, ascending, that the engine has prepared for it.

    shape: its sizes, if known.  batch_limits: (gamma, largest batch) of draft lengths that are
    prepared for small batches only.  mixture: the two drafters of a mixture; None for other kinds.
    """

    name: str
    kind: DrafterKind
    gammas: tuple[int, ...]
    model: str = ""
    revision: str = ""
    shape: DrafterShape | None = None
    batch_limits: tuple[tuple[int, int], ...] = ()
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        if (self.kind is DrafterKind.MIXTURE) != (self.mixture is not None):
            raise InvalidEngineError(
                f"drafter {self.name[:64]!r}: only a mixture, and every mixture, must name its two "
                "drafters",
                field_path="mixture",
            )
        if not (1 <= len(self.name) <= 64 and self.name.isprintable()):
            raise InvalidEngineError(
                f"drafter name {self.name[:64]!r}: 1 to 64 printable characters are needed",
                field_path="name",
            )
        if not self.gammas:
            raise InvalidEngineError(
                f"drafter {self.name!r}: no draft length is listed", field_path="gammas"
            )
        if list(self.gammas) != sorted(set(self.gammas)):
            raise InvalidEngineError(
                f"drafter {self.name!r}: draft lengths {list(self.gammas)} "
                "are not ascending and unique",
                field_path="gammas",
            )
        if self.gammas[0] < 0 or self.gammas[-1] > MAX_GAMMA:
            raise InvalidEngineError(
                f"drafter {self.name!r}: draft lengths {list(self.gammas)} are not all in "
                f"[0, {MAX_GAMMA}]",
                field_path="gammas",
            )
        limited_gammas = [gamma for gamma, _ in self.batch_limits]
        if len(set(limited_gammas)) < len(limited_gammas) or not set(limited_gammas) <= set(
            self.gammas
        ):
            raise InvalidEngineError(
                f"drafter {self.name!r}: batches are limited for draft lengths "
                f"{limited_gammas[:16]}; "
                f"each must be one of {list(self.gammas)} and appear once",
                field_path="batch_limits",
            )

    def largest_batch(self, gamma: int) -> int:
        """Returns the largest batch that this draft length is prepared for."""
        return dict(self.batch_limits).get(gamma, MAX_BATCH_SIZE)


def drafters_in_sync(drafters: Sequence[DrafterSpec]) -> dict[str, set[str]]:
    """Returns for each drafter the drafters that need no catch-up after a step in which it drafts.

    A mixture keeps both of its drafters in step.  So does its main drafter alone: a lookup reads
    the tokens themselves, and a mixture has missed only what its main drafter has missed.
    """
    in_sync = {d.name: {d.name} for d in drafters}
    mixtures = [(d.name, d.mixture) for d in drafters if d.mixture is not None]
    for name, mixture in mixtures:
        in_sync[mixture.main] |= {name, mixture.free}
    for name, mixture in mixtures:
        in_sync[name] = in_sync[mixture.main]
    return in_sync


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Lists what the engine side can do, as proto `Capabilities` does.

    learner: name of the drafter that can be trained, "" for the first one.
    """

    can_sleep: bool = False
    can_switch_drafter: bool = False
    can_update_online: bool = False
    can_collect: bool = False
    can_take_versions: bool = False
    overlap_steps: int = 0
    drafters_follow: bool = False
    catch_up_steps: int = 0
    draft_lag: int = 0
    learner: str = ""


class Capability(Enum):
    """Names the capabilities that can be lost; the values appear in texts."""

    DRAFTER = "drafter"
    SLEEP = "sleep"
    UPDATE_ONLINE = "online updates"
    COLLECT = "training signals"
    TAKE_VERSIONS = "drafter versions"
    REPORT = "step reports"


@dataclass(frozen=True, slots=True)
class LostCapability:
    """Describes one lost capability.  Raises InvalidLossError if it contradicts itself.

    drafter, gammas: for DRAFTER, the lost drafter and draft lengths; () = all above 0, since a step
    at gamma = 0 needs no drafter.  lost_at: Unix seconds by the engine's clock.
    """

    capability: Capability
    drafter: str = ""
    gammas: tuple[int, ...] = ()
    reason: str = ""
    lost_at: float = 0.0

    def __post_init__(self) -> None:
        if (self.capability is Capability.DRAFTER) != bool(self.drafter):
            raise InvalidLossError(
                f"{self.capability.value} lost: a drafter must be named if and only if a drafter "
                f"was lost, not {self.drafter[:64]!r}",
                field_path="drafter",
            )
        if self.gammas and not self.drafter:
            raise InvalidLossError(
                f"{self.capability.value} lost: only a drafter has draft lengths, not this",
                field_path="gammas",
            )
        if not (math.isfinite(self.lost_at) and self.lost_at >= 0):
            raise InvalidLossError(
                f"lost_at {self.lost_at} must be finite and not negative",
                field_path="lost_at_unix_seconds",
            )
        if len(self.reason) > MAX_REASON_CHARACTERS or not self.reason.isprintable():
            raise InvalidLossError(
                f"the reason of a loss must have at most {MAX_REASON_CHARACTERS} printable "
                "characters",
                field_path="reason",
            )

    def covers(self, arm: Arm) -> bool:
        """Returns whether this arm can no longer run because of the loss."""
        if arm.drafter != self.drafter:
            return False
        return arm.gamma in self.gammas if self.gammas else arm.gamma > 0

    @property
    def description(self) -> str:
        """Short description of the lost capability."""
        if not self.drafter:
            return self.capability.value
        lengths = f" at gamma {', '.join(map(str, self.gammas))}" if self.gammas else ""
        return f"drafter {self.drafter}{lengths}"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Describes an engine as it introduces itself.  Raises InvalidEngineError for contradictions.

    shape: the target model's sizes, if known, for the prior.  safe_gamma: the draft length of the
    first drafter that the engine runs without a plan, None if unknown.  lost: the lost
    capabilities; `drafters` and `capabilities` stay as introduced.
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
        allowed_characters = set(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"
        )
        if not 1 <= len(self.engine_id) <= 128 or not set(self.engine_id) <= allowed_characters:
            raise InvalidEngineError(
                f"engine_id {self.engine_id[:140]!r}: 1 to 128 of A-Z a-z 0-9 . _ : - are needed",
                field_path="engine_id",
            )
        if not self.drafters:
            raise InvalidEngineError(
                "no drafter is listed: at least one is needed", field_path="drafters"
            )
        names = [d.name for d in self.drafters]
        if len(set(names)) != len(names):
            raise InvalidEngineError(f"drafter names {names} are not unique", field_path="drafters")
        if len(names) > MAX_DRAFTERS:
            raise InvalidEngineError(
                f"{len(names)} drafters are listed, {MAX_DRAFTERS} at most", field_path="drafters"
            )
        if (arms := len(self.arms)) > MAX_ARMS:
            raise InvalidEngineError(
                f"{arms} draft lengths are listed, {MAX_ARMS} at most", field_path="drafters"
            )
        graph_sizes = self.fingerprint.graph_batch_sizes
        if list(graph_sizes) != sorted(set(graph_sizes)) or (graph_sizes and graph_sizes[0] < 1):
            raise InvalidEngineError(
                f"graph_batch_sizes {list(graph_sizes)[:16]} are not ascending, unique and above 0",
                field_path="fingerprint.graph_batch_sizes",
            )
        if not 1 <= self.max_batch_size <= MAX_BATCH_SIZE:
            raise InvalidEngineError(
                f"max_batch_size {self.max_batch_size} must be in [1, {MAX_BATCH_SIZE}]",
                field_path="max_batch_size",
            )
        self._check_lag_and_mixtures()
        self._check_learner()
        if not any(self.is_prepared(arm, self.max_batch_size) for arm in self.arms):
            raise InvalidEngineError(
                f"every draft length is limited to batches below {self.max_batch_size}: "
                "none could run in the largest batch",
                field_path="drafters",
            )
        if self.safe_gamma not in {None, *self.drafters[0].gammas}:
            raise InvalidEngineError(
                f"{names[0]!r} has not prepared safe_gamma {self.safe_gamma}",
                field_path="safe_gamma",
            )
        require_introduced(self.lost, self)

    @property
    def learner(self) -> DrafterSpec:
        """Returns the drafter that is trained, if the engine can train one."""
        name = self.capabilities.learner or self.drafters[0].name
        return next(drafter for drafter in self.drafters if drafter.name == name)

    def _check_learner(self) -> None:
        learner, weightless = self.capabilities.learner, {DrafterKind.NGRAM, DrafterKind.MIXTURE}
        trainable = [drafter.name for drafter in self.drafters if drafter.kind not in weightless]
        if learner and learner not in trainable:
            raise InvalidEngineError(
                f"learner {learner[:64]!r} is not one of the drafters with weights, {trainable}",
                field_path="capabilities.learner",
            )

    def _check_lag_and_mixtures(self) -> None:
        if self.capabilities.draft_lag not in {0, 1}:
            raise InvalidEngineError(
                f"draft_lag {self.capabilities.draft_lag} is neither 0 nor 1",
                field_path="capabilities.draft_lag",
            )
        for drafter in self.drafters:
            if drafter.mixture is not None:
                self._check_mixture(drafter, drafter.mixture)

    def _check_mixture(self, drafter: DrafterSpec, mixture: Mixture) -> None:
        single_drafters = {d.name: d for d in self.drafters if d.mixture is None}
        part_names = (mixture.main, mixture.free)
        if not set(part_names) <= single_drafters.keys() or len(set(part_names)) < 2:
            raise InvalidEngineError(
                f"mixture {drafter.name!r}: {list(part_names)} are not two of the drafters "
                f"{list(single_drafters)}",
                field_path="drafters",
            )
        if single_drafters[mixture.free].kind is not DrafterKind.NGRAM:
            raise InvalidEngineError(
                f"mixture {drafter.name!r}: its free drafter {mixture.free!r} is "
                f"{single_drafters[mixture.free].kind.value}, not {DrafterKind.NGRAM.value}",
                field_path="drafters",
            )
        missing_gammas = {g for g in drafter.gammas if g} - set(
            single_drafters[mixture.main].gammas
        )
        if missing_gammas:
            raise InvalidEngineError(
                f"mixture {drafter.name!r}: {mixture.main!r} has not prepared its draft lengths "
                f"{sorted(missing_gammas)}",
                field_path="drafters",
            )

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All drafters and draft lengths that the engine introduced, gamma = 0 included."""
        return tuple(Arm(d.name, gamma) for d in self.drafters for gamma in d.gammas)

    def can_run(self, arm: Arm, batch_size: int) -> bool:
        """Returns whether the arm is prepared for a batch of this size and not lost."""
        return self.is_prepared(arm, batch_size) and self.lost_capability_of(arm) is None

    def lost_capability_of(self, arm: Arm) -> LostCapability | None:
        """Returns the lost capability that disables this arm; None if the arm can run."""
        return next(
            (lost_capability for lost_capability in self.lost if lost_capability.covers(arm)), None
        )

    @property
    def remaining_capabilities(self) -> Capabilities:
        """The capabilities that remain after all losses."""
        return remaining_capabilities(self.capabilities, self.lost)

    def is_prepared(self, arm: Arm, batch_size: int) -> bool:
        """Returns whether the arm, one of `arms`, is prepared for a batch of this size."""
        return batch_size <= self.drafter(arm.drafter).largest_batch(arm.gamma)

    def drafter(self, name: str) -> DrafterSpec:
        """Returns the drafter of that name.  Raises UnknownArmError."""
        for drafter in self.drafters:
            if drafter.name == name:
                return drafter
        raise UnknownArmError(
            f"unknown drafter {name!r}: this engine introduced {[d.name for d in self.drafters]}",
            field_path="drafter",
        )

    def require_arm(self, arm: Arm) -> None:
        """Raises UnknownArmError unless the engine introduced this drafter with this gamma."""
        gammas = self.drafter(arm.drafter).gammas
        if arm.gamma not in gammas:
            raise UnknownArmError(
                f"gamma {arm.gamma} is out of range for drafter {arm.drafter!r}: "
                f"this engine introduced {list(gammas)}",
                field_path="gamma",
            )


def require_introduced(lost_capabilities: Iterable[LostCapability], spec: EngineSpec) -> None:
    """Raises InvalidLossError for a drafter or a draft length that was not introduced."""
    gammas_by_drafter = {drafter.name: drafter.gammas for drafter in spec.drafters}
    for lost_capability in lost_capabilities:
        if not lost_capability.drafter:
            continue
        if lost_capability.drafter not in gammas_by_drafter:
            raise InvalidLossError(
                f"drafter {lost_capability.drafter[:64]!r} is reported as lost: this engine "
                "introduced "
                f"{sorted(gammas_by_drafter)}",
                field_path="drafter",
            )
        if unknown_gammas := set(lost_capability.gammas) - set(
            gammas_by_drafter[lost_capability.drafter]
        ):
            raise InvalidLossError(
                f"draft lengths {sorted(unknown_gammas)[:16]} of drafter "
                f"{lost_capability.drafter!r} are reported as "
                f"lost: this engine introduced {list(gammas_by_drafter[lost_capability.drafter])}",
                field_path="gammas",
            )


def newly_lost(
    spec: EngineSpec, lost_capabilities: Iterable[LostCapability]
) -> tuple[LostCapability, ...]:
    """Returns, in order, the losses that `spec.lost` does not cover yet; all must be known.

    An engine repeats its losses; the first report of each counts, with its reason and its time.
    """
    lost_kinds = {lost_capability.capability for lost_capability in spec.lost}
    remaining_gammas = {drafter.name: set(drafter.gammas) for drafter in spec.drafters}
    for lost_capability in spec.lost:
        _remove_gammas(lost_capability, remaining_gammas)
    additional = []
    for lost_capability in lost_capabilities:
        removes_something = (
            _remove_gammas(lost_capability, remaining_gammas)
            if lost_capability.drafter
            else lost_capability.capability not in lost_kinds
        )
        if removes_something:
            lost_kinds.add(lost_capability.capability)
            additional.append(lost_capability)
    return tuple(additional)


def _remove_gammas(lost_capability: LostCapability, remaining_gammas: dict[str, set[int]]) -> bool:
    """Removes the draft lengths of a loss; returns False if all were removed before."""
    if not lost_capability.drafter:
        return False
    gammas = remaining_gammas[lost_capability.drafter]
    removed = gammas & set(lost_capability.gammas) if lost_capability.gammas else gammas - {0}
    gammas -= removed
    return bool(removed)


def lost_capability_of_all(spec: EngineSpec, arms: Iterable[Arm]) -> LostCapability | None:
    """Returns the first arm's loss if all arms are lost; None if one can run or none is given."""
    lost_capabilities = [spec.lost_capability_of(arm) for arm in arms]
    return lost_capabilities[0] if lost_capabilities and all(lost_capabilities) else None


def has_stopped_reporting(spec: EngineSpec) -> bool:
    """Returns whether the engine has stopped reporting steps, so that probes show nothing."""
    return any(lost_capability.capability is Capability.REPORT for lost_capability in spec.lost)


def remaining_capabilities(
    capabilities: Capabilities, lost_capabilities: Iterable[LostCapability]
) -> Capabilities:
    """Returns the capabilities that remain after the losses."""
    lost_kinds = {lost_capability.capability for lost_capability in lost_capabilities}
    if not lost_kinds:
        return capabilities
    return replace(
        capabilities,
        can_sleep=capabilities.can_sleep and Capability.SLEEP not in lost_kinds,
        can_update_online=capabilities.can_update_online
        and Capability.UPDATE_ONLINE not in lost_kinds,
        can_collect=capabilities.can_collect and Capability.COLLECT not in lost_kinds,
        can_take_versions=(
            capabilities.can_take_versions and Capability.TAKE_VERSIONS not in lost_kinds
        ),
    )

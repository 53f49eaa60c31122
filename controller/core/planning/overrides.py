"""Merges the overrides of operators into limits on the decision; the merge is pure.

An override applies if its scope covers the engine and its range covers the batch size.

Off and denials take precedence over every pin; otherwise the narrower scope wins, then the newer
override; file-based policy is weakest.  Compatible overrides all apply.  In detail:

1.  Off and denials (a drafter, online updates, exploration) are absolute, whatever their scope.
    They add up.
2.  Draft lengths: overrides are applied from the strongest to the weakest.  Each one narrows the
    remaining range; one whose own range does not intersect it is skipped.  A pin is a range of one
    draft length.
3.  Drafter and regime: the strongest pin.  A denied drafter does not run, pinned or not.
4.  If that leaves no arm that the engine can run, it decodes without speculation, and the plan and
    `explain` report it.
5.  Bounds on the time per output token all apply, whatever their strength: the smallest one counts,
    and the setting is one of them (`token_time`).

The result depends on the set of overrides alone, not on their order or number of copies.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA, Arm, EngineSpec
from controller.core.errors import SpeculationError
from controller.core.plan import Regime, RegimeMode
from controller.core.step_report import MAX_STEP_SECONDS, MIN_STEP_SECONDS

MAX_AUTHOR_CHARACTERS = 128
MAX_REASON_CHARACTERS = 512
MAX_SCOPE_CHARACTERS = 256
MAX_STRIDE = 1_000_000
_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class InvalidOverrideError(SpeculationError):
    """An override contradicts itself or is out of range; the message says how."""


class ScopeKind(Enum):
    """Names the kinds of scope, from narrow to wide."""

    ENGINE = "engine"
    MODEL = "model"
    FLEET = "fleet"


_SCOPE_WIDTH = {kind: width for width, kind in enumerate(ScopeKind)}


@dataclass(frozen=True, slots=True)
class Scope:
    """Selects engines by id (ENGINE), by the fingerprint's target model (MODEL), or all (FLEET)."""

    kind: ScopeKind
    name: str = ""

    def __post_init__(self) -> None:
        if (self.kind is ScopeKind.FLEET) != (not self.name):
            raise InvalidOverrideError(
                f"scope: the fleet has no name, so leave out {self.name[:80]!r}"
                if self.name
                else f"scope: name the {self.kind.value} that is meant",
                field_path="scope",
            )
        _require_text("scope", self.name, 0, MAX_SCOPE_CHARACTERS)

    def covers(self, spec: EngineSpec) -> bool:
        """Returns whether the scope includes the engine."""
        if self.kind is ScopeKind.FLEET:
            return True
        is_engine = self.kind is ScopeKind.ENGINE
        return self.name == (spec.engine_id if is_engine else spec.fingerprint.target_model)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}".rstrip()


@dataclass(frozen=True, slots=True)
class Rule:
    """States what an override demands; at least one part must be given.

    gamma: pinned draft length.  gamma_min, gamma_max: bounds.  off: no speculation.
    tpot_max_seconds: bound on the mean time between a sequence's output tokens.
    """

    off: bool = False
    gamma: int | None = None
    gamma_min: int | None = None
    gamma_max: int | None = None
    drafter: str | None = None
    regime: Regime | None = None
    deny_drafters: tuple[str, ...] = ()
    deny_updates: bool = False
    deny_exploration: bool = False
    tpot_max_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self._has_demand():
            raise InvalidOverrideError(
                "an override must demand something: nothing is pinned, bounded, forbidden or "
                "switched off"
            )
        for name in ("gamma", "gamma_min", "gamma_max"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_GAMMA:
                raise InvalidOverrideError(
                    f"{name} {value} must be in [0, {MAX_GAMMA}]", field_path=name
                )
        if self.gamma is not None and (self.gamma_min is not None or self.gamma_max is not None):
            raise InvalidOverrideError(
                "gamma is pinned, so gamma_min and gamma_max must be omitted", field_path="gamma"
            )
        low, high = self.gamma_min or 0, self.gamma_max
        if high is not None and low > high:
            raise InvalidOverrideError(
                f"gamma_min {low} is above gamma_max {high}", field_path="gamma_min"
            )
        if self.off and max(self.gamma or 0, low) > 0:
            raise InvalidOverrideError(
                "speculation cannot be off and drafting at the same time", field_path="off"
            )
        tpot_bound = self.tpot_max_seconds
        if tpot_bound is not None and not MIN_STEP_SECONDS <= tpot_bound <= MAX_STEP_SECONDS:
            raise InvalidOverrideError(
                f"tpot_max_seconds {tpot_bound:g}: a time per output token is at least "
                f"{MIN_STEP_SECONDS:g} s and at most {MAX_STEP_SECONDS:g} s",
                field_path="tpot_max_seconds",
            )
        self._check_drafters()
        self._check_regime()

    def _has_demand(self) -> bool:
        values = (
            self.gamma, self.gamma_min, self.gamma_max, self.drafter, self.regime,
            self.tpot_max_seconds,
        )  # fmt: skip
        denied = self.off or self.deny_drafters or self.deny_updates or self.deny_exploration
        return bool(denied) or any(value is not None for value in values)

    def _check_drafters(self) -> None:
        names = [*self.deny_drafters, *([] if self.drafter is None else [self.drafter])]
        for name in names:
            _require_text("drafter", name, 1, 64)
        if len(set(names)) < len(names):
            raise InvalidOverrideError(
                f"drafters {names}: a drafter is named twice, or pinned and denied",
                field_path="deny_drafters",
            )
        if len(names) > 16:
            raise InvalidOverrideError(
                f"{len(names)} drafters are named, 16 at most", field_path="deny_drafters"
            )

    def _check_regime(self) -> None:
        regime = self.regime
        if regime is None:
            return
        online = regime.mode is RegimeMode.ONLINE
        if online != (regime.stride > 0) or regime.stride > MAX_STRIDE:
            raise InvalidOverrideError(
                f"regime {regime.mode.value} with stride {regime.stride}: online updates need a "
                f"stride of 1 to {MAX_STRIDE}, other regimes have none",
                field_path="regime.stride",
            )
        if self.deny_updates and online:
            raise InvalidOverrideError(
                "online updates cannot be pinned and denied", field_path="deny_updates"
            )

    @property
    def gamma_range(self) -> tuple[int, int] | None:
        """The smallest and the largest draft length allowed; None if the rule sets neither."""
        if self.gamma is not None:
            return self.gamma, self.gamma
        if self.gamma_min is None and self.gamma_max is None:
            return None
        return self.gamma_min or 0, MAX_GAMMA if self.gamma_max is None else self.gamma_max

    @property
    def can_yield(self) -> bool:
        """Whether a stronger override can displace everything that the rule demands.

        Off, denials and bounds on the time per output token apply whatever their strength.
        """
        denied = self.off or self.deny_drafters or self.deny_updates or self.deny_exploration
        return not denied and self.tpot_max_seconds is None

    @property
    def can_limit_batches(self) -> bool:
        """Whether the rule can be limited to a range of batch sizes."""
        return self.regime is None and not self.deny_updates


@dataclass(frozen=True, slots=True)
class Override:
    """Describes one override.  Raises InvalidOverrideError.

    min_batch_size, max_batch_size: batch sizes that it applies to, inclusive; 0 = no bound.
    revision: of the store when it was written; the newer override has the larger one.  from_file:
    it is file-based policy, not an operator's override; later entries of the file have larger
    revisions.
    """

    override_id: str
    scope: Scope
    rule: Rule
    author: str
    reason: str
    min_batch_size: int = 0
    max_batch_size: int = 0
    revision: int = 0
    from_file: bool = False

    def __post_init__(self) -> None:
        if not _ID_PATTERN.fullmatch(self.override_id):
            raise InvalidOverrideError(
                f"override id {self.override_id[:140]!r}: 1 to 128 letters, digits, . _ : - are "
                "needed, a letter or digit first",
                field_path="override_id",
            )
        _require_text("author", self.author, 1, MAX_AUTHOR_CHARACTERS)
        _require_text("reason", self.reason, 1, MAX_REASON_CHARACTERS)
        low, high = self.min_batch_size, self.max_batch_size
        if not (0 <= low <= MAX_BATCH_SIZE and 0 <= high <= MAX_BATCH_SIZE):
            raise InvalidOverrideError(
                f"batch sizes {low}-{high} must be in [0, {MAX_BATCH_SIZE}]",
                field_path="max_batch_size",
            )
        if high and low > high:
            raise InvalidOverrideError(
                f"batch sizes {low}-{high}: the range is empty", field_path="max_batch_size"
            )
        if self.from_file and not self.rule.can_yield:
            raise InvalidOverrideError(
                "file-based policy is weakest: it can pin and bound, but a demand that no override "
                "can displace (off, denials, bounds on the time per output token) needs an "
                "override",
                field_path="rule",
            )
        if (low > 1 or high) and not self.rule.can_limit_batches:
            raise InvalidOverrideError(
                "the regime and online updates apply to the whole engine: omit the batch range",
                field_path="max_batch_size",
            )

    def covers(self, spec: EngineSpec, batch_size: int) -> bool:
        """Returns whether it applies to this batch size of this engine."""
        return self.scope.covers(spec) and self.covers_batch(batch_size)

    def covers_batch(self, batch_size: int) -> bool:
        """Returns whether it applies to this batch size of an engine in its scope."""
        return self.min_batch_size <= batch_size <= (self.max_batch_size or MAX_BATCH_SIZE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds the limits on the decision for one batch size of one engine.

    drafter: the pinned one.  overrides: ids of those that apply here, in order.  gamma_by,
    drafter_by: ids of the overrides that set the bounds of the draft length, and the drafter.
    tpot_max_seconds: the strictest of the overrides' bounds on the time per output token; tpot_by:
    the id of its override.
    """

    gamma_min: int = 0
    gamma_max: int = MAX_GAMMA
    off: bool = False
    drafter: str | None = None
    denied_drafters: frozenset[str] = field(default_factory=frozenset)
    can_explore: bool = True
    overrides: tuple[str, ...] = ()
    gamma_by: tuple[str, ...] = ()
    drafter_by: str = ""
    tpot_max_seconds: float | None = None
    tpot_by: str = ""

    def feasible_arms(self, arms: Sequence[Arm]) -> list[bool]:
        """Returns for each arm whether it may run.  If none may, gamma = 0 runs."""
        is_allowed = [
            arm.drafter not in self.denied_drafters and self.drafter in {None, arm.drafter}
            for arm in arms
        ]
        # At gamma = 0 no drafter runs.  If no allowed drafter has an arm at gamma = 0, another
        # drafter's arm at gamma = 0 is used.
        has_allowed_off = any(
            allowed and arm.gamma == 0 for allowed, arm in zip(is_allowed, arms, strict=True)
        )
        floor = 0 if self.off else self.gamma_min
        return [
            (floor == 0 and (allowed or not has_allowed_off))
            if arm.gamma == 0
            else (allowed and not self.off and floor <= arm.gamma <= self.gamma_max)
            for allowed, arm in zip(is_allowed, arms, strict=True)
        ]


NO_LIMITS = Limits()


def merge_limits(overrides: Iterable[Override], spec: EngineSpec, batch_size: int) -> Limits:
    """Merges all overrides into limits at this batch size, with the module's precedence."""
    return merge_sorted(sort_by_strength(o for o in overrides if o.scope.covers(spec)), batch_size)


def merge_sorted(overrides: Iterable[Override], batch_size: int) -> Limits:
    """Merges the overrides for one engine, given in the order of `sort_by_strength`."""
    active = [o for o in overrides if o.covers_batch(batch_size)]
    if not active:
        return NO_LIMITS
    low, high, drafter = 0, MAX_GAMMA, None
    low_by = high_by = drafter_by = tpot_by = ""
    tpot: float | None = None
    for override in active:
        rule, override_id = override.rule, override.override_id
        rule_min, rule_max = rule.gamma_range or (0, MAX_GAMMA)
        if max(rule_min, low) <= min(rule_max, high):
            if rule_min > low:
                low, low_by = rule_min, override_id
            if rule_max < high:
                high, high_by = rule_max, override_id
        if drafter is None and rule.drafter is not None:
            drafter, drafter_by = rule.drafter, override_id
        tpot_bound = rule.tpot_max_seconds
        if tpot_bound is not None and (tpot is None or tpot_bound < tpot):
            tpot, tpot_by = tpot_bound, override_id
    return Limits(
        low,
        high,
        any(o.rule.off for o in active),
        drafter,
        frozenset(drafter_name for o in active for drafter_name in o.rule.deny_drafters),
        not any(o.rule.deny_exploration for o in active),
        tuple(sorted(o.override_id for o in active)),
        tuple(sorted({low_by, high_by} - {""})),
        drafter_by,
        tpot,
        tpot_by,
    )


def merge_regime(
    overrides: Iterable[Override], spec: EngineSpec
) -> tuple[Regime | None, bool, tuple[str, ...]]:
    """Returns the pinned regime or None, whether online updates may run, and the deciding ids."""
    active = sort_by_strength(
        o
        for o in overrides
        if o.scope.covers(spec) and (o.rule.regime is not None or o.rule.deny_updates)
    )
    updates_allowed = not any(o.rule.deny_updates for o in active)
    pinned = next((o.rule.regime for o in active if o.rule.regime is not None), None)
    if not updates_allowed and pinned is not None and pinned.mode is RegimeMode.ONLINE:
        pinned = Regime()
    return pinned, updates_allowed, tuple(sorted(o.override_id for o in active))


def sort_by_strength(overrides: Iterable[Override]) -> list[Override]:
    """Returns each override once, the strongest first."""
    return sorted(set(overrides), key=_strength_key)


def _strength_key(override: Override) -> tuple[bool, int, int, str]:
    """Returns a sort key, smaller for stronger.  The id decides between equal revisions."""
    scope_width = _SCOPE_WIDTH[override.scope.kind]
    return override.from_file, scope_width, -override.revision, override.override_id


def batch_edges(overrides: Iterable[Override], spec: EngineSpec) -> tuple[int, ...]:
    """Returns the batch sizes after which other overrides apply: a plan's rows must end there."""
    edges: set[int] = set()
    for override in overrides:
        if override.scope.covers(spec):
            edges |= {override.min_batch_size - 1, override.max_batch_size}
    return tuple(sorted(edge for edge in edges if 0 < edge < spec.max_batch_size))


def _require_text(field_name: str, text: str, min_length: int, max_length: int) -> None:
    if not min_length <= len(text) <= max_length:
        raise InvalidOverrideError(
            f"{field_name}: {len(text)} characters, but {min_length} to {max_length} are needed",
            field_path=field_name,
        )
    if not text.isprintable():
        raise InvalidOverrideError(
            f"{field_name} {text[:80]!r}: only printable characters are allowed",
            field_path=field_name,
        )

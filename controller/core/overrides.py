"""What operators command, and what is left to decide under it: one pure merge.

Precedence, in this order:

1.  An override counts where its scope covers the engine and its range covers the batch size.
2.  Denials add up over all scopes and beat everything else: speculation off, a drafter, online
    updates, exploration.
3.  Draft lengths: in one scope the lowest ceiling and the highest floor count, and ceilings beat
    floors; a pin is both.  The narrower scope wins (engine before model before fleet): a wider
    bound applies as far as the narrower one leaves room.
4.  Drafter and regime: the pin of the narrowest scope; of several in one scope the first by name
    (drafters) or the calmest (regimes).  A denied one is not run.
5.  Where that leaves no choice that the engine can run, it is gamma = 0, and said so.

The result depends on the set of overrides alone, not on their order or number of copies.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from controller.core.errors import SpeculationError
from controller.core.types import (
    MAX_BATCH_SIZE,
    MAX_GAMMA,
    Arm,
    EngineSpec,
    Regime,
    RegimeMode,
)

MAX_AUTHOR_CHARACTERS = 128
MAX_REASON_CHARACTERS = 512
MAX_SCOPE_CHARACTERS = 256
MAX_STRIDE = 1_000_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
# Of two regimes pinned in one scope the one that does less to the drafter counts.
_CALM = {RegimeMode.OFF: 0, RegimeMode.COLLECT: 1, RegimeMode.ONLINE: 2}


class InvalidOverrideError(SpeculationError):
    """An override that cannot be; the message says why."""


class ScopeKind(Enum):
    """Whom an override is for, from narrow to wide."""

    ENGINE = "engine"
    MODEL = "model"
    FLEET = "fleet"


@dataclass(frozen=True, slots=True)
class Scope:
    """ENGINE: by engine id.  MODEL: by the fingerprint's target model.  FLEET: everyone."""

    kind: ScopeKind
    name: str = ""

    def __post_init__(self) -> None:
        if (self.kind is ScopeKind.FLEET) != (not self.name):
            raise InvalidOverrideError(
                "scope: the fleet has no name"
                if self.name
                else f"scope: which {self.kind.value}? a name is needed"
            )
        _require_text("scope", self.name, 0, MAX_SCOPE_CHARACTERS)

    def covers(self, spec: EngineSpec) -> bool:
        """True when the engine is meant."""
        if self.kind is ScopeKind.FLEET:
            return True
        engine = self.kind is ScopeKind.ENGINE
        return self.name == (spec.engine_id if engine else spec.fingerprint.target_model)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}".rstrip()


@dataclass(frozen=True, slots=True)
class Rule:
    """What an override demands; at least one part of it.

    gamma: pinned draft length.  gamma_min, gamma_max: bounds.  off: no speculation at all.
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

    def __post_init__(self) -> None:
        if not self._demands():
            raise InvalidOverrideError(
                "an override must demand something: nothing is pinned, bounded, forbidden or "
                "switched off"
            )
        for name in ("gamma", "gamma_min", "gamma_max"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_GAMMA:
                raise InvalidOverrideError(f"{name} {value} leaves 0..{MAX_GAMMA}")
        if self.gamma is not None and (self.gamma_min is not None or self.gamma_max is not None):
            raise InvalidOverrideError("gamma is pinned: bounds beside it have no meaning")
        low, high = self.gamma_min or 0, self.gamma_max
        if high is not None and low > high:
            raise InvalidOverrideError(f"gamma_min {low} is above gamma_max {high}")
        if self.off and max(self.gamma or 0, low) > 0:
            raise InvalidOverrideError("speculation cannot be off and drafting at the same time")
        self._check_drafters()
        self._check_regime()

    def _demands(self) -> bool:
        values = (self.gamma, self.gamma_min, self.gamma_max, self.drafter, self.regime)
        denied = self.off or self.deny_drafters or self.deny_updates or self.deny_exploration
        return bool(denied) or any(value is not None for value in values)

    def _check_drafters(self) -> None:
        names = [*self.deny_drafters, *([] if self.drafter is None else [self.drafter])]
        for name in names:
            _require_text("drafter", name, 1, 64)
        if len(set(names)) < len(names):
            raise InvalidOverrideError(
                f"drafters {names}: one is named twice, or pinned and denied"
            )
        if len(names) > 16:
            raise InvalidOverrideError(f"{len(names)} drafters are named, 16 at most")

    def _check_regime(self) -> None:
        regime = self.regime
        if regime is None:
            return
        online = regime.mode is RegimeMode.ONLINE
        if online != (regime.stride > 0) or regime.stride > MAX_STRIDE:
            raise InvalidOverrideError(
                f"regime {regime.mode.value} with stride {regime.stride}: online updates need a "
                f"stride of 1 to {MAX_STRIDE}, nothing else has one"
            )
        if self.deny_updates and online:
            raise InvalidOverrideError("online updates cannot be pinned and denied")

    @property
    def for_batches(self) -> bool:
        """True when a part of it can be limited to a range of batch sizes."""
        return self.regime is None and not self.deny_updates


@dataclass(frozen=True, slots=True)
class Override:
    """One command.  Raises InvalidOverrideError.

    min_batch_size, max_batch_size: batches that it is for, both included; 0 = no end.
    """

    override_id: str
    scope: Scope
    rule: Rule
    author: str
    reason: str
    min_batch_size: int = 0
    max_batch_size: int = 0

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.override_id):
            raise InvalidOverrideError(
                f"override id {self.override_id[:140]!r}: 1 to 128 letters, digits, . _ : - are "
                "needed, a letter or digit first"
            )
        _require_text("author", self.author, 1, MAX_AUTHOR_CHARACTERS)
        _require_text("reason", self.reason, 1, MAX_REASON_CHARACTERS)
        low, high = self.min_batch_size, self.max_batch_size
        if not (0 <= low <= MAX_BATCH_SIZE and 0 <= high <= MAX_BATCH_SIZE):
            raise InvalidOverrideError(f"batch sizes {low}-{high} leave 0..{MAX_BATCH_SIZE}")
        if high and low > high:
            raise InvalidOverrideError(f"batch sizes {low}-{high}: the range is empty")
        if (low > 1 or high) and not self.rule.for_batches:
            raise InvalidOverrideError(
                "the regime and online updates are the engine's, not a batch's: leave the batch "
                "range out"
            )

    def covers(self, spec: EngineSpec, batch_size: int) -> bool:
        """True when it counts for this batch of this engine."""
        high = self.max_batch_size or MAX_BATCH_SIZE
        return self.scope.covers(spec) and self.min_batch_size <= batch_size <= high


@dataclass(frozen=True, slots=True)
class Limits:
    """What is left to decide for one batch size of one engine.

    drafter: the pinned one.  overrides: ids of those that count here, in order.
    """

    gamma_min: int = 0
    gamma_max: int = MAX_GAMMA
    off: bool = False
    drafter: str | None = None
    denied_drafters: frozenset[str] = field(default_factory=frozenset)
    explore: bool = True
    overrides: tuple[str, ...] = ()

    def legal(self, arms: Sequence[Arm]) -> list[bool]:
        """Per arm, whether it may run.  None may: the engine falls back to gamma = 0."""
        wanted = [
            arm.drafter not in self.denied_drafters and self.drafter in {None, arm.drafter}
            for arm in arms
        ]
        # At gamma = 0 nothing drafts, so any drafter's will do if the wanted ones have none.
        some = any(w and arm.gamma == 0 for w, arm in zip(wanted, arms, strict=True))
        floor = 0 if self.off else self.gamma_min
        return [
            (floor == 0 and (w or not some))
            if arm.gamma == 0
            else (w and not self.off and floor <= arm.gamma <= self.gamma_max)
            for w, arm in zip(wanted, arms, strict=True)
        ]


NO_LIMITS = Limits()


def merge(overrides: Iterable[Override], spec: EngineSpec, batch_size: int) -> Limits:
    """What all overrides together leave at this batch size.  See the module for the precedence."""
    counting = {o for o in overrides if o.covers(spec, batch_size)}
    if not counting:
        return NO_LIMITS
    rules = [o.rule for o in counting]
    low, high = 0, MAX_GAMMA
    drafter: str | None = None
    for kind in ScopeKind:
        here = [o.rule for o in counting if o.scope.kind is kind]
        scope_low, scope_high = _bounds(here)
        high = min(max(scope_high, low), high)
        low = min(max(scope_low, low), high)
        pinned = [rule.drafter for rule in here if rule.drafter is not None]
        if drafter is None and pinned:
            drafter = min(pinned)
    return Limits(
        low,
        high,
        any(rule.off for rule in rules),
        drafter,
        frozenset(name for rule in rules for name in rule.deny_drafters),
        not any(rule.deny_exploration for rule in rules),
        tuple(sorted(o.override_id for o in counting)),
    )


def _bounds(rules: Sequence[Rule]) -> tuple[int, int]:
    """Floor and ceiling of one scope; ceilings beat floors."""
    ceilings = [rule.gamma if rule.gamma is not None else rule.gamma_max for rule in rules]
    floors = [rule.gamma if rule.gamma is not None else rule.gamma_min for rule in rules]
    high = min((c for c in ceilings if c is not None), default=MAX_GAMMA)
    low = max((f for f in floors if f is not None), default=0)
    return min(low, high), high


def merge_regime(
    overrides: Iterable[Override], spec: EngineSpec
) -> tuple[Regime | None, bool, tuple[str, ...]]:
    """(the pinned regime or None, whether online updates may run, ids of what says so)."""
    counting = {
        o
        for o in overrides
        if o.scope.covers(spec) and (o.rule.regime is not None or o.rule.deny_updates)
    }
    allowed = not any(o.rule.deny_updates for o in counting)
    pinned: Regime | None = None
    for kind in ScopeKind:
        here = [
            o.rule.regime for o in counting if o.scope.kind is kind and o.rule.regime is not None
        ]
        if here:
            pinned = min(here, key=lambda r: (_CALM[r.mode], -r.stride))
            break
    if not allowed and pinned is not None and pinned.mode is RegimeMode.ONLINE:
        pinned = Regime()
    return pinned, allowed, tuple(sorted(o.override_id for o in counting))


def batch_edges(overrides: Iterable[Override], spec: EngineSpec) -> tuple[int, ...]:
    """Batch sizes after which other overrides may count: where a plan's rows have to end."""
    edges: set[int] = set()
    for override in overrides:
        if override.scope.covers(spec):
            edges |= {override.min_batch_size - 1, override.max_batch_size}
    return tuple(sorted(edge for edge in edges if 0 < edge < spec.max_batch_size))


def _require_text(what: str, text: str, least: int, most: int) -> None:
    if not least <= len(text) <= most:
        raise InvalidOverrideError(f"{what}: {len(text)} characters, {least} to {most} are needed")
    if not text.isprintable():
        raise InvalidOverrideError(f"{what} {text[:80]!r}: only printable characters are allowed")

"""Describes engines by snapshots of their sessions, and by plain values.

It is the only source of the page, `controller top` and the metrics of engines.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any

from controller.core.engine.prediction_audit import estimate_gains
from controller.service.sessions.session import EngineSession
from controller.service.state.active_overrides import ActiveOverride
from controller.wire.engines import lost_capability_text, lost_capability_to_proto
from controller.wire.explanations import ArmValue, Explanation, PositionEstimate, explain
from controller.wire.override_text import rule_text, scope_text
from controller.wire.overrides import override_to_proto

# Half the width of a 95 % interval, in standard deviations.
_Z = 1.96
# Fields of an explanation that the page shows unchanged.
_EVIDENCE_FIELDS = (
    "switches", "shifts", "probes", "probe_steps", "switch_seconds", "traffic_states",
    "probe_share", "margin", "policy", "profile_id", "cost_outliers", "kv_tokens_per_sequence",
    "warm_start",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Holds a session and the explanation of its decision at the last reported batch size.

    chosen: the planned arm there.
    """

    session: EngineSession
    explanation: Explanation
    chosen: ArmValue

    @classmethod
    def from_session(cls, session: EngineSession) -> "EngineSnapshot":
        """Makes a snapshot of a session."""
        last_report = session.last_report
        explanation = explain(session.core, last_report.batch_size if last_report else 1)
        return cls(session, explanation, next(arm for arm in explanation.arms if arm.chosen))

    @property
    def drafts_by_length(self) -> list[int]:
        """Returns the drafts by accepted tokens, from 0 to the engine's largest draft length."""
        return _pad_zeros(self.session.counters.drafts_by_length, self._gamma_max + 1)

    @property
    def accepted_by_position(self) -> list[int]:
        """Returns accepted draft tokens by position, up to the engine's largest draft length."""
        return _pad_zeros(self.session.counters.accepted_by_position, self._gamma_max)

    @property
    def _gamma_max(self) -> int:
        return max(arm.gamma for arm in self.session.spec.arms)

    @property
    def gains(self) -> dict[str, float]:
        """Returns the estimated gains in tokens per second over other choices.

        See `prediction_audit`.
        """
        values = {value.arm: value.tokens_per_second for value in self.explanation.arms}
        return estimate_gains(values, self.session.spec, self.chosen.arm)


def _pad_zeros(counts: list[int], length: int) -> list[int]:
    """Appends zeros, so that every series exists from the start."""
    return counts + [0] * (length - len(counts))


@dataclass(frozen=True, slots=True)
class EngineLine:
    """Describes one engine in one line.

    batch_size: of the last report, 0 before the first.  drafter, gamma: planned for it.
    accept_length: tokens per sequence and step over the last second, bonus included; None without
    reports.  tokens_per_second: per second of step time, over the last second; None without
    reports.  generated_per_second: tokens over the last second of wall time; None in the first
    second.  gain: estimated ratio of tokens per second to those at gamma = 0, None if the engine
    has no such arm.  link: "steered", "alone" (its last step had no valid lease), "away" (no stream
    is open) or "waiting" (no step was reported yet).  costs: "profile", "roofline" or "generic".
    lost: the lost capabilities, each in one line.  unavailable: why the engine cannot be shown, ""
    if it can.  warnings: problems that its reports reveal, each in one line.
    """

    engine_id: str
    target_model: str
    batch_size: int
    drafter: str
    gamma: int
    accept_length: float | None
    expected_accept_length: float
    tokens_per_second: float | None
    gain: float | None
    regime: str
    reason: str
    reason_detail: str
    plan_age_seconds: float
    seconds_since_report: float
    link: str
    costs: str
    overrides: tuple[str, ...]
    lost: tuple[str, ...] = ()
    unavailable: str = ""
    generated_per_second: float | None = None
    warnings: tuple[str, ...] = ()


def unavailable_line(session: EngineSession, reason: str) -> EngineLine:
    """Makes a line for an engine that cannot be shown.  reason: the reason, for people."""
    return EngineLine(
        session.engine_id, "", 0, "", 0, None, 0.0, None, None, "", "unavailable", reason, 0.0, 0.0,
        "", "", (), (), reason,
    )  # fmt: skip


def engine_line(view: EngineSnapshot) -> EngineLine:
    """Makes the line of an engine: estimates of `view`, and the live state of its session."""
    session, history = view.session, view.session.history
    last_report, plan = session.last_report, session.plan
    arm = plan.row_for(last_report.batch_size if last_report else 1).arm
    return EngineLine(
        engine_id=session.engine_id,
        target_model=session.spec.fingerprint.target_model,
        batch_size=last_report.batch_size if last_report else 0,
        drafter=arm.drafter,
        gamma=arm.gamma,
        accept_length=history.accept_length,
        expected_accept_length=1 + view.chosen.expected_accepted,
        tokens_per_second=history.tokens_per_second,
        gain=view.gains.get("off"),
        regime=str(plan.regime),
        reason=plan.reason.value,
        reason_detail=plan.reason_detail,
        plan_age_seconds=session.plan_age_seconds,
        seconds_since_report=session.seconds_since_last_report,
        link=_link_state(view),
        costs=view.explanation.prior or "profile",
        overrides=plan.overrides,
        lost=tuple(
            lost_capability_text(lost_capability_to_proto(loss)) for loss in session.spec.lost
        ),
        generated_per_second=history.generated_per_second,
        warnings=tuple(warning.found for warning in view.explanation.warnings),
    )


def _link_state(view: EngineSnapshot) -> str:
    session = view.session
    if not session.open_streams:
        return "away"
    if session.last_report is None:
        return "waiting"
    return "alone" if session.counters.last_step_unsteered else "steered"


def engine_detail(view: EngineSnapshot) -> dict[str, Any]:
    """Returns everything about one engine but its line and its history, ready for JSON."""
    explanation = view.explanation
    return {
        "engine_id": view.session.engine_id,
        "drafters": [drafter.name for drafter in view.session.spec.drafters],
        "costs": _costs(explanation),
        "survival": survival_curves(explanation.positions),
        "trail": [change.as_dict() for change in reversed(view.session.plan_log)],
        "evidence": {name: getattr(explanation, name) for name in _EVIDENCE_FIELDS}
        | {"bound": _bound(explanation)},
    }


def _bound(explanation: Explanation) -> dict[str, Any] | None:
    """Returns the bound on the time per output token; None without one.

    override_id: "" if the bound comes from the setting.
    """
    state = explanation.bound
    if state is None:
        return None
    return {
        "seconds": state.bound.seconds,
        "override_id": state.bound.override_id,
        "expected_seconds": state.expected_seconds,
        "kept": state.is_kept,
        "binds": state.is_binding,
        "kept_up_to": state.kept_up_to,
    }


def _costs(explanation: Explanation) -> dict[str, Any]:
    """Returns the cost table.

    frontier: [rows] index of the best allowed arm.  row: that of the last batch size.
    """
    table, arms = explanation.table, explanation.arms
    prior = explanation.prior
    rows = range(len(table.batch_sizes))
    fitting_buckets = (
        bucket for bucket in rows if explanation.batch_size <= table.batch_sizes[bucket]
    )
    return {
        "arms": [[value.arm.drafter, value.arm.gamma] for value in arms],
        "batch_sizes": table.batch_sizes,
        "seconds": table.seconds,
        "tokens_per_second": table.tokens_per_second,
        "source": [
            [
                prior or ("extrapolated" if is_extrapolated else "measured")
                for is_extrapolated in extrapolated_row
            ]
            for extrapolated_row in table.extrapolated
        ],
        "legal": table.feasible,
        "frontier": [
            max(
                range(len(arms)),
                key=lambda i: (table.feasible[i][bucket], table.tokens_per_second[i][bucket]),
            )
            for bucket in rows
        ],
        "row": next(fitting_buckets, len(table.batch_sizes) - 1),
        "batch_size": explanation.batch_size,
        "arm": next(i for i, value in enumerate(arms) if value.chosen),
    }


def survival_curves(positions: Sequence[PositionEstimate]) -> list[dict[str, Any]]:
    """Returns s_k = a_1 ... a_k of each drafter over all traffic, with 95 % confidence bands.

    The variance of ln s_k is the sum of (deviation / a)^2 up to k (delta method, independent
    positions).
    """
    curves: dict[str, dict[str, Any]] = {}
    for estimate in positions:
        if estimate.label:
            continue
        curve = curves.setdefault(
            estimate.drafter,
            {"drafter": estimate.drafter, "survival": [], "low": [], "high": [], "exposures": []},
        )
        previous_survival = curve["survival"][-1] if curve["survival"] else 1.0
        mean = max(estimate.conditional_acceptance, 1e-6)
        variance = curve.get("variance", 0.0) + (estimate.deviation / mean) ** 2
        width = exp(_Z * sqrt(variance))
        curve["variance"] = variance
        curve["survival"].append(previous_survival * mean)
        curve["low"].append(previous_survival * mean / width)
        curve["high"].append(min(1.0, previous_survival * mean * width))
        curve["exposures"].append(estimate.exposures)
    for curve in curves.values():
        del curve["variance"]
    return list(curves.values())


def override_line(active: ActiveOverride) -> dict[str, Any]:
    """Describes an override in force.  ends_at: Unix seconds, None without an end."""
    override = active.override
    message = override_to_proto(override)
    seconds_left = active.remaining_seconds
    return {
        "override_id": override.override_id,
        "scope": scope_text(message),
        "rule": rule_text(message),
        "author": f"{override.author} {active.origin}".rstrip(),
        "reason": override.reason,
        "created_at": active.created_at,
        "ends_at": None if seconds_left is None else time.time() + seconds_left,
    }

"""Describes the metrics of the sidecar: engines, overrides in force, store, tasks and log."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import controller
from controller.core.planning.overrides import ScopeKind
from controller.service.metrics.family import MetricFamily, MetricKind
from controller.service.sessions.session import EngineSession
from controller.service.state.active_overrides import ActiveOverride
from controller.service.views.fleet_view import FleetCounts
from controller.settings.policy_file import Policy
from controller.store.interface import Health
from controller.util import logs
from controller.util.tasks import TaskState

_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE


@dataclass(frozen=True, slots=True)
class SidecarSnapshot:
    """Holds the sidecar's state at the time of a scrape."""

    sessions: Sequence[EngineSession]
    # The operators' overrides, without the entries of the policy file.
    overrides: Sequence[ActiveOverride]
    policy: Policy
    store: Health
    # States of the sidecar's long-lived tasks, by name.
    tasks: Mapping[str, TaskState]
    # Counts of other sidecars' summaries; None without a shared store.
    fleet: FleetCounts | None = None
    # Sessions whose own metrics could not be read.
    unreadable: int = 0
    # Whether reports are lost because the sidecar is behind.
    is_overloaded: bool = False

    @property
    def engines_by_cost_source(self) -> dict[str, float]:
        """Returns the number of engines by the source of their costs."""
        profiled = sum(bool(session.core.profile_id) for session in self.sessions)
        return {"measured": profiled, "prior": len(self.sessions) - profiled}

    @property
    def overrides_by_scope(self) -> dict[str, float]:
        """Returns the number of overrides by the kind of their scope."""
        kinds = [active.override.scope.kind for active in self.overrides]
        return {kind.value: kinds.count(kind) for kind in ScopeKind}

    @property
    def is_policy_ok(self) -> bool | None:
        """Returns whether the present policy file is in force; None without one."""
        return None if self.policy.path is None else not self.policy.error

    @property
    def soonest_end_seconds(self) -> float | None:
        """Returns the remaining time of the override that ends first; None if none ends."""
        seconds_left = [active.remaining_seconds for active in self.overrides]
        return min((seconds for seconds in seconds_left if seconds is not None), default=None)

    @property
    def oldest_age_seconds(self) -> float | None:
        """Returns the age of the oldest override in force; None without one."""
        return max((time.time() - active.created_at for active in self.overrides), default=None)


SIDECAR_FAMILIES: Final[tuple[MetricFamily[SidecarSnapshot], ...]] = (
    MetricFamily(
        _GAUGE, "speculation_controller_build_info", "Always 1; the version is its label.",
        lambda _: {controller.__version__: 1}, label="version",
    ),
    MetricFamily(
        _GAUGE, "speculation_engines", "Introduced engines, by where their costs come from.",
        lambda s: s.engines_by_cost_source, label="costs",
    ),
    MetricFamily(
        _GAUGE, "speculation_engines_unreadable",
        "Engines without metrics in this scrape, because these could not be read. The log shows "
        "the reason.",
        lambda s: s.unreadable,
    ),
    MetricFamily(
        _GAUGE, "speculation_overloaded",
        "1 while the sidecar cannot take the reports of its engines fast enough, so that some are "
        "lost and no other engine is accepted.",
        lambda s: s.is_overloaded,
    ),
    MetricFamily(
        _GAUGE, "speculation_overrides", "Overrides in force at this sidecar, by scope.",
        lambda s: s.overrides_by_scope, label="scope",
    ),
    MetricFamily(
        _GAUGE, "speculation_overrides_endless",
        "Overrides in force that have no end and stay until an operator clears them.",
        lambda s: sum(held.remaining_seconds is None for held in s.overrides),
    ),
    MetricFamily(
        _GAUGE, "speculation_override_soonest_end_seconds",
        "Time until the next override ends (absent if no override has an end).",
        lambda s: s.soonest_end_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_override_oldest_age_seconds",
        "Time since the oldest override was set (absent if no override is in force).",
        lambda s: s.oldest_age_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_policy_entries",
        "Entries of the policy file that are in force; speculation_overrides does not count them.",
        lambda s: len(s.policy.overrides),
    ),
    MetricFamily(
        _GAUGE, "speculation_policy_ok",
        "1 while the present policy file is in force, 0 while an earlier content is, because the "
        "file cannot be used (absent without a policy file).",
        lambda s: s.is_policy_ok,
    ),
    MetricFamily(
        _GAUGE, "speculation_store_ok", "1 while the store of overrides can be read and written.",
        lambda s: s.store.ok,
    ),
    MetricFamily(
        _GAUGE, "speculation_store_state_seconds",
        "Time since speculation_store_ok last changed.",
        lambda s: s.store.since_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_task_down",
        "1 while a long-lived task of the sidecar has failed and does not run again yet, by task.",
        lambda s: {name: bool(state.fault) for name, state in s.tasks.items()}, label="task",
    ),
    MetricFamily(
        _COUNTER, "speculation_task_failures",
        "Failures of the sidecar's long-lived tasks, by task.  A task that fails is started again.",
        lambda s: {name: state.failures for name, state in s.tasks.items()}, label="task",
    ),
    MetricFamily(
        _GAUGE, "speculation_store_unusable_overrides",
        "Overrides in the store that are not in force here, because they cannot be read or are "
        "more than can be in force.",
        lambda s: s.store.unusable_count,
    ),
    MetricFamily(
        _COUNTER, "speculation_store_skipped_entries",
        "Entries of the store that could not be used, in all readings so far, by kind.",
        lambda s: dict(s.store.skipped), label="kind",
    ),
    MetricFamily(
        _COUNTER, "speculation_fleet_summaries",
        "Summaries of its engines that the sidecar has written for others, by outcome: written, or "
        "failed because the store refused it (absent without Redis).",
        lambda s: None if s.fleet is None else {
            "written": s.fleet.written, "failed": s.fleet.failed,
        },
        label="outcome",
    ),
    MetricFamily(
        _COUNTER, "speculation_fleet_refused_entries",
        "Entries of other sidecars' summaries that could not be used, in all readings so far "
        "(absent without Redis).",
        lambda s: None if s.fleet is None else s.fleet.refused,
    ),
    MetricFamily(
        _COUNTER, "speculation_suppressed_log_lines",
        "Log lines that were suppressed because too many of their kind were written.",
        lambda _: logs.suppressed_lines(),
    ),
)  # fmt: skip

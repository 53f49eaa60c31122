"""Converts between the packets of the socket pair and the messages of the contract; no I/O."""

import hashlib

from engine_shim.link import packets
from engine_shim.link.errors import UnusablePlanError
from engine_shim.link.packets import PlanPacket, ProbeEntry, ReportPacket, RowEntry, RuleEntry
from speculation.v1.engine_pb2 import (
    ClassCounts,
    EngineSpec,
    ProposalCounts,
    RowGroup,
    StepFlags,
    StepReport,
)
from speculation.v1.plan_pb2 import (
    REGIME_MODE_COLLECT,
    REGIME_MODE_OFF,
    REGIME_MODE_ONLINE,
    Plan,
    PlanRow,
)

_KNOWN_MODES = frozenset({REGIME_MODE_OFF, REGIME_MODE_ONLINE, REGIME_MODE_COLLECT})


def session_tag(session_id: str) -> int:
    """Four bytes, never 0, that tell one session from the last few others."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") or 1


class Translator:
    """Translates between drafter names and their indices in one engine's introduction.

    lease_max_seconds: a longer lease is cut to it, whatever the sidecar says, so that an engine
    whose sidecar is gone falls back in bounded time.
    """

    def __init__(self, engine: EngineSpec, lease_max_seconds: float = 600.0) -> None:
        self._lease_max_ms = round(lease_max_seconds * 1000)
        self._names = [drafter.name for drafter in engine.drafters]
        self._arms = {
            (drafter.name, gamma): index
            for index, drafter in enumerate(engine.drafters)
            for gamma in drafter.gammas
        }

    def report(self, packet: ReportPacket, session: int) -> StepReport:
        """The message of a report.

        A plan of an earlier session means nothing to this one (epochs and probe identifiers start
        again), so it is left out.  Raises IndexError for a drafter that was not introduced.
        """
        ours = packet.session in (0, session)
        message = StepReport(
            step=packet.step,
            batch_size=packet.batch_size,
            kv_tokens=packet.kv_tokens,
            drafter=self._names[packet.drafter_index],
            gamma=packet.gamma,
            accepted_counts=packet.accepted_counts,
            step_seconds=packet.step_seconds,
            plan_epoch=packet.plan_epoch if ours else 0,
            probe_id=packet.probe_id if ours else 0,
            update_seconds=packet.update_seconds,
            draft_version=packet.draft_version,
            learnt_from=packet.learnt_from,
            delivered_tokens=packet.delivered_tokens,
            prefill_tokens=packet.prefill_tokens,
            groups=[
                RowGroup(
                    drafter=self._name_or_none(group.drafter_index),
                    gamma=group.gamma,
                    accepted_counts=group.accepted_counts,
                    ended=group.ended,
                )
                for group in packet.groups
            ],
            proposals=[
                ProposalCounts(
                    drafter=self._names[entry.drafter_index],
                    match_length=entry.match_length,
                    accepted_counts=entry.accepted_counts,
                    censored_counts=entry.censored_counts if any(entry.censored_counts) else (),
                )
                for entry in packet.proposals
            ],
            classes=[
                ClassCounts(
                    label=part.label,
                    accepted_counts=part.accepted_counts,
                    censored_counts=part.censored_counts,
                )
                for part in packet.classes
            ],
        )
        flags = packet.flags
        if flags:
            message.flags.CopyFrom(
                StepFlags(
                    after_gap=bool(flags & packets.AFTER_GAP),
                    eager_fallback=bool(flags & packets.EAGER_FALLBACK),
                    first_use=bool(flags & packets.FIRST_USE),
                    unsteered=bool(flags & packets.UNSTEERED),
                    switched=bool(flags & packets.SWITCHED),
                    updating=bool(flags & packets.UPDATING),
                    drafter_reset=bool(flags & packets.DRAFTER_RESET),
                    mixed_choice=bool(flags & packets.MIXED_CHOICE),
                )
            )
        return message

    def _name_or_none(self, index: int) -> str:
        return "" if index == packets.NO_DRAFTER else self._names[index]

    def plan(self, plan: Plan, session: int, arrival_ns: int) -> PlanPacket:
        """The packet of a plan.  Raises UnusablePlanError; the message says what is wrong."""
        if not 1 <= len(plan.rows) <= packets.MAX_ROWS:
            raise UnusablePlanError(f"plan {plan.epoch}: {len(plan.rows)} rows")
        if plan.lease_ms < 1:
            raise UnusablePlanError(f"plan {plan.epoch}: no lease")
        rows = []
        previous = 0
        for row in plan.rows:
            if row.max_batch_size <= previous:
                raise UnusablePlanError(
                    f"plan {plan.epoch}: max_batch_size {row.max_batch_size} after {previous}"
                )
            previous = row.max_batch_size
            rows.append(self._row(plan.epoch, row))
        return PlanPacket(
            session=session,
            epoch=plan.epoch,
            arrival_ns=arrival_ns,
            lease_ms=min(plan.lease_ms, self._lease_max_ms),
            regime_mode=plan.regime.mode if plan.regime.mode in _KNOWN_MODES else 0,
            regime_stride=plan.regime.stride,
            rows=tuple(rows),
            draft_version=plan.draft_version,
            rules=self._rules(plan),
        )

    def _rules(self, plan: Plan) -> tuple[RuleEntry, ...]:
        if len(plan.rules) > packets.MAX_RULES:
            raise UnusablePlanError(f"plan {plan.epoch}: {len(plan.rules)} rules")
        rules = []
        for said in plan.rules:
            index = self._arm(plan.epoch, said.drafter, said.gamma)
            rule = RuleEntry(
                index,
                said.gamma,
                said.main_expected,
                tuple(said.free_expected),
                said.least_match,
                said.ratio_weight,
            )
            if why := packets.rule_fault(rule):
                raise UnusablePlanError(f"plan {plan.epoch}: {why}")
            rules.append(rule)
        return tuple(rules)

    def _row(self, epoch: int, row: PlanRow) -> RowEntry:
        index = self._arm(epoch, row.drafter, row.gamma)
        if row.drafter_asleep and row.gamma and (not row.HasField("probe") or row.probe.gamma):
            raise UnusablePlanError(f"plan {epoch}: gamma {row.gamma} with the drafter asleep")
        probe = None
        if row.HasField("probe"):
            if row.probe.steps < 1 or row.probe.probe_id < 1:
                raise UnusablePlanError(f"plan {epoch}: probe {row.probe.probe_id} has no steps")
            probe = ProbeEntry(
                row.probe.probe_id,
                self._arm(epoch, row.probe.drafter, row.probe.gamma),
                row.probe.gamma,
                row.probe.steps,
            )
        return RowEntry(row.max_batch_size, index, row.gamma, row.drafter_asleep, probe)

    def _arm(self, epoch: int, drafter: str, gamma: int) -> int:
        index = self._arms.get((drafter, gamma))
        if index is None:
            raise UnusablePlanError(
                f"plan {epoch}: this engine did not introduce gamma {gamma} of drafter {drafter!r}"
            )
        return index

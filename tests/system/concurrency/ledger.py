"""What has been issued, chosen and reported, as a plain record; and what must hold of it always.

The record is made at the edges of the product: messages as the sidecar sends them and as an agent
takes them up, choices as the engine makes them, reports as the core folds them.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from controller.core.step_report import StepReport
from controller.service.sessions.session import session_tag
from engine_shim.link.plan_follower import Source, StepChoice
from speculation.v1.engine_pb2 import EngineSpec
from speculation.v1.plan_pb2 import REASON_OVERRIDE, REASON_PROFILING, Plan, PlanRow
from speculation.v1.service_pb2 import Received

# Two ways to compute the same end of a lease may differ by this number of seconds.
_ROUNDING = 1e-6


@dataclass
class Issued:
    """A plan, and when it was sent first.  arrivals: when the agent took it up, seconds."""

    plan: Plan
    sent_at: float
    arrivals: list[float] = field(default_factory=list)

    @property
    def lease_seconds(self) -> float:
        return self.plan.lease_ms * 1e-3


@dataclass(frozen=True)
class Step:
    """A step that the engine ran, and what it reported of it."""

    choice: StepChoice
    batch_size: int
    counts: tuple[int, ...]


@dataclass
class Sent:
    """What became of the reports that were sent in one session.

    folds: steps that its core used.  reported_lost: losses that its sidecar was told of.
    acknowledged: what the agent knows to have arrived.  died: its sidecar, and with it what was not
    acknowledged.
    """

    folds: list[int] = field(default_factory=list)
    reported_lost: int = 0
    acknowledged: Received = field(default_factory=Received)
    died: bool = False

    @property
    def folded(self) -> int:
        """Reports that count as used."""
        if not self.died:
            return len(self.folds)
        return min(len(self.folds), self.acknowledged.reports)

    @property
    def lost(self) -> int:
        """Reports that count as lost."""
        return (
            min(self.reported_lost, self.acknowledged.dropped_reports)
            if self.died
            else self.reported_lost
        )


class Ledger:
    """Of one engine.  grace_seconds: of its steering; safe: its safe default."""

    def __init__(self, spec: EngineSpec, grace_seconds: float, safe: StepChoice) -> None:
        self._spec = spec
        self._grace_seconds = grace_seconds
        self._safe = safe
        self._issued: dict[tuple[int, int], Issued] = {}
        # Sessions in the order in which they opened, and the newest epoch of each.
        self._newest_epoch: dict[int, int] = {}
        self._chosen_epoch: dict[int, int] = {}
        self._probe_steps: Counter[tuple[int, int]] = Counter()
        self._steps: dict[int, Step] = {}
        self._last_folded = 0
        self._sent: dict[str, Sent] = defaultdict(Sent)
        # (session, epoch) of the plan that the agent took up last.
        self.newest_taken = (0, 0)

    @property
    def newest(self) -> tuple[int, int]:
        """(session, epoch) of the newest plan; (0, 0) before the first."""
        return next(reversed(self._newest_epoch.items()), (0, 0))

    @property
    def last_folded(self) -> int:
        """Number of the newest step that a core knows."""
        return self._last_folded

    @property
    def folded(self) -> int:
        """Reports that were used."""
        return sum(sent.folded for sent in self._sent.values())

    @property
    def told_lost(self) -> int:
        """Reports that a sidecar was told to be lost."""
        return sum(sent.lost for sent in self._sent.values())

    @property
    def attempted(self) -> int:
        """Steps that were to be reported."""
        return len(self._steps)

    # The sidecar's side.

    def sent(
        self,
        session_id: str,
        plan: Plan,
        now: float,
        certain: set[str],
        possible: set[str],
        pinned: int | None,
    ) -> None:
        """A plan goes out.

        certain, possible: overrides in force, without and with those that come or go right now.
        pinned: the draft length that they leave, where that is one.
        """
        tag = session_tag(session_id)
        known = self._issued.get((tag, plan.epoch))
        if known is not None:
            assert known.plan == plan, f"two plans of epoch {plan.epoch}:\n{known.plan}\n{plan}"
        else:
            newest = self._newest_epoch.get(tag, 0)
            assert plan.epoch > newest, f"epoch {plan.epoch} after {newest}"
            self._issued[tag, plan.epoch] = Issued(Plan.FromString(plan.SerializeToString()), now)
            self._newest_epoch[tag] = plan.epoch
            self._judge_overrides(plan, certain, possible, pinned)

    def _judge_overrides(
        self, plan: Plan, certain: set[str], possible: set[str], pinned: int | None
    ) -> None:
        assert certain <= set(plan.overrides) <= possible, f"{certain} to {possible}:\n{plan}"
        shaped = any(row.reason == REASON_OVERRIDE for row in plan.rows)
        assert not shaped or possible, f"no override is in force:\n{plan}"
        measured = plan.reason == REASON_PROFILING
        if pinned is not None and not measured:
            for row in plan.rows:
                assert row.gamma == pinned, f"pinned to {pinned}:\n{plan}"
                assert not row.HasField("probe") or row.probe.gamma == pinned, plan

    def taken(self, session_id: str, plan: Plan, now: float) -> None:
        """An agent takes up a plan."""
        self.newest_taken = key = (session_tag(session_id), plan.epoch)
        self._issued[key].arrivals.append(now)

    def arrived(self, session: int, epoch: int, claimed: float, now: float) -> None:
        """An engine has a plan whose agent says that it came then; it cannot have come earlier."""
        issued = self._issued[session, epoch]
        assert issued.sent_at <= claimed <= now, (issued, claimed, now)
        issued.arrivals.append(claimed)

    def acknowledged(self, session_id: str, received: Received) -> None:
        """The agent learns how much has arrived; of a session that is over, the last of it."""
        self._sent[session_id].acknowledged = received

    def died(self, session_id: str = "") -> None:
        """The sidecar of this session, or of all so far, is gone."""
        for sent in [self._sent[session_id]] if session_id else self._sent.values():
            sent.died = True

    def passed_in_vain(self, session_id: str, received: Received) -> None:
        """For a witness between the two: of what it saw pass, only this has arrived."""
        sent = self._sent[session_id]
        sent.reported_lost = min(sent.reported_lost, received.dropped_reports)
        del sent.folds[received.reports :]
        self._last_folded = max((s.folds[-1] for s in self._sent.values() if s.folds), default=0)

    def folded_by(self, session_id: str, report: StepReport) -> None:
        """A core has used a report."""
        assert report.step > self._last_folded, f"{report} after step {self._last_folded}"
        self._last_folded = report.step
        self._sent[session_id].folds.append(report.step)
        self._require_no_more()
        step = self._steps[report.step]
        choice = step.choice
        drafter = self._spec.drafters[choice.drafter_index].name
        assert (report.drafter, report.gamma) == (drafter, choice.gamma)
        assert (report.batch_size, tuple(report.accepted_counts)) == (step.batch_size, step.counts)
        ours = choice.session == session_tag(session_id)
        counted = (report.plan_epoch, report.probe_id)
        assert counted == ((choice.epoch, choice.probe_id) if ours else (0, 0)), (counted, choice)
        assert report.flags.unsteered == (choice.source is not Source.PLAN)

    def read(self, session_id: str, lost: int) -> None:
        """The sidecar learns of lost reports."""
        self._sent[session_id].reported_lost += lost
        self._require_no_more()

    def _require_no_more(self) -> None:
        assert self.folded + self.told_lost <= self.attempted, "more than there were"

    # The engine's side.

    def chosen(
        self,
        choice: StepChoice,
        batch_size: int,
        now: float,
        believed: Plan | None,
        slack: float = 0.0,
    ) -> None:
        """A step is chosen.  now: when at the latest, by the clock that it is chosen by.

        slack: seconds by which it may have been earlier.  believed: the plan in the engine's
        steering, None before the first.
        """
        if believed is None:
            assert choice == self._safe, choice
            return
        issued = self._issued[believed.session, believed.epoch]
        arrivals = issued.arrivals
        earliest, latest = min(arrivals), max(arrivals)
        lease, grace = issued.lease_seconds, self._grace_seconds
        age, least_age = now - earliest, now - slack - latest
        if choice.source is Source.PLAN:
            assert least_age < lease + _ROUNDING, f"{least_age} s old, lease {lease} s: {choice}"
        elif choice.source is Source.GRACE:
            assert age > lease - _ROUNDING, f"{age} s old, lease {lease} s: {choice}"
            assert least_age < lease + grace + _ROUNDING, f"{least_age} s old: {choice}"
        else:
            assert age > lease + grace - _ROUNDING, f"{age} s old: {choice}"
            assert choice == self._safe, choice
            return
        assert (choice.session, choice.epoch) == (believed.session, believed.epoch)
        self._judge_order(choice)
        self._judge_row(choice, issued.plan, batch_size)

    def _judge_order(self, choice: StepChoice) -> None:
        sessions = list(self._newest_epoch)
        seen = self._chosen_epoch
        assert all(sessions.index(tag) <= sessions.index(choice.session) for tag in seen), (
            "back to an earlier session"
        )
        assert choice.epoch >= seen.get(choice.session, 0), "back to an earlier plan"
        seen[choice.session] = choice.epoch

    def _judge_row(self, choice: StepChoice, plan: Plan, batch_size: int) -> None:
        row = next((r for r in plan.rows if batch_size <= r.max_batch_size), plan.rows[-1])
        drafter = self._spec.drafters[choice.drafter_index].name
        has_probe = row.HasField("probe")
        key = (choice.session, row.probe.probe_id)
        if choice.probe_id:
            assert choice.source is Source.PLAN, choice
            assert has_probe, choice
            asked = (row.probe.probe_id, row.probe.drafter, row.probe.gamma)
            assert (choice.probe_id, drafter, choice.gamma) == asked, (choice, row)
            self._probe_steps[key] += 1
            assert self._probe_steps[key] <= row.probe.steps, f"{choice} once too often"
        else:
            assert (drafter, choice.gamma) == (row.drafter, row.gamma), (choice, row)
            if has_probe and choice.source is Source.PLAN:
                assert self._probe_steps[key] == row.probe.steps, f"{choice} before {row.probe}"
        assert choice.asleep == _asleep(row, choice.gamma), (choice, row)

    def regime(self, session: int, epoch: int) -> tuple[int, int, int]:
        """(mode, stride, draft version) of a plan that was issued."""
        plan = self._issued[session, epoch].plan
        return plan.regime.mode, plan.regime.stride, plan.draft_version

    def stepped(self, number: int, step: Step) -> None:
        """A step that was chosen has been run."""
        self._steps[number] = step


def _asleep(row: PlanRow, gamma: int) -> bool:
    return row.drafter_asleep and gamma == 0

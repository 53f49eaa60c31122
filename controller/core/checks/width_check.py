"""Compares the draft length that an engine verified with the one that its plan asked for.

A few steps differ in every engine: a drafter that wakes, a batch that has changed between choice
and step.  An engine that does not follow the draft length differs in nearly all of them.

Compared is the draft length that a step ran.  Rows that verified fewer drafts than that (a grammar
forbade them, a lookup found none) say nothing about the engine.
"""

from collections import OrderedDict
from dataclasses import dataclass

from controller.core.engine_spec import Arm
from controller.core.plan import Plan
from controller.core.step_report import StepReport

# Plans that a report on its way may belong to; an older one is not compared.
_PLANS_KEPT = 64
# Steps asked for one draft length over which the share of others is a mean, and that it takes.
_WINDOW_STEPS = 50
# Share of these steps above which the engine does not follow.
_DISOBEYED_SHARE = 0.5


@dataclass(slots=True)
class _Asked:
    """Counts the steps that were asked for one arm.

    share: of the last ones, those that ran another draft length; other: the last such length.
    """

    steps: int = 0
    share: float = 0.0
    other: int = 0


@dataclass(frozen=True, slots=True)
class OtherWidth:
    """Tells that steps which were asked for `arm` verified another draft length.

    share: of the last `steps` ones.
    """

    arm: Arm
    verified: int
    share: float
    steps: int


class WidthCheck:
    """Compares the reports of one engine with its plans.

    any_larger: the choice may have been made for a larger batch than the report's (data-parallel
    attention, where all ranks run what the largest batch needs).
    """

    def __init__(self, *, any_larger: bool) -> None:
        self._any_larger = any_larger
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._asked: dict[Arm, _Asked] = {}
        self._last_batch = 0
        # The question that was answered last: most steps ask it again.
        self._key: tuple[int, ...] = ()
        self._arms: tuple[Arm, frozenset[Arm]] | None = None

    def expect(self, plan: Plan) -> None:
        """Takes a plan, in whose epoch later steps run."""
        self._plans[plan.epoch] = plan
        if len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)

    def observe(self, report: StepReport) -> None:
        """Takes a step.  One without a plan, of two choices, or without drafts is not compared."""
        # An engine may choose a step ahead, for the batch as it was then.
        sizes = sorted((report.batch_size, self._last_batch or report.batch_size))
        self._last_batch = report.batch_size
        flags = report.flags
        if flags.unsteered or flags.mixed_choice or not drafts_for_any(report):
            return
        key = (report.plan_epoch, *sizes, report.probe_id, report.batch_size)
        if key != self._key:
            self._key, self._arms = key, self._ask(*key)
        if self._arms is None:
            return
        asked, allowed = self._arms
        if report.drafter != asked.drafter:
            return
        count = self._asked.setdefault(asked, _Asked())
        differs = report.arm not in allowed
        count.steps += 1
        count.share += (differs - count.share) / min(count.steps, _WINDOW_STEPS)
        if differs:
            count.other = report.gamma

    def _ask(
        self, epoch: int, low: int, high: int, probe_id: int, size: int
    ) -> tuple[Arm, frozenset[Arm]] | None:
        """Returns what a plan asks for in a batch, and what it does in those that it may be for."""
        plan = self._plans.get(epoch)
        if plan is None:
            return None
        rows = [row for row in plan.rows if row.max_batch_size >= low] or [plan.rows[-1]]
        if not self._any_larger:
            last = next((i for i, row in enumerate(rows) if row.max_batch_size >= high), len(rows))
            rows = rows[: last + 1]
        arms = {row.arm for row in rows}
        asked = plan.row_for(size).arm
        if probe_id:
            probes = [row.probe for row in rows if row.probe is not None]
            probe = next((probe for probe in probes if probe.probe_id == probe_id), None)
            if probe is None:
                return None
            asked = probe.arm
            arms = {asked}
        return asked, frozenset(arms)

    def found(self) -> list[OtherWidth]:
        """Returns the arms that the engine does not follow, the longest draft length first."""
        odd = [
            OtherWidth(arm, count.other, count.share, min(count.steps, _WINDOW_STEPS))
            for arm, count in self._asked.items()
            if count.steps >= _WINDOW_STEPS and count.share > _DISOBEYED_SHARE
        ]
        return sorted(odd, key=lambda other: (other.arm.drafter, -other.arm.gamma))


def drafts_for_any(report: StepReport) -> bool:
    """Returns whether a step had a row that may be drafted for and whose request went on."""
    return not report.groups or any(it.drafter and not it.ended for it in report.groups)

"""Determines which draft length the engine runs now, from the newest plan and its lease.

    no plan yet ---------------------------------------------> SAFE_DEFAULT
    plan arrives --> PLAN --(lease over)--> GRACE --(grace over)--> SAFE_DEFAULT
                      ^                       |                         |
                      +------- a plan arrives +-------------------------+

The module does no I/O, and time is passed in.  A choice always comes from one plan,
unchanged: rows of two plans are never mixed, and no row outlives its plan's lease plus the grace
period.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from engine_shim.link.errors import UnusablePlanError
from engine_shim.link.messages import MAX_GAMMA, ArrivedPlan
from speculation.v1.engine_pb2 import Drafter
from speculation.v1.plan_pb2 import (
    REGIME_MODE_COLLECT,
    REGIME_MODE_ONLINE,
    MixtureRule,
    Plan,
    PlanRow,
)

MAX_ROWS: Final = 512
MAX_RULES: Final = 255
# Rules distinguish only a few match lengths.
MAX_MATCH_LENGTHS: Final = 16
_MAX_REMEMBERED_PROBES: Final = 4096
_NEVER: Final = float("-inf")


class Source(Enum):
    """Names the source of a choice."""

    PLAN = "plan"  # a plan with a valid lease
    GRACE = "grace"  # the last plan; its lease is over
    SAFE_DEFAULT = "safe-default"  # no plan, or the grace is over too


class StepChoice(NamedTuple):
    """Describes what the next step runs.

    The report of the step must contain `epoch`, `probe_id` and `session`, and the flag `unsteered`
    if the source is not PLAN.
    `asleep`: at gamma 0, the drafter does not run at all.
    """

    drafter_index: int
    gamma: int
    asleep: bool
    epoch: int
    probe_id: int
    source: Source
    session: int


def make_safe_default(gamma: int) -> StepChoice:
    """Returns the choice of an engine without a valid lease: its first drafter at this gamma."""
    return StepChoice(
        0, gamma, asleep=False, epoch=0, probe_id=0, source=Source.SAFE_DEFAULT, session=0
    )


# What a row or its probe runs: index of the drafter, draft length, whether the drafter sleeps.
_Arm: TypeAlias = tuple[int, int, bool]


class _Probe(NamedTuple):
    probe_id: int
    arm: _Arm
    steps: int


class _Table(NamedTuple):
    """The rows and rules of a plan that this engine can run, prepared for `choose`.

    max_batch_sizes: largest batch size of each row, without the last row, which serves every larger
    batch.
    """

    max_batch_sizes: list[int]
    arms: list[_Arm]
    probes: list[_Probe | None]
    rules: tuple[MixtureRule, ...]


_NO_TABLE: Final = _Table([], [], [], ())


class PlanFollower:
    """Follows the plan in use.  Call `choose` once for every decode step that will run.

    `drafters`: the engine's drafters; a choice contains an index into them, and `drafter_names` has
    their names.  `lapses`: how often a lease ran out without a newer plan.  `plans_accepted`:
    number of accepted plans.  `source`: of the last choice.  `plan`: the newest accepted plan,
    however old; `lease_end`: the end of its lease in seconds of the clock passed in, -inf before
    the first plan.
    """

    def __init__(
        self, drafters: Iterable[Drafter], safe_default: StepChoice, grace_seconds: float
    ) -> None:
        all_drafters = tuple(drafters)
        self.drafter_names = tuple(drafter.name for drafter in all_drafters)
        self._drafter_indices = {
            (drafter.name, gamma): drafter_index
            for drafter_index, drafter in enumerate(all_drafters)
            for gamma in drafter.gammas
        }
        self.safe_default = safe_default
        self._grace_seconds = grace_seconds
        self.plan: Plan | None = None
        self.lease_end = _NEVER
        # Of the newest plan that passed the check.  A renewed plan has the same table.
        self._checked_digest = 0
        self._checked_table = _NO_TABLE
        self._table = _NO_TABLE
        # The cached choice of each row; None for a row whose probe has steps left.
        self._row_choices: list[StepChoice | None] = []
        self._probe_steps_left: dict[int, int] = {}
        self._has_lapsed = False
        self.lapses = self.plans_accepted = 0
        self.source = Source.SAFE_DEFAULT

    @property
    def mixture_rules(self) -> tuple[MixtureRule, ...]:
        """Returns the mixture rules of the newest accepted plan."""
        return self._table.rules

    def check(self, arrived: ArrivedPlan) -> None:
        """Raises UnusablePlanError for a plan that is older than the one in use.

        Also for a malformed table, and for an arm that the engine has not introduced.
        """
        plan, digest = arrived.plan, arrived.table_digest
        current_plan = self.plan
        if (
            current_plan is not None
            and current_plan.session == plan.session
            and plan.epoch < current_plan.epoch
        ):
            raise UnusablePlanError(f"plan {plan.epoch}: older than {current_plan.epoch}")
        if plan.lease_ms < 1:
            raise UnusablePlanError(f"plan {plan.epoch}: no lease")
        if not digest or digest != self._checked_digest:
            self._checked_table = self._parse_table(plan)
            self._checked_digest = digest

    def is_current_plan(self, plan: Plan) -> bool:
        """Whether this plan is the one in use; its lease may have been renewed."""
        current_plan = self.plan
        return current_plan is not None and (current_plan.session, current_plan.epoch) == (
            plan.session,
            plan.epoch,
        )

    def accept(self, arrived: ArrivedPlan, now: float) -> bool:
        """Starts to use a plan; returns False and changes nothing if the plan is unusable.

        The lease counts from the plan's arrival at the agent (which cannot lie in the future).
        """
        plan = arrived.plan
        try:
            self.check(arrived)
        except UnusablePlanError:
            return False
        table = self._checked_table
        is_new_session = self.plan is not None and self.plan.session != plan.session
        if is_new_session:
            self._probe_steps_left.clear()
        if is_new_session or table is not self._table:
            self._remember_probes([probe for probe in table.probes if probe is not None])
        self._table = table
        self._row_choices = [None] * len(table.arms)
        self.lease_end = min(arrived.arrival_ns * 1e-9, now) + plan.lease_ms * 1e-3
        self.plan = plan
        self._has_lapsed = False
        self.plans_accepted += 1
        return True

    def drop_plan(self) -> None:
        """Chooses the safe default from now on, until a plan is accepted."""
        self.plan, self.lease_end, self.source = None, _NEVER, Source.SAFE_DEFAULT
        self._table = _NO_TABLE

    def _parse_table(self, plan: Plan) -> _Table:
        """Returns the rows and rules of a plan.  Raises UnusablePlanError."""
        if not 1 <= len(plan.rows) <= MAX_ROWS:
            raise UnusablePlanError(
                f"plan {plan.epoch}: {len(plan.rows)} rows; 1 to {MAX_ROWS} are possible"
            )
        if len(plan.rules) > MAX_RULES:
            raise UnusablePlanError(
                f"plan {plan.epoch}: {len(plan.rules)} rules; at most {MAX_RULES} are possible"
            )
        max_batch_sizes: list[int] = []
        arms: list[_Arm] = []
        probes: list[_Probe | None] = []
        previous_max_batch_size = 0
        for row in plan.rows:
            max_batch_size, gamma, asleep = row.max_batch_size, row.gamma, row.drafter_asleep
            if max_batch_size <= previous_max_batch_size:
                raise UnusablePlanError(
                    f"plan {plan.epoch}: max_batch_size {max_batch_size} after "
                    f"{previous_max_batch_size}"
                )
            previous_max_batch_size = max_batch_size
            drafter_index = self._drafter_indices.get((row.drafter, gamma))
            if drafter_index is None:
                raise _not_introduced(plan.epoch, row.drafter, gamma)
            probe = self._parse_probe(plan.epoch, row) if row.HasField("probe") else None
            if asleep and gamma and (probe is None or probe.arm[1]):
                raise UnusablePlanError(f"plan {plan.epoch}: gamma {gamma} with the drafter asleep")
            max_batch_sizes.append(max_batch_size)
            # The flag may apply to the row's probe only.
            arms.append((drafter_index, gamma, asleep and not gamma))
            probes.append(probe)
        for rule in plan.rules:
            if (rule.drafter, rule.gamma) not in self._drafter_indices:
                raise _not_introduced(plan.epoch, rule.drafter, rule.gamma)
            if rule_error := _rule_error(rule):
                raise UnusablePlanError(f"plan {plan.epoch}: {rule_error}")
        return _Table(max_batch_sizes[:-1], arms, probes, tuple(plan.rules))

    def _parse_probe(self, epoch: int, row: PlanRow) -> _Probe:
        probe = row.probe
        if probe.steps < 1 or probe.probe_id < 1:
            raise UnusablePlanError(f"plan {epoch}: probe {probe.probe_id} has no steps")
        drafter_index = self._drafter_indices.get((probe.drafter, probe.gamma))
        if drafter_index is None:
            raise _not_introduced(epoch, probe.drafter, probe.gamma)
        asleep = row.drafter_asleep and not probe.gamma
        return _Probe(probe.probe_id, (drafter_index, probe.gamma, asleep), probe.steps)

    def choice_source(self, now: float) -> Source:
        """Returns the source of the choice that `choose` would make now."""
        if now < self.lease_end:
            return Source.PLAN
        if self.plan is None or now >= self.lease_end + self._grace_seconds:
            return Source.SAFE_DEFAULT
        return Source.GRACE

    def collects_signals(self, now: float) -> bool:
        """Whether training signals are to be collected; False on the safe default."""
        plan = self.plan
        if plan is None or plan.regime.mode != REGIME_MODE_COLLECT:
            return False
        return self.choice_source(now) is not Source.SAFE_DEFAULT

    def update_stride(self, now: float) -> int:
        """Returns the rounds between two online updates of the drafter; 0 for no updates.

        It is 0 on the safe default.
        """
        plan = self.plan
        if plan is None or plan.regime.mode != REGIME_MODE_ONLINE:
            return 0
        return 0 if self.choice_source(now) is Source.SAFE_DEFAULT else plan.regime.stride

    def choose(self, batch_size: int, now: float) -> StepChoice:
        """Returns the choice for a step over `batch_size` sequences."""
        if now < self.lease_end:
            self.source = Source.PLAN
            index = bisect_left(self._table.max_batch_sizes, batch_size)
            choice = self._row_choices[index]
            return self._choose_from_row(index) if choice is None else choice
        return self._choose_without_lease(batch_size, now)

    def _choose_from_row(self, index: int) -> StepChoice:
        """Uses a step of the row's probe if any is left, else caches the row's own choice."""
        probe = self._table.probes[index]
        if probe is not None and (steps_left := self._probe_steps_left[probe.probe_id]):
            self._probe_steps_left[probe.probe_id] = steps_left - 1
            return self._make_choice(probe.arm, Source.PLAN, probe.probe_id)
        self._row_choices[index] = choice = self._make_choice(self._table.arms[index], Source.PLAN)
        return choice

    def _make_choice(self, arm: _Arm, source: Source, probe_id: int = 0) -> StepChoice:
        plan = self.plan
        assert plan is not None  # rows exist only with a plan
        return StepChoice(*arm, plan.epoch, probe_id, source, plan.session)

    def _choose_without_lease(self, batch_size: int, now: float) -> StepChoice:
        """Chooses without a valid lease: the last plan without its probes, or the safe default."""
        self.source = source = self.choice_source(now)
        if self.plan is None:
            return self.safe_default
        if not self._has_lapsed:
            self._has_lapsed = True
            self.lapses += 1
        if source is Source.SAFE_DEFAULT:
            return self.safe_default
        table = self._table
        return self._make_choice(table.arms[bisect_left(table.max_batch_sizes, batch_size)], source)

    def _remember_probes(self, probes: Sequence[_Probe]) -> None:
        """Stores the steps of new probes; a known probe keeps its remaining steps.

        The newest 4096 identifiers are kept: enough that a renewed plan never restarts a probe, and
        bounded for an engine that runs for months.
        """
        steps_left = self._probe_steps_left
        for probe in probes:
            steps_left[probe.probe_id] = steps_left.pop(probe.probe_id, probe.steps)
        while len(steps_left) > _MAX_REMEMBERED_PROBES:
            del steps_left[next(iter(steps_left))]


def _not_introduced(epoch: int, drafter: str, gamma: int) -> UnusablePlanError:
    return UnusablePlanError(
        f"plan {epoch}: this engine did not introduce gamma {gamma} of drafter {drafter!r}"
    )


def _rule_error(rule: MixtureRule) -> str:
    """Returns why a rule is invalid; "" if it is valid."""
    numbers = (rule.main_expected, rule.ratio_weight, *rule.free_expected)
    if not 1 <= rule.gamma <= MAX_GAMMA or not 1 <= rule.least_match <= MAX_GAMMA:
        return (
            f"a rule of gamma {rule.gamma} for matches of {rule.least_match} tokens: "
            f"both must be 1 to {MAX_GAMMA}"
        )
    if not 1 <= len(rule.free_expected) <= MAX_MATCH_LENGTHS:
        return (
            f"a rule for {len(rule.free_expected)} match lengths: "
            f"there must be 1 to {MAX_MATCH_LENGTHS}"
        )
    if not all(0 <= number <= MAX_GAMMA for number in numbers) or rule.ratio_weight > 1:
        return (
            f"a rule with the numbers {numbers}: each must be 0 to {MAX_GAMMA}, "
            "and the second one at most 1"
        )
    return ""

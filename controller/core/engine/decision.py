"""Keeps the estimates and values that a decision was made from.

    reports -> estimators -> Estimates, of one moment -> Values, in the plan's rows -> choice

Whoever inspects a controller reads them here.  Inspecting therefore neither changes the estimators
nor shows numbers that no decision has used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.by_class import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUp, CatchUpPrice
from controller.core.cost.model import CostModel
from controller.core.cost.table import Costs
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.engine_spec import Arm
from controller.core.planning.constraints import PlanRows
from controller.core.planning.overrides import Override
from controller.core.planning.planner import Values, evaluate


@dataclass(frozen=True, slots=True)
class Estimates:
    """Holds all estimates of one moment, before overrides determine a plan's rows.

    costs, drift: [arms, buckets] of the cost table with what prompts add to a step, and the factors
    by which live steps have moved the table.  catch_up: by drafter, [buckets] seconds;
    catch_up_price: of any waking.  context: [buckets] tokens of a sequence.  switch_seconds: of any
    change of arm.  profile_id, prior: where costs come from, one of them "".
    """

    traffic: TrafficCurves
    costs: Costs
    drift: NDArray[np.float64]
    uncertainty: CostUncertainty
    catch_up: Mapping[str, NDArray[np.float64]]
    catch_up_price: CatchUpPrice
    context: NDArray[np.float64]
    switch_seconds: float
    profile_id: str
    prior: str

    @classmethod
    def of(
        cls,
        traffic: TrafficCurves,
        cost: CostModel,
        catch_up: CatchUp,
        context: NDArray[np.float64],
        switch_seconds: float,
        prefill_seconds: float,
    ) -> "Estimates":
        """Takes the present estimates of an engine, as copies where they would change.

        prefill_seconds: what prompts add to a step.
        """
        costs = cost.costs(context)
        if prefill_seconds:
            costs = Costs(costs.seconds + prefill_seconds, costs.extrapolated)
        return cls(
            traffic,
            costs,
            cost.drift(),
            cost.uncertainty(),
            catch_up.by_batch(cost.sizes, context),
            catch_up.price,
            context,
            switch_seconds,
            cost.profile_id,
            cost.prior,
        )

    def values(self, arms: Sequence[Arm], sizes: NDArray[np.float64], at: PlanRows) -> Values:
        """Returns the values of all arms in all rows.  sizes: [buckets], the costs' batches."""
        costs, catch_up = self.costs, self.catch_up
        if at.split:
            catch_up = {name: seconds[at.bucket] for name, seconds in catch_up.items()}
            costs = Costs(costs.seconds[:, at.bucket], costs.extrapolated[:, at.bucket])
            sizes = sizes[at.bucket]
        return evaluate(
            arms,
            sizes,
            self.traffic,
            costs,
            catch_up,
            self.catch_up_price,
            self.switch_seconds,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Holds what a decision was made from, and the overrides and rows that it was made under.

    reports: how many were folded before it.  excluded: by row, the arm (by index) that only a bound
    on the time per output token kept from being chosen.
    """

    estimates: Estimates
    values: Values
    at: PlanRows
    overrides: tuple[Override, ...]
    reports: int
    excluded: Mapping[int, int] = field(default_factory=dict)

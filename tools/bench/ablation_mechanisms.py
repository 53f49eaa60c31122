"""The mechanisms of the decision core, each with a way to switch it off alone.

A mechanism is switched off by settings where there are any, and otherwise by replacing a constant
or a function of the core while the controller is made and runs.  A replaced name that does not
exist is an error.

Not listed, because no simulated engine reports what they need: the price of prompts beside decoding
(`PrefillPrice`), bounds on the time per output token, overrides, lost capabilities, the delay of
drafts that are verified a step later, and the warm start.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance import traffic_state_tracker
from controller.core.acceptance.estimator import AcceptanceCurve, AcceptanceEstimator
from controller.core.acceptance.shifts import LARGE_SHIFT, MODERATE_SHIFT, HazardEstimator
from controller.core.acceptance.traffic_estimator import TrafficEstimator
from controller.core.acceptance.traffic_state import OCTAVES, TrafficState
from controller.core.acceptance.traffic_state_tracker import TrafficStateTracker
from controller.core.cost.catch_up_cost import CatchUpEstimator
from controller.core.cost.live_estimates import ContextByBatch, SwitchPrice
from controller.core.cost.model import CostModel
from controller.core.cost.table import CostOrder
from controller.core.cost.uncertainty import CostUncertainty
from controller.core.planning.exploration import Explorer
from controller.core.planning.loss_account import LossAccount
from controller.core.planning.planner import NO_LOSS_LIMITS, LossLimits
from controller.core.planning.value_uncertainty import DiscountRule
from controller.core.settings import PlannerSettings

# A limit that is never reached; settings have to be finite.
_NEVER = 1e9


@dataclass(frozen=True)
class Patch:
    """Replaces an attribute of a module or class.

    value: the new one.  wraps: `value` makes the new one from the old one.
    """

    owner: Any
    attribute: str
    value: Any
    wraps: bool = False

    def apply(self, stack: ExitStack) -> None:
        """Replaces the attribute until the stack is closed."""
        value = self.value(getattr(self.owner, self.attribute)) if self.wraps else self.value
        stack.enter_context(patch.object(self.owner, self.attribute, value))

    @property
    def source(self) -> str:
        """The patch as text, which changes when its effect does."""
        function = self.value.fget if isinstance(self.value, property) else self.value
        text = inspect.getsource(function) if callable(function) else repr(function)
        return f"{self.owner.__name__}.{self.attribute} = {text}"


@dataclass(frozen=True)
class Mechanism:
    """A mechanism of the core.

    name: in tables and on the command line.  group: of related mechanisms.  effect: what it does,
    as a sentence.  settings, patches: what switches it off.
    """

    name: str
    group: str
    effect: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    patches: tuple[Patch, ...] = ()

    @contextmanager
    def switched_off(self) -> Iterator[PlannerSettings]:
        """Switches it off; yields the settings of a controller without it."""
        with ExitStack() as stack:
            for one in self.patches:
                one.apply(stack)
            yield PlannerSettings(**self.settings)

    @property
    def version(self) -> str:
        """A digest of what switches it off."""
        text = repr(sorted(self.settings.items())) + "".join(one.source for one in self.patches)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def _return_none(*_: object) -> None:
    return None


def _return_false(*_: object) -> bool:
    return False


def _return_one(*_: object) -> float:
    return 1.0


def _return_table(_: CostOrder, table: NDArray[np.float64], *_args: Any, **_kwargs: Any) -> Any:
    return table


def _return_no_limits(*_: object) -> LossLimits:
    return NO_LOSS_LIMITS


def _return_even_octaves(_: TrafficState) -> list[float]:
    return [1 / OCTAVES] * OCTAVES


def _return_error(_model: CostModel, _cell: tuple[int, int], error: float) -> tuple[float, int]:
    return error, 1


def _return_no_gain(*_: object) -> float:
    return 0.0


def _return_one_context(context: ContextByBatch) -> NDArray[np.float64]:
    return np.full(len(context._means), context.mean_tokens)


def _return_all_arms(costs: CostUncertainty, *_: object) -> NDArray[np.bool_]:
    return np.ones(len(costs.last_steps), dtype=bool)


def _return_large_budget(_: LossAccount) -> float:
    return _NEVER


def _return_loss_budget(account: LossAccount) -> float:
    return account.loss_budget_steps


def _return_no_seconds(_: SwitchPrice) -> float:
    return 0.0


def _return_shift_probability(hazard: HazardEstimator) -> float:
    return hazard.shift_probability


def _return_prior_probability(hazard: HazardEstimator) -> float:
    return 1 / hazard._settings.hazard_prior_steps


def _restart_state(tracker: TrafficStateTracker, running_drafter: str, _: float) -> None:
    tracker._restart_state(running_drafter)
    tracker._reports_in_place = 1


def _observe_idle_step(acceptance: AcceptanceEstimator, *_: object) -> None:
    acceptance.observe_idle_step()


def _without_wake_up_limit(limits: Callable[..., LossLimits]) -> Callable[..., Any]:
    return lambda *arguments: replace(limits(*arguments), wake_up_steps=math.inf)


def _with_margin_in_debt(limits: Callable[..., LossLimits]) -> Callable[..., Any]:
    return lambda *arguments: replace(limits(*arguments), prefers_off=False)


def _without_same_cell(update_cell: Callable[..., None]) -> Callable[..., Any]:
    def update(cost_model: CostModel, *arguments: Any) -> None:
        cost_model._last_learnt_cell = (-1, -1)
        update_cell(cost_model, *arguments)

    return update


def _without_scaled_credit(initialise: Callable[..., None]) -> Callable[..., Any]:
    def initialise_unscaled(explorer: Explorer, *arguments: Any) -> None:
        initialise(explorer, *arguments)
        explorer._is_credit_scaled = True

    return initialise_unscaled


def _without_shift_signal(observe: Callable[..., bool]) -> Callable[..., Any]:
    def observe_silently(*arguments: Any) -> bool:
        observe(*arguments)
        return False

    return observe_silently


def _without_walk(compute_curve: Callable[..., Any]) -> Callable[..., Any]:
    """Shrinks every position of all traffic towards the prior instead of its predecessor."""

    def compute(
        acceptance: AcceptanceEstimator, parent: AcceptanceCurve | None
    ) -> tuple[AcceptanceCurve, list[float]]:
        if parent is not None:
            curve, own_conditional = compute_curve(acceptance, parent)
            return curve, own_conditional
        settings, positions = acceptance._settings, acceptance.gamma_max
        prior = AcceptanceCurve([settings.prior_acceptance] * positions, [], [], [])
        curve, conditional = compute_curve(acceptance, prior)
        expected_accepted = [0.0, *np.cumsum(np.cumprod(conditional)).tolist()]
        weights = [settings.prior_exposures] * positions
        return AcceptanceCurve(
            conditional, curve.exposures, expected_accepted, weights
        ), conditional

    return compute


AS_IS = Mechanism("as is", "", "Everything is on.")

MECHANISMS = (
    Mechanism(
        "exploration", "exploration", "A few steps run other arms than the best one.",
        {"probe_share": 0.0},
    ),
    Mechanism(
        "probes for doubt", "exploration", "An arm whose value is uncertain is probed.",
        patches=(Patch(Explorer, "_most_informative_arm", _return_none),),
    ),
    Mechanism(
        "looks from gamma 0", "exploration", "While gamma = 0 runs, drafters are tried in turn.",
        patches=(Patch(Explorer, "_choose_probe_from_gamma_zero", _return_none),),
    ),
    Mechanism(
        "checks of gamma 0", "exploration", "gamma = 0 runs where its estimate may be wrong.",
        patches=(Patch(Explorer, "_gamma_zero_check_arm", _return_none),),
    ),
    Mechanism(
        "stale costs", "exploration", "An arm that looks expensive by old steps is measured again.",
        patches=(Patch(Explorer, "_stale_arm", _return_none),),
    ),
    Mechanism(
        "idle drafters' hope", "exploration",
        "An idle drafter may fit the traffic after a change that the running one does not show.",
        patches=(Patch(Explorer, "_idle_drafter_gain", _return_no_gain),),
    ),
    Mechanism(
        "step share of probes", "exploration", "Probes for doubt take 1.1 % of the steps at most.",
        {"probe_step_share": 1.0},
    ),
    Mechanism(
        "step share of looks", "exploration", "Looks from gamma 0 take 1.5 % of the steps at most.",
        {"look_step_share": 1.0},
    ),
    Mechanism(
        "calm budget", "exploration", "In calm traffic exploration has a third of its budget.",
        {"calm_budget_share": 1.0},
    ),
    Mechanism(
        "found factor", "exploration", "Looks that found better traffic get up to six times more.",
        {"look_found_factor_max": 1.0},
    ),
    Mechanism(
        "scaled credit", "exploration", "Without a profile the first credit is 0.75 steps.",
        patches=(Patch(Explorer, "__init__", _without_scaled_credit, wraps=True),),
    ),
    Mechanism(
        "switch margin", "choice", "Another arm has to promise 1 % more.", {"switch_margin": 0.0}
    ),
    Mechanism(
        "pay-back rule", "choice", "A change has to win back its cost within 2 seconds.",
        {"payback_seconds": _NEVER},
    ),
    Mechanism(
        "discounts", "choice", "Without a profile a longer draft has to pay in a bad case.",
        patches=(Patch(DiscountRule, "discounts", _return_none),),
    ),
    Mechanism(
        "reachable arms", "choice", "Without a profile draft lengths are probed one by one.",
        patches=(Patch(CostUncertainty, "reachable_arms", _return_all_arms),),
    ),
    Mechanism(
        "moderate CUSUM", "shifts", "With several drafters small changes are tested for, too.",
        patches=(
            Patch(
                traffic_state_tracker, "MODERATE_SHIFT",
                replace(MODERATE_SHIFT, limit_factor=_NEVER),
            ),
        ),
    ),
    Mechanism(
        "large CUSUM", "shifts", "A test over all positions finds large changes.",
        patches=(
            Patch(traffic_state_tracker, "LARGE_SHIFT", replace(LARGE_SHIFT, limit_factor=_NEVER)),
        ),
    ),
    Mechanism(
        "window test", "shifts", "A fast and a slow window that differ are a change.",
        {"shift_z": _NEVER},
    ),
    Mechanism(
        "all tests for shifts", "shifts", "Both CUSUM tests and the windows.",
        {"shift_z": _NEVER, "shift_alarm": _NEVER},
    ),
    Mechanism(
        "gradual changes", "shifts", "Shifts in one direction within 100 steps count as one.",
        settings={"gradual_shift_steps": -1},
    ),
    Mechanism(
        "shifts on moves", "shifts", "A move of the batch size has its own chance of a shift.",
        patches=(
            Patch(
                HazardEstimator, "shift_probability_on_move", property(_return_shift_probability)
            ),
        ),
    ),
    Mechanism(
        "unobserved better shifts", "shifts", "Better traffic found at gamma 0 is counted.",
        settings={"unobserved_detection_steps": -1},
    ),
    Mechanism(
        "rate of shifts", "shifts", "How often the traffic shifts is learnt.",
        patches=(Patch(HazardEstimator, "shift_probability", property(_return_prior_probability)),),
    ),
    Mechanism(
        "traffic memory", "memory", "Traffic that returns brings its curves.",
        patches=(Patch(TrafficStateTracker, "_begin_state", _restart_state),),
    ),
    Mechanism(
        "merging of states", "memory", "Remembered states that are alike become one.",
        patches=(Patch(traffic_state_tracker, "are_alike", _return_false),),
    ),
    Mechanism(
        "states by octave", "memory", "States remember at which batch sizes they occurred.",
        patches=(Patch(TrafficState, "octave_probabilities", _return_even_octaves),),
    ),
    Mechanism(
        "mistake rule", "memory", "Two states left soon in a row are new traffic.",
        settings={"mistakes_max": 1_000_000_000},
    ),
    Mechanism(
        "walk over positions", "acceptance", "A position is shrunk towards its predecessor.",
        patches=(Patch(AcceptanceEstimator, "_compute_curve", _without_walk, wraps=True),),
    ),
    Mechanism(
        "smooth walk", "acceptance", "Neighbouring positions may differ (off: they hardly do).",
        settings={"walk_exposures": _NEVER},
    ),
    Mechanism(
        "idle fading", "acceptance", "A position that is not observed loses evidence.",
        {"idle_steps": 1e12},
    ),
    Mechanism(
        "request classes", "acceptance", "Each reported class has its own estimates.",
        patches=(Patch(TrafficEstimator, "_observe_classes", _return_none),),
    ),
    Mechanism(
        "unused proposals", "acceptance", "Proposals that were not used are evidence, too.",
        patches=(Patch(AcceptanceEstimator, "observe_unused_proposals", _observe_idle_step),),
    ),
    Mechanism(
        "order of costs", "cost", "More work never costs less, in the table and as learnt.",
        patches=(
            Patch(CostOrder, "lower_to_order", _return_table),
            Patch(CostOrder, "restore_order", _return_table),
        ),
    ),
    Mechanism(
        "order of learnt costs", "cost", "Learnt costs out of order move older cells.",
        patches=(Patch(CostModel, "_restore_order", _return_none),),
    ),
    Mechanism(
        "live costs", "cost", "Steps correct the table's ratios (off: only its pace).",
        {"cost_drift_max_profiled": 1.0, "cost_drift_max_prior": 1.0},
    ),
    Mechanism(
        "neighbours' share", "cost", "A cell's error moves its neighbours by half.",
        settings={"neighbour_share": 0.0},
    ),
    Mechanism(
        "same cell is pace", "cost", "If one cell's time changes, that is the machine's pace.",
        patches=(Patch(CostModel, "_update_cell", _without_same_cell, wraps=True),),
    ),
    Mechanism(
        "pace variation", "cost", "How much the machine's pace varies is learnt.",
        settings={"pace_rate": 0.0},
    ),
    Mechanism(
        "leaps", "cost", "After a change of cell a large error is pace; a stale cell begins again.",
        settings={"leap_min": _NEVER},
    ),
    Mechanism(
        "surprise", "cost", "Errors on first visits raise the variance of the coefficients.",
        patches=(Patch(CostModel, "_variance_growth", _return_one),),
    ),
    Mechanism(
        "outlier confirmation", "cost", "A step far off has to be confirmed.",
        patches=(Patch(CostModel, "_confirmed_error", _return_error),),
    ),
    Mechanism(
        "disagreement", "cost", "Estimates that disagree make a check of gamma 0 due.",
        settings={"disagreement_max": 10.0},
    ),
    Mechanism(
        "fading of cells", "cost", "A cell that does not run loses its evidence.",
        settings={"cell_idle_steps": 1e12},
    ),
    Mechanism(
        "context by batch size", "cost", "Each batch size has its own mean context.",
        patches=(Patch(ContextByBatch, "by_bucket", _return_one_context),),
    ),
    Mechanism(
        "price of a switch", "cost", "The first step of another arm has a learnt extra cost.",
        patches=(Patch(SwitchPrice, "seconds", property(_return_no_seconds)),),
    ),
    Mechanism(
        "fit of catch-up costs", "cost", "Steps correct what waking a drafter costs.",
        patches=(Patch(CatchUpEstimator, "_update_price", _return_none),),
    ),
    Mechanism(
        "loss account", "losses", "The loss against plain decoding has an allowance.",
        patches=(
            Patch(LossAccount, "limits", _return_no_limits),
            Patch(LossAccount, "loss_budget_steps", property(_return_large_budget)),
            Patch(LossAccount, "first_run_budget_steps", property(_return_large_budget)),
        ),
    ),
    Mechanism(
        "limit on wake-ups", "losses", "Waking a drafter has to fit into the allowance.",
        patches=(Patch(LossAccount, "limits", _without_wake_up_limit, wraps=True),),
    ),
    Mechanism(
        "first runs", "losses", "An arm's first run may cost 8 plain steps.",
        patches=(
            Patch(LossAccount, "first_run_budget_steps", property(_return_loss_budget)),
        ),
    ),
    Mechanism(
        "gain share", "losses", "A change of drafter may cost half of what drafting gained.",
        {"exchange_gain_share": 0.0},
    ),
    Mechanism(
        "return share", "losses", "Probes may cost a tenth of the gain if traffic returns often.",
        {"return_gain_share": 0.0},
    ),
    Mechanism(
        "cautious pay-back", "losses", "A wake-up that 50 steps surely recover happens at once.",
        {"wake_up_payback_steps": 0.0},
    ),
    Mechanism(
        "rate of wake-ups", "losses", "Other wake-ups may cost 0.2 % of the steps.",
        {"wake_up_share": 0.0},
    ),
    Mechanism(
        "caution of the account", "losses", "With little evidence a deviation less is credited.",
        patches=(Patch(LossAccount, "_is_doubtful", _return_false),),
    ),
    Mechanism(
        "no margin in debt", "losses", "With half of the debt used gamma = 0 needs no margin.",
        patches=(Patch(LossAccount, "limits", _with_margin_in_debt, wraps=True),),
    ),
    Mechanism(
        "unsettled planning", "pace of plans", "Plans are made more often while costs are new.",
        {"unsettled_pause": 1.0},
    ),
    Mechanism(
        "plan at a new bucket", "pace of plans", "The first steps of a bucket make a plan at once.",
        patches=(Patch(CostModel, "is_new", _return_false),),
    ),
    Mechanism(
        "plan after a shift", "pace of plans", "A shift makes a plan at once, and more often then.",
        patches=(Patch(TrafficEstimator, "observe", _without_shift_signal, wraps=True),),
    ),
)  # fmt: skip

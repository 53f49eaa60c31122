"""Refuses, before an engine starts, what a pace cannot hold or cannot price."""

import os
from typing import Any

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import LOOKUP, OWN, SECOND, StepCosts

# Chains of drafts by serial passes, by the names that SGLang has for them.
_CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def unsupported_reason(
    args: Any, costs: StepCosts, *, second: bool, lookup: bool = False
) -> str | None:
    """Explains why an engine with these arguments cannot be paced; None when it can.

    args: SGLang's, resolved.  second: a DFlash drafter is loaded beside the engine's own.  lookup:
    a prompt lookup drafts beside it.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    view: Any = resolved_view(args)
    ranks = view.tp_size * view.pp_size * view.dp_size
    algorithm = view.speculative_algorithm
    obstacles = {
        f"it has {ranks} ranks, and only one scheduler can be held": ranks != 1,
        f"--disaggregation-mode {view.disaggregation_mode} is not supported": (
            view.disaggregation_mode != "null"
        ),
        "the overlap schedule begins a step before the last one's tokens are known; it needs "
        "--disable-overlap-schedule, and no CPU_ENGINE_OVERLAP": (
            not view.disable_overlap_schedule or os.environ.get("CPU_ENGINE_OVERLAP") == "1"
        ),
        f"--speculative-algorithm {algorithm} has no price": (
            algorithm is not None and algorithm not in _CHAINS
        ),
        f"--speculative-eagle-topk {view.speculative_eagle_topk} drafts trees, and only chains "
        "have a price": algorithm is not None and view.speculative_eagle_topk != 1,
        f"--max-running-requests {view.max_running_requests} exceeds the {_largest(costs)} "
        "sequences that are priced": (view.max_running_requests or 0) > _largest(costs),
    }
    found = next((reason for reason, is_so in obstacles.items() if is_so), None)
    return found or _missing_price(view, costs, second, lookup)


def _missing_price(view: Any, costs: StepCosts, second: bool, lookup: bool) -> str | None:
    priced = set(costs.surface.arms)
    missing = [gamma for gamma in _draft_lengths(view) if Arm(OWN, gamma) not in priced]
    if missing:
        return f"{costs.name} has no price for the draft lengths {missing}"
    if second and not any(arm.drafter == SECOND for arm in priced):
        return f"{costs.name} has no price for a second drafter (SPECULATION_DFLASH_MODEL_PATH)"
    if lookup and not any(arm.drafter == LOOKUP for arm in priced):
        return f"{costs.name} was loaded without a prompt lookup's price (SPECULATION_LOOKUP)"
    return None


def _draft_lengths(view: Any) -> list[int]:
    """The lengths that the engine prepares; the plugin answers for SGLang's adaptive mode."""
    if view.speculative_algorithm is None:
        return [0]
    if view.speculative_adaptive:
        from sglang.srt.speculative import adaptive_spec_params

        path = view.speculative_adaptive_config
        return list(adaptive_spec_params.resolve_candidate_steps_from_config(path))
    return [int(view.speculative_num_draft_tokens) - 1]


def _largest(costs: StepCosts) -> int:
    return costs.surface.max_batch_size

"""Finds the highest load that each policy serves within a latency bound.

The arrivals of an open loop are played faster or slower until the 99th percentile over requests of
the latency per token (from arrival to the last token, over the output tokens) is just within the
bound.  Under a load above the engine's capacity the waiting time grows, so the bound is missed.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from simulator.comparison import contestants
from simulator.comparison.oracle import by_request_factories, clairvoyant_factories
from simulator.comparison.truth import Truth
from simulator.engine import RunResult, simulate
from simulator.errors import InvalidInputError
from simulator.peers.sglang_adaptive import PeerUnavailableError
from simulator.policy import Policy
from simulator.results import SustainedLoad
from simulator.scenarios.scenario_file import Scenario
from simulator.workload import OpenLoop

# Speeds of the arrivals that are tried lie between 1/_FARTHEST and _FARTHEST.
_MAX_SPEED = 1024.0
# The load is found to within this factor.
_PRECISION = 1.01


def find_sustained_loads(
    scenario: Scenario, policies: Collection[str] | None, seed: int
) -> dict[str, SustainedLoad]:
    """Returns the load that each of the policies sustains, in the order of `policy_names`.

    policies: names, or None for all; a peer that cannot run is omitted.  The oracle sustains the
    highest load of any policy that knows the true values and of any static arm.  The peers' table
    is the best one for the original arrivals.  The load is 0 if the bound is missed even at the
    slowest arrivals, and that of the fastest arrivals tried if the bound always holds.

    Raises InvalidInputError for a scenario without a bound, for a closed loop, and for arrivals
    that all come at once.
    """
    bound, workload = scenario.sustained_tpot_p99_seconds, scenario.workload(seed)
    if bound is None or not isinstance(workload, OpenLoop):
        fault = "a sustained load needs arrivals and a bound on the latency per token"
        raise InvalidInputError(scenario.name, 0, fault)
    span = float(workload.arrival_seconds[-1])
    if span <= 0:
        raise InvalidInputError(scenario.name, 0, "all requests arrive at once: there is no rate")

    def run(policy: Policy, speed: float) -> RunResult:
        return simulate(
            _scale_arrivals(workload, speed), scenario.surface, policy, scenario.options, seed
        )

    def keeps_bound(factories: Sequence[contestants.Factory], speed: float) -> bool:
        return any(_p99(run(factory(), speed)) <= bound for factory in factories)

    truth = Truth(workload, scenario.surface)
    static_factories = contestants.static_factories(scenario.surface, truth.rules)
    factories_by_policy: dict[str, Sequence[contestants.Factory]] = {
        name: [static_factories[name]] for name in static_factories
    }
    known_factories = clairvoyant_factories(
        scenario.surface, scenario.options, truth.expected_by_pool(), truth.rules
    )
    factories_by_policy[contestants.ORACLE] = [
        *known_factories.values(),
        *static_factories.values(),
    ]
    by_request = by_request_factories(scenario, truth)
    factories_by_policy[contestants.BY_REQUEST] = [
        *by_request.values(),
        *factories_by_policy[contestants.ORACLE],
    ]
    factories_by_policy[contestants.OURS] = [lambda: contestants.make_controller(scenario)]
    selected = set(contestants.policy_names(scenario) if policies is None else policies)
    if selected - factories_by_policy.keys():
        static_runs = {name: run(factory(), 1.0) for name, factory in static_factories.items()}
        factories_by_policy |= {
            name: [peer] for name, peer in contestants.peer_factories(scenario, static_runs).items()
        }
    requests, tokens = workload.pool.requests, int(workload.pool.output_tokens.sum())
    load_by_policy = {}
    for name in [name for name in contestants.policy_names(scenario) if name in selected]:
        try:
            speed = _highest_speed(partial(keeps_bound, factories_by_policy[name]))
        except PeerUnavailableError:
            continue
        load_by_policy[name] = SustainedLoad(name, speed * requests / span, speed * tokens / span)
    return load_by_policy


def _scale_arrivals(workload: OpenLoop, speed: float) -> OpenLoop:
    return replace(
        workload,
        arrival_seconds=workload.arrival_seconds / speed,
        window_seconds=workload.window_seconds / speed,
    )


def _p99(result: RunResult) -> float:
    return float(np.percentile(result.latencies.per_token, 99))


def _highest_speed(keeps_bound: Callable[[float], bool]) -> float:
    """Returns the highest speed that keeps the bound; 0 if none does."""
    low = high = 1.0
    if keeps_bound(1.0):
        while keeps_bound(high := 2 * low):
            low = high
            if low >= _MAX_SPEED:
                return low
    else:
        while not keeps_bound(low := high / 2):
            high = low
            if high <= 1 / _MAX_SPEED:
                return 0.0
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        if keeps_bound(middle):
            low = middle
        else:
            high = middle
    return low

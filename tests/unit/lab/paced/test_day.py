"""The streams: the same for the same arguments, and what an oracle gains on them."""

import pytest

from lab.cpu_engine.pace.acceptance import DrawnAcceptance
from lab.cpu_engine.pace.step_costs import load_step_costs
from lab.paced.lost_time import compute_oracle
from lab.paced.traffic import (
    DAY,
    DAY_SEED,
    UNSEEN_DAY,
    UNSEEN_SEED,
    PhasePlan,
    as_workload,
    build_stream,
    own_curves,
)

H100 = "h100-llama3.1-8b"
GAMMAS = (0, 1, 2, 3, 4, 5, 7)
PLANS = (PhasePlan("a", ("code", "chat"), 4, 9, 60), PhasePlan("b", ("hard",), 2, 1, 40, 30))


def test_the_simulator_is_given_the_very_draws_of_the_engine():
    stream = build_stream("s", PLANS, 7)
    curves = own_curves()
    workload = as_workload(stream, curves, ["eagle3"])
    drawn = DrawnAcceptance(curves)
    for phase, planned in zip(workload.phases, stream.phases, strict=True):
        pool = phase.pool
        assert phase.concurrency == planned.concurrency
        assert pool.requests == len(planned.requests)
        for i, request in enumerate(planned.requests):
            begin, length = int(pool.offsets[i]), int(pool.output_tokens[i])
            assert length == request.new_tokens - 1
            assert pool.context_tokens[i] == len(request.prompt) + 1
            assert pool.label_names[pool.labels[i]] == request.domain
            draws = pool.accepted["eagle3"][begin : begin + length].tolist()
            assert draws == [drawn.accepted_at(request.rid, "eagle3", p) for p in range(length)]


@pytest.mark.parametrize(
    ("plans", "seed", "least"), [(DAY, DAY_SEED, 1.05), (UNSEEN_DAY, UNSEEN_SEED, 1.05)]
)
def test_no_static_arm_is_the_best_one_all_day(plans, seed, least):
    stream = build_stream("day", plans, seed)
    oracle = compute_oracle(stream, own_curves(), load_step_costs(H100, GAMMAS))
    assert oracle.gain >= least
    assert len(set(oracle.arms)) >= 3
    assert len(oracle.arms) == len(plans) == len(oracle.oracle.phases)
    assert oracle.oracle.rate > max(static.rate for static in oracle.statics.values())

"""What a table makes of a stream, counted by hand."""

import pytest

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import load_step_costs
from lab.paced.lost_time import compute_oracle
from lab.paced.traffic import PhasePlan, build_stream

CSV = "batch_size,num_draft_tokens,step_seconds\n1,1,0.010\n1,2,0.012\n2,1,0.011\n2,2,0.016\n"


def test_one_request_after_the_other(tmp_path):
    """Every draft is accepted in the first phase, and none in the second one."""
    path = tmp_path / "costs.csv"
    path.write_text(CSV)
    costs = load_step_costs(str(path), (0, 1), 2)
    plans = (PhasePlan("easy", ("sure",), 1, 3, 40), PhasePlan("hard", ("never",), 1, 8, 40))
    stream = build_stream("s", plans, 5)
    curves = {"sure": {"eagle3": (1.0,)}, "never": {"eagle3": (0.0,)}}
    oracle = compute_oracle(stream, curves, costs)
    requests = [phase.requests for phase in stream.phases]
    tokens = [[r.new_tokens - 1 for r in phase] for phase in requests]
    prefill = sum(costs.prefill_seconds(len(r.prompt) + 1) for phase in requests for r in phase)
    plain = 0.010 * (sum(tokens[0]) + sum(tokens[1])) + prefill
    assert oracle.statics[Arm("eagle3", 0)].rate == pytest.approx(
        (sum(tokens[0]) + sum(tokens[1])) / plain
    )
    rounds = sum(-(-n // 2) for n in tokens[0])
    drafted = 0.012 * (rounds + sum(tokens[1])) + prefill
    assert oracle.statics[Arm("eagle3", 1)].rate == pytest.approx(
        (sum(tokens[0]) + sum(tokens[1])) / drafted
    )
    assert [arm.gamma for arm in oracle.arms] == [1, 0]
    assert oracle.gain > 1.0

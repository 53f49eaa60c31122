"""What happens to the running requests when a phase begins."""

import numpy as np

from simulator.engine import EngineOptions, simulate
from simulator.peers.static import StaticPolicy
from simulator.workload import ClosedLoop, PhaseStart, RequestPool, WorkloadPhase
from tests.unit.simulator.small import pool, surface

STILL = EngineOptions(noise=0.0)


def steps_of(*phases, arm=0):
    """(batch size, kv tokens) of every step, and the steps at which phases begin."""
    run = simulate(ClosedLoop(phases), surface(), StaticPolicy(surface().arms, arm), STILL, 0)
    starts = [step for step, _ in run.trace.phase_starts]
    return list(zip(run.trace.batch_sizes, run.trace.kv_tokens, strict=True)), starts


def constant(context, accepted=0, output=1000, requests=64):
    """Requests of one length, of which every draft of `accepted` tokens is accepted."""
    lengths = np.full(requests, output, dtype=np.int64)
    return RequestPool(
        np.full(requests, context, dtype=np.int64),
        lengths,
        np.cumsum(lengths) - lengths,
        np.zeros(requests, dtype=np.int64),
        {"mtp": np.full(requests * output, accepted, dtype=np.uint8)},
    )


def test_replaced_requests_wait_and_continue_when_their_phase_returns():
    few, many = constant(10_000), constant(10)
    pair = (
        WorkloadPhase("few", few, 2, 20, PhaseStart.REPLACED),
        WorkloadPhase("many", many, 8, 80, PhaseStart.REPLACED),
    )
    steps, starts = steps_of(*pair * 3)
    assert starts == [0, 10, 20, 30, 40, 50]
    for i in range(30):
        turn, step = divmod(i, 10)
        # Every step gains one token for each sequence; what was set aside gains none.
        assert steps[20 * turn + step] == (2, 2 * (10_000 + i))
        assert steps[20 * turn + 10 + step] == (8, 8 * (10 + i))


def test_the_same_kind_in_another_batch_size_is_other_sequences():
    one = constant(100)
    pair = (
        WorkloadPhase("few", one, 2, 20, PhaseStart.REPLACED),
        WorkloadPhase("many", one, 8, 80, PhaseStart.REPLACED),
    )
    steps, _ = steps_of(*pair * 2)
    assert [size for size, _ in steps] == [2] * 10 + [8] * 10 + [2] * 10 + [8] * 10
    assert steps[20] == (2, 2 * 110)


def test_requests_that_change_over_stay_where_they_are():
    bad, good = constant(100, accepted=0), constant(100, accepted=3)
    phases = (
        WorkloadPhase("bad", bad, 4, 40),
        WorkloadPhase("good", good, 4, 160, PhaseStart.CHANGED),
        WorkloadPhase("bad", bad, 4, 40, PhaseStart.CHANGED),
    )
    steps, starts = steps_of(*phases, arm=2)
    assert starts == [0, 10, 20]
    kv = [kv for _, kv in steps]
    assert np.diff(kv[:11]).tolist() == [4] * 10
    assert np.diff(kv[10:21]).tolist() == [16] * 10
    assert np.diff(kv[20:]).tolist() == [4] * 9


def test_requests_of_a_drained_phase_finish_first():
    phases = (
        WorkloadPhase("long", constant(100, output=30), 8, 80),
        WorkloadPhase("short", constant(7, output=30), 2, 40),
    )
    steps, starts = steps_of(*phases)
    assert starts == [0, 10]
    assert [size for size, _ in steps[10:30]] == [8] * 20
    assert steps[30] == (2, 2 * 7)


def test_a_pool_is_stored_once_however_often_its_phase_returns():
    requests = pool()
    phases = [WorkloadPhase("a", requests, 2, 20, PhaseStart.REPLACED)] * 3
    from simulator.batch import Batch

    batch = Batch(ClosedLoop(tuple(phases)), surface())
    assert len(batch._accepted_by_drafter[0]) == len(requests.accepted["mtp"])

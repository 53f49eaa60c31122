"""The engine does what the policy chooses, counts what it does, and treats every policy alike."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import EngineOptions, Prefill, simulate
from simulator.errors import InvalidInputError
from simulator.peers.static import StaticPolicy
from simulator.policy import ArmChoice, IdleCounts
from simulator.workload import (
    ClosedLoop,
    OpenLoop,
    PhaseStart,
    RequestPool,
    WorkloadPhase,
)
from tests.unit.simulator.small import GAMMAS, pool, surface

STILL = EngineOptions(noise=0.0)


def closed(batch=4, tokens=2000, **changes):
    return ClosedLoop((WorkloadPhase("only", pool(**changes), batch, tokens),))


class Recorder:
    """Runs one arm, or what a list says, and keeps the reports."""

    def __init__(self, arms=(2,), asleep=True):
        self.arms, self.asleep, self.records, self.known_at = arms, asleep, [], []
        self.asked = 0

    def choose(self, batch_size, now):
        del batch_size, now
        self.asked += 1
        return ArmChoice(self.arms[(self.asked - 1) % len(self.arms)], self.asked, self.asleep)

    def observe(self, record, now):
        del now
        self.records.append(record)
        self.known_at.append(self.asked)


class Informed(Recorder):
    """Asks for three draft positions of every drafter that did not draft."""

    idle_positions = 3


@given(st.integers(0, 3), st.integers(1, 16), st.floats(0.0, 1.0), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_counts_add_up_and_tokens_follow_from_them(arm, batch, acceptance, seed):
    policy = Recorder((arm,))
    costs = surface()
    run = simulate(closed(batch, batch * 60, acceptance=acceptance), costs, policy, STILL, seed)
    for record in policy.records:
        assert len(record.counts) == GAMMAS[arm] + 1
        assert sum(record.counts) == record.batch_size <= batch
        assert record.step_seconds > 0
    assert run.tokens == pytest.approx(batch * 60)
    assert run.seconds == pytest.approx(sum(run.segment_seconds))
    assert run.tokens == pytest.approx(sum(run.segment_tokens))


def test_a_bank_is_replayed_position_by_position():
    # Accepted from position p on: 2 0 1 0 5 0 0 0.  With gamma 3 the steps start at 0, 3, 4, 8.
    accepted = np.array([2, 0, 1, 0, 5, 0, 0, 0], dtype=np.uint8)
    one = RequestPool(
        np.array([10]), np.array([8]), np.array([0]), np.array([0]), {"mtp": accepted}
    )
    policy = Recorder((2,))
    simulate(
        ClosedLoop((WorkloadPhase("p", one, 1, 8),)), surface(), policy, EngineOptions(0, 0.0), 0
    )
    positions = [record.counts.index(1) for record in policy.records]
    assert positions == [2, 0][: len(positions)]
    assert policy.asked == 3
    assert [r.kv_tokens for r in policy.records] == [10, 13]


def test_equal_seeds_give_equal_runs_and_another_seed_another_one():
    runs = [simulate(closed(), surface(), StaticPolicy(surface().arms, 2), EngineOptions(), s)
            for s in (1, 1, 2)]  # fmt: skip
    assert runs[0].seconds == runs[1].seconds
    assert runs[0].seconds != runs[2].seconds


def test_what_a_policy_does_does_not_move_the_noise_it_meets():
    options = EngineOptions(noise=0.2)
    first, second = Recorder((0,)), Recorder((3,))
    costs = surface()
    for policy in (first, second):
        simulate(closed(1, 400), costs, policy, options, 3)
    plain = [r.step_seconds for r in first.records]
    deep = [r.step_seconds for r in second.records]
    ratio = np.array(deep[:20]) / np.array(plain[:20])
    assert ratio == pytest.approx(np.full(20, ratio[0]), rel=0.02)


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_telemetry_is_as_late_as_the_engine_says(lag):
    policy = Recorder()
    simulate(closed(), surface(), policy, EngineOptions(lag=lag), 0)
    # Step s is known when step s + lag + 1 is about to be chosen.
    assert all(
        asked == record.step + lag + 1
        for record, asked in zip(policy.records, policy.known_at, strict=True)
    )


def test_a_drafter_that_slept_pays_for_what_it_missed():
    costs = surface(catch_up=1e-4)
    policy = Recorder((0, 0, 0, 0, 2))
    simulate(closed(4, 400), costs, policy, STILL, 0)
    plain, caught_up = Recorder((2,)), costs
    simulate(closed(4, 400), surface(), plain, STILL, 0)
    woken = next(r for r in policy.records if r.arm == 2)
    assert woken.flags.switched
    usual = caught_up.seconds[2, 4]
    assert woken.step_seconds - usual == pytest.approx(16 * 1e-4, rel=0.1)


def test_a_drafter_that_slept_pays_for_its_pass_once():
    costs = replace(surface(catch_up=1e-4), catch_up_pass_seconds=0.003)
    policy = Recorder((0, 0, 0, 0, 2, 2))
    simulate(closed(4, 400), costs, policy, STILL, 0)
    woken, next_one = [r for r in policy.records if r.arm == 2][:2]
    assert woken.step_seconds - costs.seconds[2, 4] == pytest.approx(0.003 + 16e-4, rel=0.1)
    assert next_one.step_seconds == pytest.approx(costs.seconds[2, 4], rel=0.02)


def test_a_drafter_kept_warm_pays_every_step_and_nothing_on_waking():
    costs = surface(catch_up=1e-4)
    policy = Recorder((0, 0, 0, 0, 2), asleep=False)
    simulate(closed(4, 400), costs, policy, EngineOptions(noise=0.0, warm_factor=1.1), 0)
    warm = policy.records[1].step_seconds
    assert warm == pytest.approx(1.1 * costs.seconds[0, 4], rel=0.02)
    woken = next(r for r in policy.records if r.arm == 2)
    assert woken.step_seconds == pytest.approx(costs.seconds[2, 4], rel=0.02)


def test_a_stale_drafter_drafts_badly_and_recovers():
    options = EngineOptions(noise=0.0, stale_after=3, stale_steps=4, stale_acceptance=0.0)
    policy = Recorder((0,) * 10 + (2,) * 20)
    simulate(closed(8, 1200, acceptance=0.95), surface(), policy, options, 0)
    after = [r.counts for r in policy.records[10:30]]
    assert after[0][0] == 8
    assert sum(k * n for k, n in enumerate(after[-1])) > 8


def test_outliers_come_as_often_and_as_long_as_asked():
    options = EngineOptions(noise=0.0, outlier_share=0.05, outlier_factor=10)
    policy = Recorder((0,))
    simulate(closed(1, 3000), surface(), policy, options, 0)
    wild = sum(r.step_seconds > 0.03 for r in policy.records) / len(policy.records)
    assert wild == pytest.approx(0.05, abs=0.02)


def test_prompts_in_chunks_take_time_and_mark_the_next_step():
    free, paid = Recorder(), Recorder()
    options = EngineOptions(noise=0.0, prefill=Prefill.CHUNKED, prefill_chunk_tokens=64)
    free_run = simulate(closed(), surface(), free, STILL, 0)
    paid_run = simulate(closed(), surface(), paid, options, 0)
    assert paid_run.seconds > free_run.seconds
    assert any(r.flags.after_gap for r in paid.records)
    assert not any(r.flags.after_gap for r in free.records)


def test_an_open_loop_waits_for_requests_and_serves_every_one():
    requests = pool(requests=20, output=30)
    times = np.arange(20, dtype=np.float64)
    policy = Recorder()
    run = simulate(OpenLoop(requests, times, 8, 5.0), surface(), policy, STILL, 0)
    assert run.tokens == 20 * 30
    # A request takes far less than a second: the engine is idle most of the time.
    assert run.seconds < 5
    assert len(run.segment_seconds) == 4


def test_a_phase_of_smaller_concurrency_lets_requests_finish():
    requests = pool()
    loop = ClosedLoop((WorkloadPhase("a", requests, 8, 200), WorkloadPhase("b", requests, 2, 100)))
    run = simulate(loop, surface(), StaticPolicy(surface().arms, 0), STILL, 0)
    sizes = np.array(run.trace.batch_sizes)
    assert sizes.max() == 8
    assert sizes[-1] == 2
    assert np.all(np.diff(sizes[sizes.argmax() :]) <= 0)
    assert [phase for _, phase in run.trace.phase_starts] == [0, 1]


def test_a_batch_that_the_costs_do_not_reach_is_refused():
    with pytest.raises(InvalidInputError, match="a batch of 64 is requested, costs reach 32"):
        simulate(closed(64), surface(), Recorder(), STILL, 0)


def test_a_drafter_of_whom_no_acceptance_is_known_is_refused():
    with pytest.raises(InvalidInputError, match="there is no acceptance for drafter 'eagle'"):
        simulate(closed(), surface(("eagle",)), Recorder(), STILL, 0)


def test_a_workload_without_end_is_given_up():
    with pytest.raises(InvalidInputError, match="has not ended after 50 steps"):
        simulate(closed(1, 10_000), surface(), Recorder(), EngineOptions(max_steps=50), 0)


@pytest.mark.parametrize(
    "bad", [{"lag": -1}, {"noise": -0.1}, {"outlier_share": 1.0}, {"prefill_chunk_tokens": 0}]
)
def test_options_that_cannot_be_are_refused(bad):
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        EngineOptions(**bad)


def of_requests(*outputs):
    """A pool whose requests have these lengths and accept nothing."""
    lengths = np.array(outputs, dtype=np.int64)
    nothing = {"mtp": np.zeros(lengths.sum(), dtype=np.uint8)}
    zeros = np.zeros_like(lengths)
    return RequestPool(zeros + 10, lengths, np.cumsum(lengths) - lengths, zeros, nothing)


REQUESTS = ClosedLoop(
    (
        WorkloadPhase("two at a time", of_requests(2, 4, 2), 2, None),
        WorkloadPhase("one more", of_requests(2), 2, None),
    )
)


def second_a_step(prefill=0.0):
    """Every step lasts a second, and every pass over prompts `prefill`."""
    costs = surface()
    return replace(
        costs,
        seconds=np.ones_like(costs.seconds),
        kv_seconds=np.zeros_like(costs.kv_seconds),
        prefill_seconds_per_token=0.0,
        prefill_pass_seconds=prefill,
    )


def test_requests_are_served_once_and_the_last_ones_run_beside_the_next_phase():
    """Steps: [a b] [a b], then c is the phase's last to come: [b c]; [b c], [d], [d]."""
    policy = Recorder((0,))
    run = simulate(REQUESTS, second_a_step(), policy, STILL, 0)
    assert run.steps == 6
    assert [r.batch_size for r in policy.records] == [2, 2, 2, 2, 1][: len(policy.records)]
    assert run.trace.batch_sizes == [2, 2, 2, 2, 1, 1]
    assert run.segment_tokens == [6.0, 4.0]
    assert run.segment_seconds == [3.0, 3.0]
    assert run.tokens == 2 + 4 + 2 + 2


def test_a_pass_over_prompts_costs_its_own_time_and_ends_a_phase_with_its_last_request():
    """Prompts are read before the first step (a and b), before the third (c), the fifth (d)."""
    options = replace(STILL, prefill=Prefill.CHUNKED, prefill_chunk_tokens=64)
    run = simulate(REQUESTS, second_a_step(10.0), Recorder((0,)), options, 0)
    assert run.trace.ends == [11.0, 12.0, 23.0, 24.0, 35.0, 36.0]
    assert run.segment_tokens == [4.0, 6.0]
    assert run.segment_seconds == [22.0, 14.0]


def two_drafters(mtp, eagle):
    """One request, and what either drafter would have accepted from each of its positions on."""
    accepted = {"mtp": np.array(mtp, dtype=np.uint8), "eagle": np.array(eagle, dtype=np.uint8)}
    return RequestPool(np.array([10]), np.array([len(mtp)]), np.array([0]), np.array([0]), accepted)


def informed(arms, pool, costs=None, **changes):
    policy = Informed(arms)
    loop = ClosedLoop((WorkloadPhase("p", pool, 1, len(pool.accepted["mtp"])),))
    both = surface(("mtp", "eagle"))
    simulate(loop, costs or both, policy, EngineOptions(lag=0, noise=0.0, **changes), 0)
    return policy.records


MTP_1, MTP_3, OFF_2, EAGLE_3 = 1, 2, 4, 6


def test_idle_drafters_are_scored_on_the_verified_tokens_and_no_further():
    """Arm by arm: verified tokens 2, 1 (a rejection) and 4; EAGLE would have had 3, 0 and 2."""
    records = informed(
        (MTP_1, MTP_3, MTP_3, MTP_3),
        two_drafters([1, 0, 0, 3, 0, 0, 0, 0, 0, 0], [3, 0, 0, 2, 0, 0, 0, 0, 0, 0]),
    )
    assert [record.counts.index(1) for record in records[:3]] == [1, 0, 3]
    assert [record.idle_counts for record in records[:3]] == [
        [IdleCounts("eagle", [1, 1, 0], [1, 1, 0])],
        [IdleCounts("eagle", [1, 0, 0], [0, 0, 0])],
        [IdleCounts("eagle", [1, 1, 1], [1, 1, 0])],
    ]


def test_without_a_draft_both_drafters_are_scored_on_the_one_token():
    records = informed((OFF_2, OFF_2, OFF_2), two_drafters([2, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]))
    assert records[0].idle_counts == [
        IdleCounts("mtp", [1, 0, 0], [1, 0, 0]), IdleCounts("eagle", [1, 0, 0], [0, 0, 0]),
    ]  # fmt: skip
    assert [idle.accepted[0] for idle in records[1].idle_counts] == [0, 1]


@given(st.integers(0, 7), st.integers(1, 16), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_what_an_idle_drafter_reached_and_accepted_can_be(arm, batch, seed):
    policy = Informed((arm,))
    work = ClosedLoop(
        (WorkloadPhase("p", pool(drafters=("mtp", "eagle"), seed=seed), batch, batch * 30),)
    )
    costs = surface(("mtp", "eagle"))
    simulate(work, costs, policy, STILL, seed)
    running = costs.arms[arm]
    names = [d for d in ("mtp", "eagle") if running.gamma == 0 or d != running.drafter]
    for record in policy.records:
        assert [idle.drafter for idle in record.idle_counts] == names
        for idle in record.idle_counts:
            assert idle.reached[0] == record.batch_size
            for k in range(3):
                assert 0 <= idle.accepted[k] <= idle.reached[k]
                assert k == 0 or idle.reached[k] <= idle.accepted[k - 1]


def test_evaluating_idle_drafters_costs_each_step_their_catch_up_and_no_switch_any():
    costs = replace(surface(("mtp", "eagle"), catch_up=1e-4), catch_up_pass_seconds=0.003)
    mtp, eagle = [3] * 60, [0] * 60
    arms = (MTP_3, MTP_3, MTP_3, EAGLE_3, OFF_2, OFF_2, MTP_3)
    records = informed(arms, two_drafters(mtp, eagle), costs, warm_factor=1.1)
    for record in records[:7]:
        gained = 1 + (record.counts.index(1))
        base = costs.seconds[record.arm, 1] * (1.1 if record.arm == OFF_2 else 1.0)
        evaluation = 0.003 + gained * 1e-4
        assert record.step_seconds == pytest.approx(base + evaluation, rel=1e-3)


def test_nobody_else_is_informed_or_pays():
    costs = surface(("mtp", "eagle"), catch_up=1e-4)
    policy = Recorder((MTP_3,))
    work = ClosedLoop((WorkloadPhase("p", two_drafters([3] * 60, [0] * 60), 1, 60),))
    simulate(work, costs, policy, STILL, 0)
    assert all(record.idle_counts == [] for record in policy.records)
    assert policy.records[1].step_seconds == pytest.approx(costs.seconds[MTP_3, 1], rel=1e-3)


def test_a_drafter_kept_in_step_is_never_stale():
    options = {"stale_after": 2, "stale_steps": 9, "stale_acceptance": 0.0}
    arms = (OFF_2,) * 6 + (MTP_3,) * 6
    records = informed(arms, two_drafters([3] * 60, [0] * 60), **options)
    assert [record.counts[3] for record in records[6:10]] == [1] * 4


def test_an_open_loop_notes_when_requests_came_spoke_and_ended():
    """One runs at a time: the second one waits for the first, the third comes later."""
    loop = OpenLoop(of_requests(3, 2, 1), np.array([0.0, 1.0, 9.5]), 1, 5.0)
    run = simulate(loop, second_a_step(), Recorder((0,)), STILL, 0)
    assert run.latencies.end_to_end.tolist() == [3.0, 4.0, 1.0]
    assert run.latencies.per_token.tolist() == [1.0, 2.0, 1.0]
    assert run.latencies.tpot.tolist() == [1.0, 1.0]
    assert run.score == pytest.approx(3 / 4.0)
    assert run.tokens_per_second == 1.0


def test_prompts_count_in_the_latency_and_not_in_the_time_per_output_token():
    options = replace(STILL, prefill=Prefill.CHUNKED, prefill_chunk_tokens=64)
    loop = OpenLoop(of_requests(4), np.array([0.0]), 1, 5.0)
    run = simulate(loop, second_a_step(10.0), Recorder((0,)), options, 0)
    assert run.latencies.end_to_end.tolist() == [14.0]
    assert run.latencies.tpot.tolist() == [1.0]


def test_a_closed_loop_is_scored_by_tokens_per_second():
    run = simulate(REQUESTS, second_a_step(), Recorder((0,)), STILL, 0)
    assert run.score == run.tokens_per_second == pytest.approx(10 / 6)
    # Admitted at 0, 0, 2, 4 and gone at 2, 4, 4, 6.
    assert run.latencies.end_to_end.tolist() == [2.0, 4.0, 2.0, 2.0]


@given(st.integers(0, 3), st.integers(1, 8), st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_every_request_of_an_open_loop_ends_and_none_before_it_spoke(arm, limit, seed):
    requests = pool(requests=30, output=12, seed=seed)
    times = np.sort(np.random.default_rng(seed).uniform(0, 0.5, 30))
    run = simulate(OpenLoop(requests, times, limit, 1.0), surface(), Recorder((arm,)), STILL, 0)
    assert len(run.latencies.end_to_end) == 30
    assert run.latencies.tpot.min() >= 0
    assert (run.latencies.end_to_end >= 11 * run.latencies.tpot).all()


class Prober(Recorder):
    """Probes in two of three seconds."""

    def choose(self, batch_size, now):
        return ArmChoice(0, probe_id=int(now) % 3)


def test_steps_with_a_probe_are_counted():
    run = simulate(REQUESTS, second_a_step(), Prober(), STILL, 0)
    # The steps begin at 0, 1, 2, 3, 4 and 5 seconds.
    assert (run.steps, run.probe_steps) == (6, 4)


class Seer(Recorder):
    """Keeps what it is shown."""

    def __init__(self, arms=(0,)):
        super().__init__(arms)
        self.shown = []

    def set_situation(self, situation):
        self.shown.append(situation)


def test_a_clairvoyant_policy_is_shown_what_runs_and_what_a_drafter_has_missed():
    kinds = replace(of_requests(2, 4, 2), kinds=np.array([1, 0, 1]))
    pools = (kinds, of_requests(2))
    loop = ClosedLoop(tuple(WorkloadPhase("", one, 2, None) for one in pools))
    seer = Seer()
    simulate(loop, surface(catch_up=1e-4), seer, STILL, 0)
    assert [list(there.running) for there in seer.shown] == [
        [1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]
    ]  # fmt: skip
    assert [there.segment for there in seer.shown] == [0, 0, 0, 1, 1, 1]
    assert [there.kv_tokens for there in seer.shown] == [20, 22, 22, 24, 10, 11]
    missed = [there.catch_up_seconds[0] for there in seer.shown]
    # No drafter runs: every step adds its tokens, and a drafter reads no more than what is there.
    assert missed == pytest.approx([0, 2e-4, 4e-4, 6e-4, 8e-4, 9e-4])


def test_a_change_at_once_takes_labels_kinds_and_prompts_that_wait_along():
    lengths = np.full(4, 6, dtype=np.int64)
    names = ("never", "always")

    def labelled(label):
        accepted = {"mtp": np.full(24, 7 * label, dtype=np.uint8)}
        marks = np.full(4, label, dtype=np.int64)
        return RequestPool(lengths, lengths, np.arange(4) * 6, marks, accepted, names, marks)

    phases = (
        WorkloadPhase("", labelled(0), 2, 8),
        WorkloadPhase("", labelled(1), 2, 16, PhaseStart.CHANGED),
    )
    seer = Seer((2,))
    options = replace(STILL, lag=0, prefill=Prefill.CHUNKED, prefill_chunk_tokens=6)
    simulate(ClosedLoop(phases), surface(), seer, options, 0)
    for record in seer.records:
        ((name, counts),) = record.classes
        accepting = counts.index(max(counts)) > 0
        assert accepting == (name == "always")
    assert {name for record in seer.records for name, _ in record.classes} == set(names)


def test_requests_without_a_label_are_in_no_class_beside_labelled_ones():
    plain = pool(requests=8)
    labelled = replace(plain, labels=np.arange(8) % 2, label_names=("a", "b"))
    phases = (WorkloadPhase("", plain, 2, 200), WorkloadPhase("", labelled, 2, 200))
    policy = Recorder()
    simulate(ClosedLoop(phases), surface(), policy, STILL, 0)
    names = [{name for name, _ in record.classes} for record in policy.records]
    assert names[0] == set()
    assert set().union(*names) == {"a", "b"}

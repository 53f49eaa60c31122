"""The real SGLang, steered by a scripted sidecar over real gRPC."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from lab.cpu_engine.serve import with_cpu_defaults
from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.engine_pb2 import DRAFTER_KIND_MTP, StepReport
from tests.support.engine import DRAFT, EAGLE3, TARGET, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import (
    LENGTHS,
    PLAYS_MAX,
    PROMPTS,
    SINGLE_LENGTH,
    SINGLE_PROMPT,
    accepted_after_prefill,
    compare_rows,
    play,
    play_until,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 2, 3, 5, 7)
# gamma 0 asleep and awake among the others, every arm next to different ones.
CYCLE = (
    (3, False),
    (0, True),
    (0, True),
    (5, False),
    (0, False),
    (1, False),
    (0, True),
    (7, False),
)


def cycle(count: int) -> tuple[int, bool]:
    # Two reports for each, because a busy machine may skip a plan.
    return CYCLE[count // 2 % len(CYCLE)]


@pytest.fixture(scope="module")
def engine(
    plain: dict[str, list[list[int]]],
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """Only after the plain one has gone, so that two engines never run at once."""
    variables = {
        **sidecar.variables,
        "SPECULATION_ENGINE_ID": "tested",
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
        "SPECULATION_GRACE_SECONDS": "0.2",
    }
    arguments = with_cpu_defaults([*EAGLE3, "--disable-radix-cache"])
    folder = tmp_path_factory.mktemp("steered")
    # Started as on a GPU, its processes spawned: the other tests' are forked.
    with running_engine(folder, arguments, variables, "sglang.launch_server") as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_it_introduces_itself(engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    spec = sidecar.introductions[0]
    assert (spec.engine_id, spec.max_batch_size) == ("tested", 16)
    drafter = spec.drafters[0]
    assert (drafter.name, drafter.kind) == ("eagle3", DRAFTER_KIND_MTP)
    assert tuple(drafter.gammas) == GAMMAS
    assert drafter.model == str(DRAFT)
    assert spec.capabilities.can_sleep
    assert spec.capabilities.overlap_steps == 0
    fingerprint = spec.fingerprint
    assert fingerprint.target_model == str(TARGET)
    assert (fingerprint.engine, fingerprint.dtype) == ("sglang", "float32")
    assert fingerprint.tensor_parallel_size == fingerprint.data_parallel_size == 1
    assert list(fingerprint.graph_batch_sizes) == []
    assert spec.shape.hidden_size == 128
    layers = spec.shape.attention[0]
    assert layers.layers == 6
    full = layers.grouped_query
    assert (full.query_heads, full.kv_heads, full.head_dim) == (4, 2, 32)
    # Projections, gated MLP and norms of a layer; the last norm.
    layer = 128 * (4 + 2 * 2) * 32 + 128 * 128 + 3 * 128 * 384 + 2 * 128 + 2 * 32
    assert spec.shape.dense_params == 6 * layer + 128
    assert (spec.shape.bytes_per_weight, spec.shape.bytes_per_kv) == (4.0, 4.0)
    # One layer that reads two hidden states, the fusion of three, four norms, its own head.
    own = 256 * 256 + 128 * 128 + 3 * 128 * 384 + 3 * 128 * 128 + 4 * 128 + 1024 * 128
    assert drafter.shape.dense_params == own
    assert drafter.shape.kv_bytes_per_token == 4 * 2 * 2 * 32


def test_every_token_is_plain_decodings_while_gamma_changes_with_every_plan(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    def every_arm_and_switches(reports: list[StepReport]) -> bool:
        switches = sum(report.flags.switched for report in reports)
        return {report.gamma for report in reports} == {0, 1, 3, 5, 7} and switches > 5

    play_until(engine, sidecar, cycle, every_arm_and_switches, plain["batch"])


def test_reports_reconcile_with_sglangs_own_counters(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    answers, reports = play(engine, sidecar, cycle)
    assert sum(r.batch_size for r in reports) == sum(a.meta["spec_verify_ct"] for a in answers)
    counted: Counter[int] = Counter()
    for report in reports:
        assert len(report.accepted_counts) == report.gamma + 1
        assert sum(report.accepted_counts) == report.batch_size
        counted.update(dict(enumerate(report.accepted_counts)))
    by_sglang: Counter[int] = Counter()
    for answer in answers:
        by_sglang.update(dict(enumerate(answer.meta["spec_correct_drafts_histogram"])))
    assert +counted == +by_sglang
    steps = [report.step for report in reports]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_what_is_reported_is_what_the_plan_asked_for(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    def many_plans_and_every_gamma(reports: list[StepReport]) -> bool:
        plans = {report.plan_epoch for report in reports}
        return len(plans) > 10 and {report.gamma for report in reports} == set(GAMMAS)

    script = [(gamma, False) for gamma in GAMMAS]
    reports = play_until(
        engine, sidecar, lambda count: script[count % len(script)],
        many_plans_and_every_gamma, plain["batch"],
    )  # fmt: skip
    for report in reports:
        assert report.drafter == "eagle3"
        assert report.gamma == sidecar.arms[report.plan_epoch][0]
        assert not report.flags.unsteered
        assert not report.flags.eager_fallback


def test_the_context_is_counted_before_each_step(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    _, reports = play(engine, sidecar, cycle, SINGLE_PROMPT, [64])
    expected = len(SINGLE_PROMPT[0])
    for report in reports:
        assert report.kv_tokens == expected
        accepted = next(k for k, count in enumerate(report.accepted_counts) if count)
        expected += accepted + 1


def test_only_steps_after_a_prefill_are_flagged_as_after_a_gap(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    _, reports = play(engine, sidecar, lambda _: (3, False), SINGLE_PROMPT, [64])
    assert [report.flags.after_gap for report in reports] == [True, *[False] * (len(reports) - 1)]
    assert all(0 < report.step_seconds < 10 for report in reports)


def accepted_by_context(reports: Sequence[StepReport], gamma: int) -> dict[int, int]:
    """Accepted drafts of a single sequence's steps at that gamma, by its context length."""
    return {
        report.kv_tokens: next(k for k, count in enumerate(report.accepted_counts) if count)
        for report in reports
        if report.gamma == gamma
    }


def test_a_drafter_that_slept_drafts_what_it_would_have_drafted_awake(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    def naps(count: int) -> tuple[int, bool]:
        # Of 2, 5 and 29 steps: shorter and longer than the buffer of 12.
        position = count % 48
        return (
            (0, True) if position in (4, 5) or 10 <= position < 15 or position >= 19 else (3, False)
        )

    def woken(count: int) -> tuple[int, bool]:
        return (3, False) if count % 2 else (0, False)

    awake: dict[int, int] = {}
    for script in (lambda _: (3, False), woken):
        answers, reports = play(engine, sidecar, script, SINGLE_PROMPT, [SINGLE_LENGTH])
        assert answers[0].tokens == plain["alone"][0]
        awake |= accepted_by_context(reports, gamma=3)

    before = engine.internal_state()["speculation_controller"]["sleep"]
    woke: dict[int, int] = {}
    # How long it sleeps, and which contexts it meets, depends on when plans come.
    unread = 0
    for _ in range(PLAYS_MAX):
        # At most one buffer of a play: that of the request's end.
        unread += 12
        answers, reports = play(engine, sidecar, naps, SINGLE_PROMPT, [SINGLE_LENGTH])
        assert answers[0].tokens == plain["alone"][0]
        woke |= accepted_by_context(reports, gamma=3)
        both = sorted(awake.keys() & woke.keys())
        after = engine.internal_state()["speculation_controller"]["sleep"]
        slept = {name: after[name] - before[name] for name in after}
        if slept["slept"] > 12 * 3 and len(both) > 10:
            break
    assert slept["slept"] > 12 * 3
    assert slept["caught_up"] >= slept["slept"] - unread
    assert slept["passes"] > slept["caught_up"] / 12
    assert slept["cold"] == 0

    assert len(both) > 10
    assert any(woke[context] > 0 for context in both)
    assert {context: woke[context] for context in both} == {
        context: awake[context] for context in both
    }


def test_requests_that_join_and_leave_a_sleeping_batch_are_caught_up(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    """Each row of each step accepts what it accepts where no drafter ever slept."""

    def naps(count: int) -> tuple[int, bool]:
        return (3, False) if count % 20 < 4 else (0, True)

    awake = accepted_after_prefill(engine, sidecar, plain["batch"], gamma=3)
    # More than run at once: the last ones join when others have left.
    requests = [
        (prompt, min(length, LENGTHS[prompt])) for length in (20, 40, 60) for prompt in range(8)
    ]
    prompts = [PROMPTS[prompt] for prompt, _ in requests]
    lengths = [length for _, length in requests]
    expected = [plain["batch"][prompt][:length] for prompt, length in requests]
    before = engine.internal_state()["speculation_controller"]["sleep"]
    compared = wrong = 0
    for _ in range(PLAYS_MAX):
        answers, reports = play(engine, sidecar, naps, prompts, lengths)
        assert [answer.tokens for answer in answers] == expected
        rows, others = compare_rows(requests, reports, awake, gamma=3)
        compared, wrong = compared + rows, wrong + others
        after = engine.internal_state()["speculation_controller"]["sleep"]
        caught_up = after["caught_up"] - before["caught_up"]
        if compared > 200 and caught_up > 200:
            break
    assert after["cold"] == 0
    assert compared > 200
    assert caught_up > 200
    # Where two tokens are almost equally likely, rounding decides.
    assert wrong <= compared // 30


def test_the_server_says_how_it_is_steered(engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    play(engine, sidecar, cycle)
    state = engine.internal_state()
    status = state["speculation_controller"]
    assert (status["source"], status["sidecar"], status["reporting"]) == ("PLAN", "STEERING", True)
    eventually(
        lambda: len(sidecar.reports) == status["reports_sent"], description="every report has come"
    )
    assert status["reports_dropped"] == status["reports_invalid"] == status["packets_refused"] == 0
    # The switch keeps SGLang's own readback up to date.
    assert state["speculative_num_steps"] == sidecar.reports[-1].gamma
    assert state["speculative_num_draft_tokens"] == sidecar.reports[-1].gamma + 1
    assert "Switch adaptive runtime state" not in engine.log.read_text()


def test_without_a_sidecar_the_engine_goes_on_and_is_steered_again_later(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    sidecar.lease_ms = 100
    play(engine, sidecar, lambda _: (7, False), SINGLE_PROMPT, [32])
    sidecar.stop()

    def alone() -> bool:
        answers = engine.generate(SINGLE_PROMPT, [SINGLE_LENGTH])
        assert answers[0].tokens == plain["alone"][0]
        status = engine.internal_state()["speculation_controller"]
        return (status["source"], status["sidecar"]) == ("SAFE_DEFAULT", "AWAY")

    # The plan may last for longer than an answer, and the agent may be late to say that it is over.
    eventually(alone, description="the engine runs without a lease, and knows why")
    # The startup draft length is the safe one: the middle of the list.
    assert engine.internal_state()["speculative_num_steps"] == 3
    assert "the sidecar does not steer: safe-default" in engine.log.read_text()

    sidecar.lease_ms = 60_000
    introduced = len(sidecar.introductions)
    sidecar.start()
    eventually(lambda: len(sidecar.introductions) > introduced, description="introduced again")
    sidecar.run(lambda _: (5, False))

    def steered_again() -> bool:
        answers = engine.generate(SINGLE_PROMPT, [48])
        assert answers[0].tokens == plain["alone"][0][:48]
        last = sidecar.reports[-1]
        return last.gamma == 5 and not last.flags.unsteered

    eventually(steered_again, description="a step under the new plan")
    assert any(report.flags.unsteered for report in sidecar.reports)

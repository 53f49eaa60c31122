import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine.decision import BoundState
from controller.core.engine_spec import (
    MAX_BATCH_SIZE,
    MAX_GAMMA,
    Arm,
    Capabilities,
    DrafterSpec,
    EngineSpec,
    Fingerprint,
    Mixture,
)
from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import (
    DrafterKind,
    DrafterShape,
    Experts,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    ModelShape,
)
from controller.core.plan import Plan, PlanRow, Probe, Reason, Regime, RegimeMode
from controller.core.planning.token_time import TokenTimeBound
from controller.core.step_report import (
    MAX_WAITING_TOKENS,
    MIN_STEP_SECONDS,
    ClassCounts,
    ProposalCounts,
    RowGroup,
    StepFlags,
    StepReport,
)
from controller.wire.engines import engine_from_proto, engine_to_proto
from controller.wire.explanations import (
    ArmValue,
    Explanation,
    PastTraffic,
    PositionEstimate,
    explanation_to_proto,
)
from controller.wire.plans import plan_to_proto, reason_to_proto
from controller.wire.reports import report_from_proto, report_to_proto
from speculation.v1 import engine_pb2, plan_pb2, service_pb2

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)


def ascending(low: int, high: int, least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    values = st.lists(st.integers(low, high), min_size=least, max_size=8, unique=True)
    return values.map(lambda numbers: tuple(sorted(numbers)))


fingerprints = st.builds(
    Fingerprint,
    *(names for _ in range(7)),
    tensor_parallel_size=st.integers(1, 64),
    data_parallel_size=st.integers(1, 64),
    attention_backend=names,
    graph_batch_sizes=ascending(1, 512),
    shim_version=names,
)
size = st.integers(1, 2**31)
weight = st.floats(0.25, 8.0)
experts = st.none() | st.builds(
    Experts, size, st.just(64), st.integers(1, 64), st.integers(0, 4), size
)
attention = st.one_of(
    st.builds(
        lambda kv, n, dim: GroupedQueryAttention(kv * n, kv, dim), *[st.integers(1, 128)] * 3
    ),
    st.builds(LatentAttention, size, size, st.integers(0, 512)),
    st.builds(LinearAttention, st.floats(1, 1e9), st.floats(0, 1e9)),
)
layers = st.lists(st.tuples(attention, st.integers(1, 200)), min_size=1, max_size=3).map(tuple)
model_shapes = st.builds(ModelShape, size, size, layers, size, experts, weight, weight)
drafter_shapes = {
    DrafterKind.MTP: st.builds(DrafterShape, st.just(DrafterKind.MTP), size, experts),
    DrafterKind.DFLASH: st.builds(
        DrafterShape, st.just(DrafterKind.DFLASH), size, experts, st.integers(1, 64), weight, weight
    ),
    DrafterKind.NGRAM: st.just(DrafterShape(DrafterKind.NGRAM)),
}


@st.composite
def drafters(draw: st.DrawFn) -> DrafterSpec:
    kind = draw(st.sampled_from(DrafterKind).filter(lambda kind: kind is not DrafterKind.MIXTURE))
    shapes = st.none() | drafter_shapes.get(kind, st.none())
    return DrafterSpec(
        draw(names.filter(lambda name: bool(name) and name.isprintable())),
        kind,
        draw(ascending(0, MAX_GAMMA, least=1)),
        draw(names),
        draw(names),
        draw(shapes),
    )


engines = st.builds(
    EngineSpec,
    st.from_regex(r"\A[A-Za-z0-9._:-]{1,128}\Z"),
    fingerprints,
    st.lists(drafters(), min_size=1, max_size=3, unique_by=lambda d: d.name).map(tuple),
    st.integers(1, MAX_BATCH_SIZE),
    st.builds(Capabilities, *(st.booleans() for _ in range(4)), overlap_steps=st.integers(0, 4)),
    st.none() | model_shapes,
)


_PROPOSALS = (
    ProposalCounts("ngram", 0, (1, 0)),
    ProposalCounts("ngram", 3, (0, 0, 0), (0, 1)),
    ProposalCounts("mtp", 0, (0, 1)),
)


NOBODY = RowGroup("mtp", 0, (0,), ended=True)


@st.composite
def reports(draw: st.DrawFn) -> StepReport:
    counts = draw(st.lists(st.integers(0, 100), min_size=1, max_size=9).filter(any))
    # Two classes and a rest of none.
    parts = [[n // (2 + i) - n // 7 for n in counts] for i in range(2)]
    classes = [ClassCounts(f"class-{i}", tuple(p)) for i, p in enumerate(parts) if any(p)]
    sure = st.lists(
        st.floats(0, 1, width=32), min_size=len(counts) - 1, max_size=len(counts) - 1
    ).map(tuple)
    return StepReport(
        draw(uint64),
        sum(counts),
        draw(uint64),
        draw(names),
        len(counts) - 1,
        tuple(counts),
        draw(st.floats(MIN_STEP_SECONDS, 3600)),
        draw(st.builds(StepFlags, *(st.booleans() for _ in range(5)))),
        draw(uint64),
        draw(uint64),
        draw(st.sampled_from([(), tuple(classes)])),
        draw(st.just(()) | sure),
        groups=draw(
            st.sampled_from([(), (RowGroup("mtp", len(counts) - 1, tuple(counts)), NOBODY)])
        ),
        delivered_tokens=draw(st.none() | st.integers(0, sum(counts))),
        waiting_prompt_tokens=draw(st.none() | st.integers(0, MAX_WAITING_TOKENS)),
        proposals=draw(st.sampled_from([(), _PROPOSALS])) if sum(counts) > 1 else (),
        prefill_tokens=draw(st.integers(0, 1 << 24)),
        learnt_from=draw(st.none() | st.integers(0, 1 << 24)),
    )


def test_a_mixture_survives_the_wire():
    spec = EngineSpec(
        "engine", Fingerprint("model"),
        (
            DrafterSpec("mtp", DrafterKind.MTP, (0, 1, 3)),
            DrafterSpec("ngram", DrafterKind.NGRAM, (1, 3)),
            DrafterSpec(
                "mtp+ngram", DrafterKind.MIXTURE, (1, 3), mixture=Mixture("mtp", "ngram")
            ),
        ),
        8, Capabilities(draft_lag=1),
    )  # fmt: skip
    wire = engine_to_proto(spec).SerializeToString()
    assert engine_from_proto(engine_pb2.EngineSpec.FromString(wire)) == spec


@given(engines)
def test_an_engine_survives_the_wire(spec: EngineSpec):
    wire = engine_to_proto(spec).SerializeToString()
    assert engine_from_proto(engine_pb2.EngineSpec.FromString(wire)) == spec


@given(reports())
def test_a_report_survives_the_wire(report: StepReport):
    wire = report_to_proto(report).SerializeToString()
    assert report_from_proto(engine_pb2.StepReport.FromString(wire)) == report


def test_parallel_sizes_that_are_not_said_are_one():
    message = engine_pb2.EngineSpec(
        engine_id="e",
        drafters=[engine_pb2.Drafter(name="d", kind=engine_pb2.DRAFTER_KIND_MTP, gammas=[0])],
        max_batch_size=1,
    )
    fingerprint = engine_from_proto(message).fingerprint
    assert (fingerprint.tensor_parallel_size, fingerprint.data_parallel_size) == (1, 1)


@pytest.mark.parametrize("kind", [0, 99])
def test_a_drafter_of_a_kind_that_is_not_known_is_refused(kind: int):
    message = engine_pb2.EngineSpec(
        engine_id="e",
        drafters=[engine_pb2.Drafter(name="d", kind=kind, gammas=[0])],  # type: ignore[arg-type]
        max_batch_size=1,
    )
    with pytest.raises(InvalidEngineError, match=rf"drafter 'd': kind {kind} is unspecified or"):
        engine_from_proto(message)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_the_value_of_its_name(reason: Reason):
    assert plan_pb2.Reason.Name(reason_to_proto(reason)) == f"REASON_{reason.name}"


@pytest.mark.parametrize("mode", RegimeMode)
def test_every_regime_has_the_value_of_its_name(mode: RegimeMode):
    plan = Plan(1, (), Regime(mode, 7), 1.0, Reason.EXPLOIT, "")
    regime = plan_to_proto(plan).regime
    assert (plan_pb2.RegimeMode.Name(regime.mode), regime.stride) == (
        f"REGIME_MODE_{mode.name}",
        7,
    )


PLAN = Plan(
    3,
    (
        PlanRow(4, Arm("mtp", 3), Reason.EXPLOIT, Probe(9, Arm("mtp", 5), 8)),
        PlanRow(16, Arm("mtp", 0), Reason.HOLD, drafter_asleep=True),
    ),
    Regime(),
    2.5,
    Reason.PROBE,
    "because",
)


def test_a_plan_goes_out_whole():
    message = plan_to_proto(PLAN)
    assert (message.epoch, message.lease_ms, message.reason_detail) == (3, 2500, "because")
    assert message.reason == plan_pb2.REASON_PROBE
    first, second = message.rows
    assert (first.max_batch_size, first.drafter, first.gamma) == (4, "mtp", 3)
    assert (first.reason, first.drafter_asleep) == (plan_pb2.REASON_EXPLOIT, False)
    assert (first.probe.probe_id, first.probe.drafter) == (9, "mtp")
    assert (first.probe.gamma, first.probe.steps) == (5, 8)
    assert not second.HasField("probe")
    assert (second.max_batch_size, second.gamma, second.drafter_asleep) == (16, 0, True)


def test_a_lease_is_never_rounded_to_nothing():
    plan = Plan(1, PLAN.rows, Regime(), 1e-5, Reason.LEASE, "")
    assert plan_to_proto(plan).lease_ms == 1


def test_an_explanation_goes_out_whole():
    explanation = Explanation(
        "e",
        4,
        PLAN,
        (
            ArmValue(
                Arm("mtp", 3),
                1.5,
                0.01,
                1000.0,
                1100.0,
                chosen=True,
                extrapolated=True,
                cost_drift=1.25,
                catch_up_seconds=0.003,
                seconds_per_token=0.004,
            ),
        ),
        (PositionEstimate("mtp", 1, 0.75, 120.0, "code"),),
        "0123456789abcdef",
        0.1,
        0.005,
        700.0,
        Arm("mtp", 5),
        "goodput",
        12,
        0.5,
        0.25,
        3,
        40,
        2,
        "roofline",
        probe_steps=31,
        switch_seconds=0.0002,
        resembles=PastTraffic(90.0, 30.0, 2),
        traffic_states=3,
        bound=BoundState(TokenTimeBound(0.02, "slow"), 0.004, True, Arm("mtp", 5), 48),
    )
    message = explanation_to_proto(explanation)
    assert message == service_pb2.ExplainResponse(
        engine_id="e",
        batch_size=4,
        plan=plan_to_proto(PLAN),
        arms=[
            service_pb2.ArmExplanation(
                drafter="mtp",
                gamma=3,
                expected_accepted=1.5,
                step_seconds=0.01,
                tokens_per_second=1000.0,
                optimistic_tokens_per_second=1100.0,
                chosen=True,
                extrapolated=True,
                cost_drift=1.25,
                catch_up_seconds=0.003,
                seconds_per_token=0.004,
            )
        ],
        positions=[
            service_pb2.PositionExplanation(
                drafter="mtp",
                position=1,
                conditional_acceptance=0.75,
                exposures=120.0,
                label="code",
            )
        ],
        profile_id="0123456789abcdef",
        margin=0.1,
        probe_share=0.005,
        kv_tokens_per_sequence=700.0,
        runner_up_drafter="mtp",
        runner_up_gamma=5,
        policy="goodput",
        probes=12,
        probe_lost_seconds=0.5,
        probe_credit_seconds=0.25,
        shifts=3,
        switches=40,
        cost_outliers=2,
        probe_steps=31,
        switch_seconds=0.0002,
        resembles=service_pb2.PastTraffic(began_seconds_ago=90.0, ended_seconds_ago=30.0, visits=2),
        traffic_states=3,
        prior="roofline",
        bound=service_pb2.TokenTimeBound(
            seconds=0.02,
            override_id="slow",
            expected_seconds=0.004,
            attainable=True,
            excluded_drafter="mtp",
            excluded_gamma=5,
            kept_up_to=48,
        ),
    )

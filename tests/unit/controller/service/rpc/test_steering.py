import asyncio
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.core.clock import VirtualClock
from controller.core.step_report import StepReport
from controller.service.net.errors import ShuttingDownError
from controller.wire.engines import engine_from_proto
from speculation.v1 import engine_pb2, plan_pb2, service_pb2
from tests.support.service_harness import (
    SteerClient,
    engine_message,
    failure,
    make_profile,
    report_message,
    running_sidecar,
    secret_of,
    step_seconds,
    wait_until,
    with_timeout,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
OUT_OF_RANGE = grpc.StatusCode.OUT_OF_RANGE

# What a report can get wrong (sent after step 10 was used), and what has to be said about it.
BAD_REPORTS: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "histogram sum": ({"accepted_counts": [1, 1, 1]}, INVALID, "do not sum to batch_size 4"),
    "histogram length": ({"accepted_counts": [2, 2]}, INVALID, "has 2 entries, gamma 2 needs 3"),
    "no histogram": ({"accepted_counts": []}, INVALID, "has 0 entries"),
    "gamma not introduced": (
        {"gamma": 4, "accepted_counts": [4, 0, 0, 0, 0]},
        OUT_OF_RANGE,
        "gamma 4 is out of range for drafter 'mtp': this engine introduced [0, 1, 2, 3]",
    ),
    "gamma beyond all": ({"gamma": 4_000_000_000}, INVALID, "gamma 4000000000 must be in [0, 64]"),
    "unknown drafter": ({"drafter": "eagle9"}, INVALID, "unknown drafter 'eagle9'"),
    "NaN time": ({"step_seconds": math.nan}, INVALID, "step_seconds nan is not a positive time"),
    "infinite time": ({"step_seconds": math.inf}, INVALID, "step_seconds inf is not"),
    "negative time": ({"step_seconds": -0.01}, INVALID, "step_seconds -0.01 is not"),
    "no time": ({"step_seconds": 0.0}, INVALID, "step_seconds 0.0 is not"),
    "classes beyond the batch": (
        {"classes": 2 * [engine_pb2.ClassCounts(label="a", accepted_counts=[1, 1, 2])]},
        INVALID,
        "2 classes, unique ones",
    ),
    "confidence above one": ({"confidences": [0.5, 1.5]}, INVALID, "are not 2 probabilities"),
    "empty batch": ({"batch_size": 0, "accepted_counts": [0, 0, 0]}, INVALID, "batch_size 0"),
    "step going back": ({"step": 3}, PRECONDITION, "step 3 does not follow step 10"),
    "a queue without end": (
        {"waiting_prompt_tokens": 2**63},
        INVALID,
        "waiting_prompt_tokens 9223372036854775808",
    ),
    "step repeated": ({"step": 10}, PRECONDITION, "step 10 does not follow step 10"),
}
bad_reports = pytest.mark.parametrize(
    ("changes", "code", "text"), BAD_REPORTS.values(), ids=BAD_REPORTS.keys()
)


async def test_an_introduction_opens_a_session_with_a_plan_from_a_marked_prior(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = service_pb2.IntroduceRequest(engine=engine_message())
        answer = await with_timeout(running.speculation.Introduce(request))
    assert len(answer.session_id) == 32
    assert answer.plan.epoch == 1
    assert answer.plan.lease_ms == 5000
    assert answer.plan.rows[-1].max_batch_size == 16
    assert answer.plan.reason == plan_pb2.REASON_PROFILE_MISSING
    assert "prior" in answer.plan.reason_detail


def contradiction(**changes: Any) -> engine_pb2.EngineSpec:
    message = engine_message()
    for name, value in changes.items():
        if name == "drafters":
            del message.drafters[:]
            message.drafters.extend(value)
        else:
            setattr(message, name, value)
    return message


def with_shape(**changes: Any) -> engine_pb2.EngineSpec:
    layers = engine_pb2.AttentionShape(
        layers=2,
        grouped_query=engine_pb2.GroupedQueryAttention(query_heads=4, kv_heads=2, head_dim=64),
    )
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "vocabulary_size": 1000,
        "attention": [layers],
        "dense_params": 10**6,
        "bytes_per_weight": 2.0,
        "bytes_per_kv": 2.0,
    }
    message = engine_message()
    message.shape.CopyFrom(engine_pb2.ModelShape(**shape | changes))
    return message


MTP = engine_pb2.DRAFTER_KIND_MTP


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (engine_pb2.EngineSpec(), "engine_id ''"),
        (contradiction(engine_id="a b"), "engine_id 'a b'"),
        (contradiction(max_batch_size=0), "max_batch_size 0"),
        (contradiction(drafters=[]), "no drafter is listed"),
        (
            contradiction(drafters=[engine_pb2.Drafter(name="mtp", gammas=[0, 1])]),
            "kind 0 is unspecified or unknown",
        ),
        (
            contradiction(drafters=[engine_pb2.Drafter(name="mtp", kind=MTP, gammas=[1, 0])]),
            "not ascending",
        ),
        (
            contradiction(drafters=[engine_pb2.Drafter(name="mtp", kind=MTP, gammas=[0, 65])]),
            "are not all in [0, 64]",
        ),
        (
            contradiction(
                drafters=[
                    engine_pb2.Drafter(name=f"mtp-{i}", kind=MTP, gammas=range(65))
                    for i in range(4)
                ]
            ),
            "260 draft lengths are listed, 130 at most",
        ),
        (with_shape(dense_params=0), "shape: ModelShape: dense_params 0 must be above 0"),
        (with_shape(bytes_per_weight=math.nan), "bytes_per_weight nan must be above 0"),
        (with_shape(attention=[]), "every kind of attention needs at least one layer"),
        (
            with_shape(attention=[engine_pb2.AttentionShape(layers=2)]),
            "attention of a layer has an unknown kind",
        ),
        (
            contradiction(drafters=2 * [engine_pb2.Drafter(name="mtp", kind=MTP, gammas=[0])]),
            "not unique",
        ),
    ],
)
async def test_an_introduction_that_contradicts_itself_is_refused(
    tmp_path: Path, engine: engine_pb2.EngineSpec, text: str
):
    async with running_sidecar(tmp_path) as running:
        request = service_pb2.IntroduceRequest(engine=engine)
        code, message = await failure(running.speculation.Introduce(request))
        assert len(running.sidecar.registry) == 0
    assert code is INVALID
    assert text in message


@bad_reports
async def test_a_bad_report_on_the_stream_is_rejected_and_the_others_are_used(
    tmp_path: Path, changes: dict[str, Any], code: grpc.StatusCode, text: str
):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        bad = report_message(**{"step": 11} | changes)
        await stream.send(report_message(10), bad, report_message(12), report_message(13))
        rejections = await stream.rejections()
        status = await running.status()
    assert [r.step for r in rejections] == [bad.step]
    assert rejections[0].code == code.value[0]
    assert text in rejections[0].message
    assert (status.reports, status.rejected_reports) == (3, 1)
    assert status.last_report.step == 13


@bad_reports
async def test_a_bad_report_to_decide_fails_with_the_same_status_and_changes_nothing(
    tmp_path: Path, changes: dict[str, Any], code: grpc.StatusCode, text: str
):
    async with running_sidecar(tmp_path) as running:
        session_id = await running.introduce()

        def decide(message: engine_pb2.StepReport) -> Any:
            return running.speculation.Decide(
                service_pb2.DecideRequest(session_id=session_id, report=message)
            )

        await with_timeout(decide(report_message(10)))
        status_code, message = await failure(decide(report_message(**{"step": 11} | changes)))
        await with_timeout(decide(report_message(12)))
        status = await running.status()
    assert status_code is code
    assert text in message
    assert (status.reports, status.rejected_reports) == (2, 1)


async def test_an_engine_that_never_introduced_itself_is_told_to(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, "nobody")
        await stream.send(report_message(1))
        code, message = await stream.end()
        assert code is PRECONDITION
        assert "must introduce itself" in message
        request = service_pb2.DecideRequest(session_id="nobody", report=report_message(1))
        code, message = await failure(running.speculation.Decide(request))
        assert code is PRECONDITION
        assert "must introduce itself" in message


async def test_a_stream_belongs_to_one_session(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        first, second = await running.introduce("a"), await running.introduce("b")
        stream = SteerClient(running, first)
        await stream.send(report_message(1))
        await stream.send(report_message(2), session_id=second)
        code, message = await stream.end()
        assert (await running.status("a")).reports == 1
        assert (await running.status("b")).reports == 0
    assert code is PRECONDITION
    assert "this stream belongs to session" in message


async def test_an_engine_that_introduces_itself_again_ends_its_old_session(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        old = SteerClient(running, await running.introduce())
        await old.send(report_message(100))
        await old.plan()
        new = SteerClient(running, await running.introduce())
        code, message = await old.end()
        assert code is PRECONDITION
        assert "introduced itself again" in message
        # A new session counts its steps from anywhere.
        await new.send(report_message(1))
        await new.plan()
        await wait_until(
            lambda: running.sidecar.registry.find_by_engine("engine-0").counters.reports == 1
        )
        request = service_pb2.DecideRequest(session_id=old.session_id, report=report_message(101))
        assert (await failure(running.speculation.Decide(request)))[0] is PRECONDITION


async def test_a_newer_stream_of_a_session_takes_over(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        session_id = await running.introduce()
        old, new = SteerClient(running, session_id), SteerClient(running, session_id)
        await old.send(report_message(1))
        await old.plan()
        await new.send(report_message(2))
        code, message = await old.end()
        assert code is PRECONDITION
        assert "took over" in message
        assert (await new.plan()).epoch >= 1
        assert (await running.status()).reports == 2


async def test_a_client_that_has_sent_its_last_message_gets_a_clean_end(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1, step_seconds=-1.0), dropped=7)
        await with_timeout(stream.call.done_writing())
        assert [r.step for r in await stream.rejections()] == [1]
        assert (await stream.end())[0] is grpc.StatusCode.OK
        assert (await running.status()).dropped_reports == 7


async def test_a_sidecar_that_stops_says_what_it_has_received_and_folds_nothing_after_it(
    tmp_path: Path,
):
    async with running_sidecar(tmp_path, last_lease_seconds=0) as running:
        session = running.sidecar.registry.introduce(engine_from_proto(engine_message()))
        stream = SteerClient(running, session.session_id)
        await stream.send(report_message(1), report_message(2, batch_size=5), dropped=7)
        await stream.send(report_message(3))
        await wait_until(lambda: session.counters.reports == 2)
        running.sidecar.registry.close(ShuttingDownError("over"))
        with suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError
        ):  # over already, if it is slow
            await stream.send(report_message(4), dropped=1)
        while not (answer := await stream.read()).HasField("received"):
            pass
        assert (answer.received.reports, answer.received.dropped_reports) == (3, 7)
        assert (await stream.end())[0] is grpc.StatusCode.UNAVAILABLE
        assert (session.counters.reports, session.counters.dropped_reports) == (2, 7)


async def test_every_response_says_what_has_been_received_so_far(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1), report_message(2, batch_size=5), dropped=7)
        while not (answer := await stream.read()).received_so_far.reports:
            pass
        assert answer.received_so_far == service_pb2.Received(reports=2, dropped_reports=7)


async def test_messages_are_acknowledged_without_news_when_as_many_have_come_as_may_be_on_their_way(
    tmp_path: Path,
):
    # The clock stands still: no plan is due.
    async with running_sidecar(tmp_path, VirtualClock()) as running:
        opened = await with_timeout(
            running.speculation.Introduce(service_pb2.IntroduceRequest(engine=engine_message()))
        )
        assert opened.messages_in_flight_max == 2
        stream = SteerClient(running, opened.session_id)
        await stream.send()
        assert (await stream.read()).HasField("plan")
        for step in range(1, 41):
            # A sign of life is no such message.
            await stream.send()
            await stream.send(report_message(step))
        # The first steps at a batch size may bring a plan, after which the last message may be one
        # that need not be acknowledged yet.
        received: list[int] = []
        while not received or received[-1] < 39:
            answer = await stream.read()
            assert not (answer.HasField("plan") and received and received[-1] > 20)
            received.append(answer.received_so_far.reports)
        # Together where several had come before the writer's turn.
        assert received == sorted(set(received))
        assert len(received) <= 21


async def test_an_introduction_learns_what_arrived_in_the_session_before_it(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        session_id = await running.introduce()
        stream = SteerClient(running, session_id)
        await stream.send(report_message(1), report_message(2, batch_size=5), dropped=7)
        session = running.sidecar.registry.find_by_token(session_id)
        await wait_until(lambda: session.counters.reports == 1)
        stream.call.cancel()
        arrived = service_pb2.Received(reports=2, dropped_reports=7)
        # The first answer may be lost, too: the second introduction names the same session.
        for _ in range(2):
            request = service_pb2.IntroduceRequest(
                engine=engine_message(),
                previous_session_id=session_id,
                engine_secret=secret_of("engine-0"),
            )
            answer = await with_timeout(running.speculation.Introduce(request))
            assert answer.received == arrived


@pytest.mark.parametrize("before", ["", "another-sidecars"])
async def test_what_arrived_in_a_session_that_is_not_known_is_not_said(tmp_path: Path, before: str):
    async with running_sidecar(tmp_path) as running:
        request = service_pb2.IntroduceRequest(engine=engine_message(), previous_session_id=before)
        assert not (await with_timeout(running.speculation.Introduce(request))).HasField("received")


async def test_the_rest_of_a_long_message_is_not_folded_once_the_sidecar_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with running_sidecar(tmp_path, last_lease_seconds=0) as running:
        registry = running.sidecar.registry
        session = registry.introduce(engine_from_proto(engine_message()))
        observe = session.observe

        def stop_at_the_first(report: StepReport, *read_from: engine_pb2.StepReport) -> None:
            observe(report, *read_from)
            if report.step == 1:
                loop = asyncio.get_running_loop()
                loop.call_soon(registry.close, ShuttingDownError("over"))

        monkeypatch.setattr(session, "observe", stop_at_the_first)
        stream = SteerClient(running, session.session_id)
        await stream.send(*(report_message(step) for step in range(1, 1001)))
        while not (answer := await stream.read()).HasField("received"):
            pass
        assert answer.received.reports == session.counters.reports
        assert 0 < session.counters.reports < 1000


async def test_the_lease_of_an_idle_engine_is_renewed(tmp_path: Path):
    clock = VirtualClock()
    async with running_sidecar(tmp_path, clock) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send()
        first = await stream.plan()
        clock.advance(first.lease_ms / 1000 * 0.51)
        # Nothing is sent: the sidecar looks by itself.
        second = await stream.plan()
        clock.advance(second.lease_ms / 1000 * 0.51)
        await stream.send()
        third = await stream.plan()
    assert [second.epoch, third.epoch] == [first.epoch + 1, first.epoch + 2]
    assert list(second.rows) == list(first.rows)


async def test_a_stream_that_is_opened_again_starts_with_the_newest_plan(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        session_id = await running.introduce()
        broken = SteerClient(running, session_id)
        await broken.send(report_message(1))
        epoch = (await broken.plan()).epoch
        broken.call.cancel()
        again = SteerClient(running, session_id)
        await again.send(report_message(2))
        assert (await again.plan()).epoch >= epoch


async def test_many_rejections_come_in_pieces_and_none_is_lost(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        count = 3000
        await stream.send(*(report_message(step + 1, batch_size=5) for step in range(count)))
        await with_timeout(stream.call.done_writing())
        seen: list[int] = []
        while len(seen) < count:
            answer = await stream.read()
            assert len(answer.rejections) <= 512
            seen += [r.step for r in answer.rejections]
    assert seen == list(range(1, count + 1))


async def test_what_a_client_sent_is_not_sent_back_at_length(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send(report_message(1, drafter="x" * 100_000))
        assert len((await stream.rejections())[0].message) <= 500


class Loop:
    """A decode loop in virtual time over the real stream: sequences accept all or nothing."""

    def __init__(self, clock: VirtualClock, stream: SteerClient, accepts: bool) -> None:
        self.clock, self.stream, self.accepts = clock, stream, accepts
        self.step = 0
        self.ran: dict[int, int] = {}

    async def run(self, steps: int, batch_size: int) -> None:
        plan = await self.stream.plan()
        probes: dict[int, int] = {}
        for _ in range(steps):
            row = next(r for r in plan.rows if batch_size <= r.max_batch_size)
            gamma, probe_id = row.gamma, 0
            if row.HasField("probe") and probes.setdefault(row.probe.probe_id, 0) < row.probe.steps:
                gamma, probe_id = row.probe.gamma, row.probe.probe_id
                probes[probe_id] += 1
            counts = [0] * (gamma + 1)
            counts[-1 if self.accepts else 0] = batch_size
            seconds = step_seconds(gamma, batch_size)
            self.step += 1
            self.ran[gamma] = self.ran.get(gamma, 0) + 1
            self.clock.advance(seconds)
            await self.stream.send(
                report_message(
                    self.step, batch_size=batch_size, kv_tokens=512 * batch_size, gamma=gamma,
                    accepted_counts=counts, step_seconds=seconds, probe_id=probe_id,
                    plan_epoch=plan.epoch,
                ),
                # Refused on purpose: its answer tells that the report was folded, plan or not.
                report_message(self.step),
            )  # fmt: skip
            answer = await self.stream.read()
            if answer.HasField("plan"):
                plan = answer.plan
            while not answer.rejections:
                answer = await self.stream.read()
                if answer.HasField("plan"):
                    plan = answer.plan


async def test_engines_with_different_traffic_are_steered_apart(tmp_path: Path):
    clock = VirtualClock()
    async with running_sidecar(tmp_path, clock) as running:
        good = Loop(clock, SteerClient(running, await running.introduce("good")), accepts=True)
        bad = Loop(clock, SteerClient(running, await running.introduce("bad")), accepts=False)
        for loop in (good, bad):
            await loop.stream.send()
            await loop.run(300, batch_size=4)
        plans = {name: (await running.status(name)).plan for name in ("good", "bad")}
    row = {
        name: next(r for r in plan.rows if r.max_batch_size >= 4) for name, plan in plans.items()
    }
    assert row["good"].gamma == 3
    assert row["bad"].gamma == 0
    # Looking again has its price, and its bound.
    assert 0 < sum(n for gamma, n in bad.ran.items() if gamma) < 60


async def test_decide_runs_a_probe_for_its_steps_and_charges_it(tmp_path: Path):
    clock = VirtualClock()
    async with running_sidecar(tmp_path, clock) as running:
        running.sidecar.profiles.add(make_profile())
        session_id = await running.introduce()
        gamma, probing, asked = 0, [], 0
        for step in range(1, 200):
            seconds = step_seconds(gamma, 4)
            clock.advance(seconds)
            message = report_message(
                step, gamma=gamma, accepted_counts=[4, *([0] * gamma)], step_seconds=seconds
            )
            request = service_pb2.DecideRequest(session_id=session_id, report=message)
            answer = await with_timeout(running.speculation.Decide(request))
            gamma = answer.gamma
            probing.append(answer.reason == plan_pb2.REASON_PROBE)
            asked += probing[-1]
        explanation = await running.explain()
        explorer = running.sidecar.registry.find_by_token(session_id).core.explorer
    assert explorer.probe_count > 0
    assert 0 < asked <= 8 * explorer.probe_count
    assert explanation.probe_share > 0
    assert not all(probing[-20:])

"""A trainer and the sidecar: who attends, what is ordered, what outlives whom."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from controller.core.training.selective_training import TrainingSettings
from speculation.v1 import plan_pb2, service_pb2, training_pb2, training_pb2_grpc
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    engine_message,
    read_next,
    report_message,
    running_sidecar,
    secret_of,
    session_metrics,
    wait_until,
    with_timeout,
)
from tests.support.sidecar_process import controller

TRAINING = TrainingSettings(initial=2, unit_drafts=4, threshold=3)
SECRET = secret_of("engine-0")
COLLECT = plan_pb2.REGIME_MODE_COLLECT
BETTER: dict[str, Any] = {"version": 1, "alpha_train": 0.2, "alpha_eval": 0.6, "alpha_before": 0.3}


async def introduce(running: RunningSidecar, *, able: bool = True) -> str:
    engine = engine_message()
    engine.capabilities.can_collect = True
    engine.capabilities.can_take_versions = able
    request = service_pb2.IntroduceRequest(engine=engine, engine_secret=SECRET)
    return (await with_timeout(running.speculation.Introduce(request))).session_id


class Trainer:
    def __init__(self, running: RunningSidecar, secret: str = SECRET) -> None:
        self.secret = secret
        self.call = training_pb2_grpc.TrainingServiceStub(running.channel).Attend()

    async def say(self, stored: int = 0, **ended: Any) -> training_pb2.AttendResponse:
        request = training_pb2.AttendRequest(
            engine_id="engine-0", stored_signals=stored, engine_secret=self.secret
        )
        if ended:
            request.ended.CopyFrom(training_pb2.TrainingRound(**{"round": 1} | ended))
        await with_timeout(self.call.write(request))
        return await read_next(self.call)

    async def refused(self, stored: int = 0, **ended: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError):
            await self.say(stored, **ended)
        return await self.call.code(), await self.call.details() or ""


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[RunningSidecar]:
    async with running_sidecar(folder, training=TRAINING) as harness:
        yield harness


async def send_reports(client: SteerClient, accepted: int, count: int, first: int) -> None:
    """Steps that all accept `accepted` of 2 drafts."""
    counts = [4 if k == accepted else 0 for k in range(3)]
    await client.send(*(report_message(first + k, accepted_counts=counts) for k in range(count)))


async def regime(harness: RunningSidecar) -> int:
    return (await harness.status()).plan.regime.mode


async def test_an_engine_has_one_trainer_at_a_time(tmp_path: Path):
    async with running(tmp_path) as harness:
        await introduce(harness)
        first = Trainer(harness)
        assert (await first.say()).phase == "watching"
        code, details = await Trainer(harness).refused()
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "another trainer" in details
        await first.call.done_writing()
        assert await with_timeout(first.call.read()) is grpc.aio.EOF
        assert (await Trainer(harness).say()).phase == "watching"


async def test_a_trainer_that_was_killed_leaves_its_place(tmp_path: Path):
    async with running(tmp_path) as harness:
        await introduce(harness)
        first = Trainer(harness)
        await first.say(stored=3)
        first.call.cancel()
        (session,) = harness.sidecar.registry
        await wait_until(lambda: not session.core.updates.is_trainer_connected)
        # The round it had begun is ordered again.
        assert (await Trainer(harness).say(stored=3)).train_round == 1


async def test_who_cannot_be_attended(tmp_path: Path):
    async with running(tmp_path) as harness:
        assert (await Trainer(harness).refused())[0] is grpc.StatusCode.NOT_FOUND
        await introduce(harness, able=False)
        code, details = await Trainer(harness).refused()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "SPECULATION_SIGNALS_FOLDER" in details


async def test_a_fall_collects_a_round_deploys_and_explain_tells(tmp_path: Path):
    async with running(tmp_path) as harness:
        client = SteerClient(harness, await introduce(harness))
        trainer = Trainer(harness)
        await trainer.say()
        await send_reports(client, 2, 30, 1)
        await send_reports(client, 0, 30, 31)
        while (await client.plan()).regime.mode != COLLECT:
            pass
        assert (await trainer.say(stored=2)).phase == "collecting"
        assert (await trainer.say(stored=3)).train_round == 1
        answer = await trainer.say(**BETTER)
        assert (answer.draft_version, answer.parent_version, answer.train_round) == (1, 0, 0)
        while (await client.plan()).draft_version != 1:
            pass
        training_status = (await harness.explain()).training
        assert (
            training_status.draft_version,
            training_status.served_version,
            training_status.parent_version,
        ) == (1, 0, 0)
        assert training_status.on_trial
        assert training_status.alpha_short < training_status.alpha_long
        assert [(trial.outcome, trial.round.alpha_eval) for trial in training_status.past] == [
            ("deployed", 0.6)
        ]
        (session,) = harness.sidecar.registry
        measured = session_metrics(session)
        assert measured["speculation_training_rounds_total", "deployed"] == 1
        assert measured["speculation_regime", "collect"] == 1
        assert measured["speculation_draft_version",] == 0
        await client.send(report_message(100, draft_version=1))
        await wait_until(lambda: session_metrics(session)["speculation_draft_version",] == 1)
        shown = await asyncio.to_thread(
            controller, "explain", "engine-0", "--numbers",
            "--address", f"unix:{tmp_path}/controller.sock",
        )  # fmt: skip
        assert "the drafter's training: collecting" in shown.stdout
        assert "version: 1, on trial after 0" in shown.stdout
        assert "round 1, version 1 deployed: accepted 0.200 in service" in shown.stdout


async def test_what_was_learnt_online_is_told_and_becomes_the_version(tmp_path: Path):
    async with running(tmp_path) as harness:
        client = SteerClient(harness, await introduce(harness))
        trainer = Trainer(harness)
        await trainer.say()
        await client.send(report_message(1, learnt_from=0))
        await until_learnt(harness, is_so=True)
        shown = await asyncio.to_thread(
            controller, "explain", "engine-0", "--numbers",
            "--address", f"unix:{tmp_path}/controller.sock",
        )  # fmt: skip
        assert "version: as loaded, changed by online updates since" in shown.stdout
        assert (await trainer.say(stored=3)).train_round == 0
        await client.send(report_message(2, draft_version=4, learnt_from=0))
        while (await client.plan()).draft_version != 4:
            pass
        await until_learnt(harness, is_so=False)
        answer = await trainer.say(stored=3)
        assert (answer.train_round, answer.draft_version, answer.parent_version) == (1, 4, 0)


async def until_learnt(harness: RunningSidecar, *, is_so: bool) -> None:
    while (await harness.explain()).training.learnt is not is_so:
        pass


async def test_without_its_trainer_nothing_is_collected(tmp_path: Path):
    async with running(tmp_path) as harness:
        client = SteerClient(harness, await introduce(harness))
        trainer = Trainer(harness)
        await trainer.say()
        await send_reports(client, 2, 30, 1)
        await send_reports(client, 0, 30, 31)
        while (await client.plan()).regime.mode != COLLECT:
            pass
        trainer.call.cancel()
        while (await client.plan()).regime.mode == COLLECT:
            pass


@pytest.mark.parametrize(
    "ended",
    [
        {"round": 2, "version": 1},
        {"round": 1},
        {"round": 1, "version": 1, "error": "both"},
        {"round": 1, "version": 1, "alpha_eval": 1.5},
        {"round": 1, "version": 2**31},
    ],
)
async def test_a_result_that_cannot_be_changes_nothing(tmp_path: Path, ended: dict[str, Any]):
    async with running(tmp_path) as harness:
        await introduce(harness)
        trainer = Trainer(harness)
        await trainer.say(stored=3)
        assert (await trainer.refused(**ended))[0] is grpc.StatusCode.INVALID_ARGUMENT
        training_status = (await harness.explain()).training
        assert (
            training_status.draft_version,
            training_status.rounds,
            len(training_status.past),
        ) == (0, 1, 0)
        # The round still stands, for whoever comes next.
        (session,) = harness.sidecar.registry
        await wait_until(lambda: not session.core.updates.is_trainer_connected)
        assert (await Trainer(harness).say()).train_round == 1


async def test_an_engine_that_begins_anew_ends_the_attendance_and_keeps_its_version(tmp_path: Path):
    async with running(tmp_path) as harness:
        await introduce(harness)
        trainer = Trainer(harness)
        await trainer.say(stored=3)
        await trainer.say(**BETTER)
        session_id = await introduce(harness)
        code, details = await trainer.refused()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "introduced itself again" in details
        client = SteerClient(harness, session_id)
        await client.send()
        assert (await client.plan()).draft_version == 1


async def test_the_version_outlives_the_sidecar(tmp_path: Path):
    async with running(tmp_path) as harness:
        await introduce(harness)
        trainer = Trainer(harness)
        await trainer.say(stored=3)
        await trainer.say(**BETTER)
        # Not only when it stops: it was on disk before the trainer had its answer.
        (path,) = (tmp_path / "controller.sock.state" / "training").iterdir()
        assert json.loads(path.read_text())["version"] == 1
    async with running(tmp_path) as harness:
        await introduce(harness)
        assert (await harness.status()).plan.draft_version == 1
        assert (await harness.explain()).training.past[0].outcome == "deployed"


async def test_averages_go_on_when_an_engine_begins_anew(tmp_path: Path):
    async with running(tmp_path) as harness:
        client = SteerClient(harness, await introduce(harness))
        await send_reports(client, 2, 30, 1)
        (session,) = harness.sidecar.registry
        await wait_until(lambda: session.counters.reports == 30)
        await introduce(harness)
        assert (await harness.explain()).training.measured == 30


async def test_another_engine_does_not_get_the_version(tmp_path: Path):
    async with running(tmp_path) as harness:
        await introduce(harness)
        trainer = Trainer(harness)
        await trainer.say(stored=3)
        await trainer.say(**BETTER)
        other = engine_message("engine-1")
        other.capabilities.can_collect = other.capabilities.can_take_versions = True
        await with_timeout(
            harness.speculation.Introduce(
                service_pb2.IntroduceRequest(engine=other, engine_secret=SECRET)
            )
        )
        assert (await harness.status("engine-1")).plan.draft_version == 0


async def test_averages_outlive_it_too(tmp_path: Path):
    async with running(tmp_path) as harness:
        client = SteerClient(harness, await introduce(harness))
        await send_reports(client, 2, 30, 1)
        (session,) = harness.sidecar.registry
        await wait_until(lambda: session.counters.reports == 30)
    async with running(tmp_path) as harness:
        await introduce(harness)
        training_status = (await harness.explain()).training
        assert training_status.measured == 30
        assert training_status.alpha_long == pytest.approx(1.0)


async def test_a_damaged_state_is_said_and_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with running(tmp_path) as harness:
        await introduce(harness)
        trainer = Trainer(harness)
        await trainer.say(stored=3)
        await trainer.say(**BETTER)
    (path,) = (tmp_path / "controller.sock.state" / "training").iterdir()
    path.write_text(path.read_text()[:40])
    async with running(tmp_path) as harness:
        await introduce(harness)
        assert (await harness.status()).plan.draft_version == 0
    assert "training_state_not_read" in capsys.readouterr().out


async def test_a_disk_that_cannot_be_written_is_said_once_and_steering_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with running(tmp_path) as harness:
        await introduce(harness)
        # In the directory's place.
        (tmp_path / "controller.sock.state" / "training").write_text("")
        trainer = Trainer(harness)
        await trainer.say(stored=3)
        assert (await trainer.say(**BETTER)).draft_version == 1
        for _ in range(5):
            await trainer.say()
    assert capsys.readouterr().out.count("training_state_not_written") == 1


async def test_another_drafter_does_not_get_the_version(tmp_path: Path):
    async with running(tmp_path) as harness:
        await introduce(harness)
        trainer = Trainer(harness)
        await trainer.say(stored=3)
        await trainer.say(**BETTER)
        engine = engine_message()
        engine.capabilities.can_collect = engine.capabilities.can_take_versions = True
        engine.drafters[0].model = "another"
        await with_timeout(
            harness.speculation.Introduce(
                service_pb2.IntroduceRequest(engine=engine, engine_secret=SECRET)
            )
        )
        assert (await harness.status()).plan.draft_version == 0

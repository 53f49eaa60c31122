import asyncio
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controller.core.cost.profile import Profile
from speculation.v1 import engine_pb2, plan_pb2, service_pb2
from tests.support.service_harness import (
    ENVIRONMENT,
    RunningSidecar,
    SteerClient,
    engine_message,
    failure,
    make_profile,
    read_next,
    report_message,
    running_sidecar,
    wait_until,
    with_timeout,
)

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class MeasureClient:
    """One Measure stream, as `controller profile` has it."""

    def __init__(self, running: RunningSidecar) -> None:
        self.call = running.profiling.Measure()

    async def ask(self, gamma: int, engine_id: str = "", drafter: str = "mtp") -> None:
        request = service_pb2.MeasureRequest(engine_id=engine_id, drafter=drafter, gamma=gamma)
        await with_timeout(self.call.write(request))

    async def read(self) -> service_pb2.MeasureResponse:
        return await read_next(self.call)

    async def failure(self) -> tuple[grpc.StatusCode, str]:
        async def read_on() -> None:
            while await self.call.read() is not grpc.aio.EOF:
                pass

        return await failure(read_on())


async def plan_at(stream: SteerClient, epoch: int) -> plan_pb2.Plan:
    while True:
        plan = await stream.plan()
        if plan.epoch >= epoch:
            return plan


async def test_a_measurement_forces_every_batch_and_forwards_the_reports(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        engine = SteerClient(running, await running.introduce())
        await engine.send()
        measuring = MeasureClient(running)
        await measuring.ask(3, "engine-0")
        first = (await measuring.read()).forced_epoch
        plan = await plan_at(engine, first)
        assert {row.gamma for row in plan.rows} == {3}
        assert {row.reason for row in plan.rows} == {plan_pb2.REASON_PROFILING}
        sent = [
            report_message(step, gamma=3, accepted_counts=[1, 1, 1, 1], plan_epoch=first)
            for step in (1, 2)
        ]
        await engine.send(sent[0], report_message(1), sent[1])
        got: list[engine_pb2.StepReport] = []
        while len(got) < 2:
            got += (await measuring.read()).reports
        # The rejected one does not belong to the measurement.
        assert got == sent

        await measuring.ask(0)
        answer = await measuring.read()
        assert answer.forced_epoch > first
        plan = await plan_at(engine, answer.forced_epoch)
        assert {row.gamma for row in plan.rows} == {0}

        await with_timeout(measuring.call.done_writing())
        assert await with_timeout(measuring.call.read()) is grpc.aio.EOF
        assert await with_timeout(measuring.call.code()) is grpc.StatusCode.OK
        plan = await plan_at(engine, answer.forced_epoch + 1)
        assert plan_pb2.REASON_PROFILING not in {row.reason for row in plan.rows}


async def test_one_measurement_at_a_time_on_an_engine(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        for name in ("a", "b"):
            await running.introduce(name)
        first, second, other = (MeasureClient(running) for _ in range(3))
        await first.ask(1, "a")
        await first.read()
        await second.ask(2, "a")
        code, message = await second.failure()
        assert code is PRECONDITION
        assert "being measured already" in message
        await other.ask(2, "b")
        await other.read()
        # The refused one has not released what the first one holds.
        plan = (await running.status("a")).plan
        assert {row.gamma for row in plan.rows} == {1}


@pytest.mark.parametrize(
    ("engine_id", "drafter", "gamma", "code", "text"),
    [
        ("absent", "mtp", 1, grpc.StatusCode.NOT_FOUND, "no engine 'absent' has a session"),
        ("", "mtp", 1, grpc.StatusCode.NOT_FOUND, "no engine ''"),
        ("engine-0", "eagle9", 1, INVALID, "unknown drafter 'eagle9'"),
        ("engine-0", "mtp", 9, INVALID, "gamma 9 is out of range"),
        ("engine-0", "", 0, INVALID, "unknown drafter ''"),
    ],
)
async def test_a_measurement_of_what_cannot_be_is_refused(
    tmp_path: Path, engine_id: str, drafter: str, gamma: int, code: grpc.StatusCode, text: str
):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        measuring = MeasureClient(running)
        await measuring.ask(gamma, engine_id, drafter)
        status_code, message = await measuring.failure()
        status = await running.status()
    assert status_code is code
    assert text in message
    assert status.plan.reason != plan_pb2.REASON_PROFILING


async def test_a_stream_measures_one_engine(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        for name in ("a", "b"):
            await running.introduce(name)
        measuring = MeasureClient(running)
        await measuring.ask(1, "a")
        await measuring.read()
        await measuring.ask(1, "b")
        code, message = await measuring.failure()
    assert code is INVALID
    assert "this stream measures engine 'a'" in message


async def test_planning_goes_on_when_the_client_hangs_up(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        measuring = MeasureClient(running)
        await measuring.ask(1, "engine-0")
        await measuring.read()
        measuring.call.cancel()
        await wait_until(lambda: session.measurement is None)
        assert (await running.status()).plan.reason != plan_pb2.REASON_PROFILING


CLIENT = """
import sys, grpc
from speculation.v1 import service_pb2, service_pb2_grpc
def ask():
    yield service_pb2.MeasureRequest(engine_id="engine-0", drafter="mtp", gamma=1)
    while True: __import__("time").sleep(60)
with grpc.insecure_channel(sys.argv[1]) as channel:
    for answer in service_pb2_grpc.ProfilingServiceStub(channel).Measure(ask()):
        print(answer.forced_epoch, flush=True)
"""


async def test_planning_goes_on_when_the_client_is_killed(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        session = running.sidecar.registry.find_by_engine("engine-0")
        command = [sys.executable, "-c", CLIENT, f"unix:{tmp_path}/controller-operators.sock"]
        client = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT
        )
        assert client.stdout is not None
        await with_timeout(client.stdout.readline())
        assert session.measurement is not None
        client.kill()
        await wait_until(lambda: session.measurement is None)
        await client.communicate()
        assert (await running.status()).plan.reason != plan_pb2.REASON_PROFILING


async def test_a_measurement_ends_with_its_engine(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        measuring = MeasureClient(running)
        await measuring.ask(1, "engine-0")
        await measuring.read()
        await running.introduce()
        code, message = await measuring.failure()
        assert code is PRECONDITION
        assert "introduced itself again" in message
        assert (await running.status()).plan.reason != plan_pb2.REASON_PROFILING


def install(running: RunningSidecar, profile: Profile | str) -> "asyncio.Future[object]":
    text = profile if isinstance(profile, str) else profile.to_json()
    request = service_pb2.InstallProfileRequest(profile_json=text)
    return asyncio.ensure_future(running.profiling.InstallProfile(request))


async def test_an_installed_profile_is_used_at_once_kept_and_found_again(tmp_path: Path):
    kept = tmp_path / "profiles"
    profile = make_profile()
    async with running_sidecar(tmp_path, profile_directory=kept) as running:
        await running.introduce("a")
        await running.introduce("b", target_model="another")
        answer = await with_timeout(install(running, profile))
        assert answer == service_pb2.InstallProfileResponse(
            profile_id=profile.profile_id, engine_ids=["a"]
        )
        assert (await running.status("a")).profile_id == profile.profile_id
        assert (await running.status("b")).profile_id == ""
        # An engine that comes later gets it too, and so does the next sidecar.
        await running.introduce("c")
        assert (await running.status("c")).profile_id == profile.profile_id
    (file,) = kept.iterdir()
    assert Profile.from_json(file.read_text()) == profile
    async with running_sidecar(tmp_path, profile_directory=kept) as running:
        await running.introduce("a")
        assert (await running.status("a")).profile_id == profile.profile_id


async def test_the_plan_leaves_the_prior_behind_once_a_profile_is_there(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        engine = SteerClient(running, await running.introduce())
        await engine.send()
        assert (await engine.plan()).reason == plan_pb2.REASON_PROFILE_MISSING
        await with_timeout(install(running, make_profile()))
        request = service_pb2.ExplainRequest(engine_id="engine-0", batch_size=4)
        answer = await with_timeout(running.inspection.Explain(request))
        assert answer.profile_id == make_profile().profile_id


@pytest.mark.parametrize(
    ("profile", "code", "text"),
    [
        ("{", INVALID, "not JSON"),
        ("{}", INVALID, "format is None"),
        (make_profile(target_model="another"), PRECONDITION, "target_model is 'another'"),
    ],
)
async def test_a_profile_that_does_not_fit_is_refused_and_not_kept(
    tmp_path: Path, profile: Profile | str, code: grpc.StatusCode, text: str
):
    kept = tmp_path / "profiles"
    async with running_sidecar(tmp_path, profile_directory=kept) as running:
        await running.introduce()
        status_code, message = await failure(install(running, profile))
        assert status_code is code
        assert text in message
        assert not kept.exists()
        assert (await running.status()).profile_id == ""


async def test_a_profile_without_any_engine_is_refused(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        code, message = await failure(install(running, make_profile()))
    assert code is PRECONDITION
    assert "none has introduced itself yet" in message


async def test_a_profile_that_cannot_be_kept_is_not_used_either(tmp_path: Path):
    (tmp_path / "profiles").write_text("a file where the directory should be")
    async with running_sidecar(
        tmp_path, profile_directory=tmp_path / "profiles" / "below"
    ) as running:
        await running.introduce()
        code, message = await failure(install(running, make_profile()))
        assert code is grpc.StatusCode.INTERNAL
        assert "cannot be saved in" in message
        assert (await running.status()).profile_id == ""
        await running.introduce("later")
        assert (await running.status("later")).profile_id == ""


async def test_a_measured_engine_stays_forced_while_a_profile_is_installed(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        request = service_pb2.IntroduceRequest(engine=engine_message())
        await with_timeout(running.speculation.Introduce(request))
        measuring = MeasureClient(running)
        await measuring.ask(1, "engine-0")
        await measuring.read()
        await with_timeout(install(running, make_profile()))
        assert (await running.status()).plan.reason == plan_pb2.REASON_PROFILING

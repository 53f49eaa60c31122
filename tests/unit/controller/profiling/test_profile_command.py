"""`controller profile` as a process: exit codes, one clear line of error, signals."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from controller.core.cost.profile import Profile
from controller.profiling.profile_file import partial_path
from speculation.v1 import plan_pb2
from tests.support.clockwork_engine import ClockworkEngine
from tests.unit.controller.profiling.harness import (
    run_alongside,
    running,
    socket_address,
    wait_until,
)


async def start(folder, *options, url="http://127.0.0.1:1", wait_seconds=0) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controller.cli", "profile",
        "--engine-url", url,
        "--sidecar", socket_address(folder),
        "--output", str(folder / "profile.json"),
        "--wait-seconds", str(wait_seconds),
        *options,
        stdout=PIPE,
        stderr=PIPE,
    )  # fmt: skip


async def ended(process: Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def last_line(text):
    return text.splitlines()[-1]


async def test_it_measures_prints_the_table_and_is_reused_the_next_time(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    options = ("--batch-sizes", "1,2", "--budget", "2")
    async with run_alongside(tmp_path, engine):
        code, out, err = await ended(await start(tmp_path, *options, url=engine.url))
        assert code == 0, err
        profile = Profile.from_json((tmp_path / "profile.json").read_text())
        assert "B = 2" in out
        assert profile.profile_id in last_line(out)
        assert "in use by clockwork" in last_line(out)
        assert "about" in err  # progress
        assert "--batch-sizes 1,2" in profile.command

        steps = len(engine.executed_steps)
        code, out, err = await ended(await start(tmp_path, "-o", "json", url=engine.url))
        assert code == 0, err
        document = json.loads(out)
        assert (document["kind"], document["profile_id"]) == ("Profile", profile.profile_id)
        assert document["reused"]
        assert document["engine_ids"] == ["clockwork"]
        assert Profile.from_json(json.dumps(document["profile"])) == profile
        assert "it is reused" in err
        assert len(engine.executed_steps) == steps


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_cleanly_with_everything_kept(tmp_path, number):
    engine = ClockworkEngine(socket_address(tmp_path))
    partial = partial_path(tmp_path / "profile.json")
    async with run_alongside(tmp_path, engine):
        process = await start(tmp_path, "--budget", "40", "--tolerance", "0.0001", url=engine.url)
        await wait_until(lambda: len(engine.executed_steps) > 300)
        process.send_signal(number)
        code, _, err = await ended(process)
        assert code == 128 + number
        assert last_line(err) == f"controller profile: stopped ({number.name})"
        assert "Traceback" not in err
        assert sum(len(cell["seconds"]) for cell in json.loads(partial.read_text())["cells"]) > 100
        await wait_until(lambda: engine.busy == 0)
        await wait_until(lambda: engine.plan_reason != plan_pb2.REASON_PROFILING)
    assert not (tmp_path / "profile.json").exists()


async def test_a_killed_command_leaves_the_engine_planned_for_normally(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    async with run_alongside(tmp_path, engine):
        process = await start(tmp_path, "--budget", "40", url=engine.url)
        await wait_until(lambda: engine.plan_reason == plan_pb2.REASON_PROFILING)
        process.kill()
        await process.wait()
        await wait_until(lambda: engine.plan_reason != plan_pb2.REASON_PROFILING)
        await ended(process)


async def test_each_kind_of_failure_has_its_exit_code_and_one_line(tmp_path):
    code, _, err = await ended(await start(tmp_path))
    assert (code, err.count("\n")) == (4, 1)
    assert "start one with `controller serve --address unix:" in err

    engine, bare = ClockworkEngine(socket_address(tmp_path)), ClockworkEngine("")
    async with run_alongside(tmp_path, bare):
        code, _, err = await ended(await start(tmp_path))
        assert (code, err.count("\n")) == (5, 1)
        assert "no engine answers at http://127.0.0.1:1" in err

        code, _, err = await ended(await start(tmp_path, url=bare.url))
        assert (code, err.count("\n")) == (6, 1)
        assert "must run with the shim" in err

        async with running(engine):
            (tmp_path / "profile.json").write_text("nothing")
            code, _, err = await ended(await start(tmp_path, url=engine.url))
            assert (code, err.count("\n")) == (3, 1)
            assert "is not a profile" in err


@pytest.mark.parametrize(
    "options", [("--batch-sizes", "one"), ("--budget", "0"), ("--prompts", "/nowhere")]
)
async def test_options_that_cannot_work_are_usage_errors(tmp_path, options):
    code, _, _ = await ended(await start(tmp_path, *options))
    assert code == 2


async def test_an_api_key_is_not_written_into_the_profile(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.api_key = "very-secret"
    options = ("--batch-sizes", "1", "--budget", "1", "--api-key", "very-secret")
    async with run_alongside(tmp_path, engine):
        code, _, err = await ended(await start(tmp_path, *options, url=engine.url))
    assert code == 0, err
    assert "very-secret" not in (tmp_path / "profile.json").read_text()

"""From a running engine to a profile in use: real HTTP, a real sidecar, known step costs."""

import asyncio
import dataclasses
import itertools
import json
import math

import pytest

from controller.core.cost.profile import Profile
from controller.profiling import ProfilingSettings
from controller.profiling.engine_http import EngineHttp
from controller.profiling.errors import (
    EngineNotIntroducedError,
    EngineUnreachableError,
    MeasurementError,
    MeasurementStalledError,
    OtherWidthError,
    ProfileRefusedError,
    ProfilingUsageError,
    SidecarUnreachableError,
)
from controller.profiling.profile_file import partial_path
from speculation.v1 import engine_pb2, plan_pb2
from tests.support.clockwork_engine import GAMMAS, K_KV, ClockworkEngine, introduction, step_seconds
from tests.unit.controller.profiling.harness import (
    BUDGET_SECONDS,
    HOPELESS,
    QUICK,
    Notes,
    profile,
    relative_errors,
    run_alongside,
    running,
    sidecar,
    socket_address,
    wait_until,
)


def truth_at(context_tokens):
    return lambda gamma, size: step_seconds(gamma, size) + K_KV * size * context_tokens


async def test_the_profile_recovers_the_engines_cost_function(tmp_path):
    engine, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
    async with run_alongside(tmp_path, engine):
        settings = ProfilingSettings(budget_seconds=BUDGET_SECONDS)
        outcome = await profile(tmp_path, engine, notes, settings=settings)
    fitted_profile = outcome.profile
    assert {(c.gamma, c.batch_size) for c in fitted_profile.cells} == {
        (gamma, size) for gamma in GAMMAS for size in (1, 2, 4, 8)
    }
    errors = relative_errors(outcome, truth_at(fitted_profile.kv_tokens_per_sequence))
    assert max(map(abs, errors)) < 0.03
    assert fitted_profile.seconds_per_kv_token == pytest.approx(K_KV, rel=0.25)
    assert min(c.steps for c in fitted_profile.cells) >= 3
    # The noise is 2 %: its interquartile range is 2.7 %.
    assert all(0.002 < c.spread_seconds / c.step_seconds < 0.1 for c in fitted_profile.cells)
    assert notes.shares == sorted(notes.shares)
    assert "context term" in notes.text


async def test_a_draft_length_is_measured_in_the_batches_that_it_is_prepared_for(tmp_path):
    spec = introduction()
    spec.drafters[0].batch_limits.add(gamma=3, max_batch_size=2)
    engine, notes = ClockworkEngine(socket_address(tmp_path), spec), Notes()
    async with run_alongside(tmp_path, engine):
        fitted_profile = (await profile(tmp_path, engine, notes)).profile
    assert {(c.gamma, c.batch_size) for c in fitted_profile.cells} == {
        (gamma, size) for gamma in GAMMAS for size in (1, 4)
    } - {(3, 4)}
    assert "left out" not in notes.text


async def test_an_engine_that_has_lost_a_drafter_is_not_measured(tmp_path):
    spec = introduction()
    spec.lost.add(capability=1, drafter=spec.drafters[0].name, reason="MemoryError: no room")
    engine, notes = ClockworkEngine(socket_address(tmp_path), spec), Notes()
    async with run_alongside(tmp_path, engine):
        with pytest.raises(MeasurementError, match=r"has lost drafter .*MemoryError: no room"):
            await profile(tmp_path, engine, notes)


async def test_what_waking_the_drafter_takes_is_measured_on_the_way(tmp_path):
    spec = introduction(capabilities=engine_pb2.Capabilities(can_sleep=True))
    engine, notes = ClockworkEngine(socket_address(tmp_path), spec), Notes()
    engine.wake_seconds, engine.outliers = 5e-4, 0.02
    async with run_alongside(tmp_path, engine):
        settings = ProfilingSettings(budget_seconds=BUDGET_SECONDS)
        fitted_profile = (await profile(tmp_path, engine, notes, settings=settings)).profile
    assert fitted_profile.catch_up_seconds_per_token == pytest.approx(5e-4, rel=0.1)
    assert "us per missed token" in notes.text


async def test_without_sleep_there_is_no_price_of_waking(tmp_path):
    engine, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
    async with run_alongside(tmp_path, engine):
        fitted_profile = (await profile(tmp_path, engine, notes)).profile
    assert fitted_profile.catch_up_seconds_per_token == 0
    assert "missed" not in notes.text


async def test_what_is_written_is_what_is_installed_and_names_what_it_was_measured_on(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    async with sidecar(tmp_path) as serving, running(engine):
        outcome = await profile(tmp_path, engine, command="controller profile --x")
        written = Profile.from_json((tmp_path / "profile.json").read_text())
        session = serving.registry.find_by_engine("clockwork")
        assert session.core.profile_id == written.profile_id
    assert outcome.engine_ids == ("clockwork",)
    assert written == outcome.profile
    assert written.fingerprint.device == "Test CPU @ 1 GHz"
    assert written.drafters[0].model == "/models/draft"
    assert written.command == "controller profile --x"
    assert "Test CPU @ 1 GHz" in written.hardware
    assert written.measured_at.startswith("20")
    left = {p.name for p in tmp_path.iterdir()} - {"controller.sock.state"}
    assert left == {"profile.json"}


async def test_outliers_of_ten_times_the_cost_do_not_reach_the_medians(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.outliers = 0.01
    async with run_alongside(tmp_path, engine):
        outcome = await profile(tmp_path, engine)
    errors = relative_errors(outcome, truth_at(outcome.profile.kv_tokens_per_sequence))
    assert max(map(abs, errors)) < 0.03
    assert all(c.spread_seconds / c.step_seconds < 0.1 for c in outcome.profile.cells)


async def test_a_machine_that_slows_down_meanwhile_keeps_the_ratios_between_the_arms(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.drift = lambda visit: 1 + 0.25 * math.sin(visit / 15)
    async with run_alongside(tmp_path, engine):
        settings = dataclasses.replace(QUICK, batch_sizes=(4,), tolerance=0.006)
        outcome = await profile(tmp_path, engine, settings=settings)
    truth = truth_at(outcome.profile.kv_tokens_per_sequence)
    cells = {c.gamma: c.step_seconds for c in outcome.profile.cells}
    for gamma in GAMMAS[1:]:
        assert cells[gamma] / cells[0] == pytest.approx(truth(gamma, 4) / truth(0, 4), rel=0.03)


async def test_the_load_makes_exactly_the_wanted_batches_from_distinct_prompts(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    async with run_alongside(tmp_path, engine):
        await profile(tmp_path, engine)
        assert engine.busy == 0
    full = sum(size in {1, 4} for _, size in engine.executed_steps)
    # While a batch fills and empties there are others: more of them where the machine is slow.
    assert full / len(engine.executed_steps) > 0.75
    heads = [tuple(prompt[:4]) for prompt in engine.prompts]
    assert len(set(heads)) == len(heads)


async def test_the_engine_is_planned_for_normally_afterwards(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    async with run_alongside(tmp_path, engine):
        await profile(tmp_path, engine)
        await wait_until(lambda: engine.plan_reason != plan_pb2.REASON_PROFILING)


async def test_a_cancelled_measurement_is_kept_releases_the_engine_and_is_gone_on_with(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    enough = asyncio.Event()
    notes = Notes(on_progress=lambda share: enough.set() if share > 0.5 else None)
    partial = partial_path(tmp_path / "profile.json")
    async with run_alongside(tmp_path, engine):
        task = asyncio.create_task(profile(tmp_path, engine, notes))
        await asyncio.wait_for(enough.wait(), 120)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await wait_until(lambda: engine.plan_reason != plan_pb2.REASON_PROFILING)
        await wait_until(lambda: engine.busy == 0)
        assert "run the same command" in notes.text
        kept = json.loads(partial.read_text())
        assert {"grid:1", "grid:4"} <= set(kept["finished"])
        steps_at_one = {
            c["gamma"]: len(c["seconds"]) for c in kept["cells"] if c["batch_size"] == 1
        }
        again = Notes()
        outcome = await profile(tmp_path, engine, again)
    assert "continuing the measurement" in again.text
    # What was finished is not measured again, and counts.
    sizes = [cell.split()[0] for cell in again.cells]
    assert len(list(itertools.groupby(sizes))) <= 6 - len(kept["finished"])
    for cell in outcome.profile.cells:
        if cell.batch_size == 1:
            # Some of them are outliers, more of few.
            assert cell.steps >= 0.5 * steps_at_one[cell.gamma]
    grid = {(c.gamma, c.batch_size) for c in outcome.profile.cells}
    assert grid == {(gamma, size) for gamma in GAMMAS for size in (1, 4)}
    assert not partial.exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read"),
        ('{"format": "speculation-profile-partial/1"}', "started_at: Field required"),
        ("[]" * 1000, "cannot be read"),
    ],
)
async def test_an_unreadable_partial_is_named_and_measured_anew(tmp_path, content, complaint):
    engine, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
    partial_path(tmp_path / "profile.json").write_text(content)
    async with run_alongside(tmp_path, engine):
        settings = dataclasses.replace(QUICK, batch_sizes=(1,))
        outcome = await profile(tmp_path, engine, notes, settings=settings)
    assert "starting again" in notes.text
    assert complaint in notes.text
    assert len(outcome.profile.cells) == len(GAMMAS)


async def test_a_matching_profile_is_reused_and_installed(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    settings = dataclasses.replace(QUICK, batch_sizes=(1,))
    async with sidecar(tmp_path) as serving:
        async with running(engine):
            first = await profile(tmp_path, engine, settings=settings)
        later, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
        async with running(later):
            outcome = await profile(tmp_path, later, notes)
            assert later.executed_steps == []
            core = serving.registry.find_by_engine("clockwork").core
            assert core.profile_id == first.profile.profile_id
    assert outcome.reused
    assert outcome.profile == first.profile
    assert "it is reused" in notes.text
    assert "batches above 1" in notes.text


async def test_another_engines_profile_is_refused_by_the_field_until_forced(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    settings = dataclasses.replace(QUICK, batch_sizes=(1,))
    spec = introduction()
    spec.fingerprint.device = "Another CPU"
    other = ClockworkEngine(socket_address(tmp_path), spec)
    async with sidecar(tmp_path):
        async with running(engine):
            await profile(tmp_path, engine, settings=settings)
        before = (tmp_path / "profile.json").read_text()
        async with running(other):
            with pytest.raises(ProfileRefusedError, match=r"device is 'Test CPU.*'Another CPU'"):
                await profile(tmp_path, other, settings=settings)
            assert (tmp_path / "profile.json").read_text() == before
            outcome = await profile(tmp_path, other, settings=settings, force=True)
    assert outcome.profile.fingerprint.device == "Another CPU"


async def test_a_file_that_is_no_profile_is_refused(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    (tmp_path / "profile.json").write_text("{}")
    async with run_alongside(tmp_path, engine):
        with pytest.raises(ProfileRefusedError, match="is not a profile"):
            await profile(tmp_path, engine)


async def test_an_engine_that_does_not_follow_the_draft_length_is_refused_by_both(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.obeys = False
    message = (
        r"eagle3: gamma 0 was requested, but the engine verified gamma 3 in \d+ consecutive steps"
    )
    async with run_alongside(tmp_path, engine):
        with pytest.raises(OtherWidthError, match=message):
            await profile(tmp_path, engine)
    assert not (tmp_path / "profile.json").exists()


async def test_an_engine_whose_plan_is_late_by_seconds_follows_the_draft_length(tmp_path):
    """As on a machine whose processors are all taken, where the agent comes last."""
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.late_plan = 6
    async with run_alongside(tmp_path, engine):
        outcome = await profile(tmp_path, engine)
    assert {cell.gamma for cell in outcome.profile.cells} == {0, 1, 2, 3}


async def test_an_engine_that_follows_in_small_batches_only_is_refused_as_well(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.obeys_up_to = 2
    async with run_alongside(tmp_path, engine):
        with pytest.raises(OtherWidthError, match=r"gamma 0 was requested, .* verified gamma 3"):
            await profile(tmp_path, engine)
    assert not (tmp_path / "profile.json").exists()


async def test_a_shim_that_takes_no_plans_is_told_from_an_engine_that_is_another_one(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.names_plans = False
    async with run_alongside(tmp_path, engine):
        with pytest.raises(MeasurementStalledError, match="its shim does not follow plans"):
            await profile(tmp_path, engine, settings=HOPELESS)


async def test_rows_of_another_width_are_no_steps_of_the_length_that_was_asked_for(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.row_width = 1
    async with run_alongside(tmp_path, engine):
        with pytest.raises(OtherWidthError, match=r"gamma 2 was requested, .* verified gamma 1"):
            await profile(tmp_path, engine)


@pytest.mark.parametrize("row_width", [0, 3])
async def test_a_lookup_that_finds_nothing_is_measured_and_marked(tmp_path, row_width):
    spec = introduction()
    spec.drafters[0].kind = engine_pb2.DRAFTER_KIND_NGRAM
    engine, notes = ClockworkEngine(socket_address(tmp_path), spec), Notes()
    engine.row_width = row_width
    async with run_alongside(tmp_path, engine):
        outcome = await profile(tmp_path, engine, notes)
    assert {cell.gamma for cell in outcome.profile.cells} == set(GAMMAS)
    marked = "drafted fewer tokens than requested in 100% of the rows" in notes.text
    assert marked is (row_width == 0)


@pytest.mark.parametrize("kind", ["MTP", "NGRAM"])
async def test_a_profile_whose_lengths_cost_the_same_is_marked_if_drafting_must_cost(
    tmp_path, kind
):
    spec = introduction()
    spec.drafters[0].kind = engine_pb2.DrafterKind.Value(f"DRAFTER_KIND_{kind}")
    engine, notes = ClockworkEngine(socket_address(tmp_path), spec), Notes()
    engine.table, engine.noise = lambda _, size: step_seconds(3, size), 0.0
    async with run_alongside(tmp_path, engine):
        await profile(tmp_path, engine, notes)
    marked = "takes no longer at gamma 3 than at gamma 0, at any batch size" in notes.text
    assert marked is (kind == "MTP")


async def test_a_batch_that_never_comes_up_is_left_out_with_what_came_instead(tmp_path):
    engine, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
    engine.batch_cap = 3
    async with run_alongside(tmp_path, engine):
        outcome = await profile(tmp_path, engine, notes, settings=HOPELESS)
    assert {c.batch_size for c in outcome.profile.cells} == {1}
    assert "left out B=4" in notes.text
    assert "batch of 3" in notes.text


async def test_a_batch_is_measured_though_the_reports_of_its_first_loads_are_lost(tmp_path):
    engine, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
    engine.lost_loads[4] = 2
    async with run_alongside(tmp_path, engine):
        outcome = await profile(tmp_path, engine, notes)
    assert {c.batch_size for c in outcome.profile.cells} == {1, 4}
    assert engine.lost_loads[4] == 0
    assert "left out" not in notes.text


async def test_a_batch_that_the_kv_pool_cannot_hold_is_not_tried(tmp_path):
    engine, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
    engine.pool_tokens = 400
    async with run_alongside(tmp_path, engine):
        outcome = await profile(tmp_path, engine, notes)
    assert {c.batch_size for c in outcome.profile.cells} == {1}
    assert "too small" in notes.text
    assert max(size for _, size in engine.executed_steps) == 1


async def test_an_engine_that_reports_nothing_is_not_the_one_that_was_introduced(tmp_path):
    introduced = ClockworkEngine(socket_address(tmp_path))
    stranger = ClockworkEngine("")
    async with run_alongside(tmp_path, introduced, stranger):
        with pytest.raises(MeasurementStalledError, match="reports no steps"):
            await profile(tmp_path, stranger, settings=HOPELESS)


async def test_an_engine_without_a_shim_is_said_to_have_none(tmp_path):
    engine = ClockworkEngine("")
    async with run_alongside(tmp_path, engine):
        with pytest.raises(EngineNotIntroducedError, match=r"must run with the shim"):
            await profile(tmp_path, engine, wait_seconds=0)


async def test_several_engines_need_to_be_told_apart(tmp_path):
    address = socket_address(tmp_path)
    engines = [ClockworkEngine(address, introduction(name)) for name in ("one", "two")]
    settings = dataclasses.replace(QUICK, batch_sizes=(1,))
    async with run_alongside(tmp_path, *engines):
        with pytest.raises(EngineNotIntroducedError, match=r"2 engines .*one, two.*--engine-id"):
            await profile(tmp_path, engines[1])
        with pytest.raises(EngineNotIntroducedError, match=r"'three' has not introduced itself"):
            await profile(tmp_path, engines[1], engine_id="three", wait_seconds=0)
        await profile(tmp_path, engines[1], engine_id="two", settings=settings)
    assert engines[0].executed_steps == []


async def test_no_sidecar_is_said_with_what_to_start(tmp_path):
    engine = ClockworkEngine("")
    async with running(engine):
        with pytest.raises(SidecarUnreachableError, match="controller serve --address unix:"):
            await profile(tmp_path, engine, wait_seconds=0)


async def test_an_engine_url_that_nobody_serves_is_refused_after_the_wait(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    notes = Notes()
    async with run_alongside(tmp_path, engine):
        with pytest.raises(EngineUnreachableError, match=r"127\.0\.0\.1:1/.*waited 1 s"):
            await profile(
                tmp_path, engine, notes, engine_url="http://127.0.0.1:1", wait_seconds=1.0
            )
    assert "waiting for the engine" in notes.waits[0]


async def test_an_engine_that_is_still_starting_is_waited_for(tmp_path):
    engine, notes = ClockworkEngine(socket_address(tmp_path)), Notes()
    engine.healthy = False
    settings = dataclasses.replace(QUICK, batch_sizes=(1,))
    async with run_alongside(tmp_path, engine):
        task = asyncio.create_task(
            profile(tmp_path, engine, notes, settings=settings, wait_seconds=15.0)
        )
        await wait_until(lambda: bool(notes.waits))
        engine.healthy = True
        await task
    assert "answers 503" in notes.waits[0]


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://", "http://host:port", "ftp://host"])
def test_a_url_that_is_none_is_a_usage_error(url):
    with pytest.raises(ProfilingUsageError, match="engine URL"):
        EngineHttp(url)


async def test_a_batch_size_beyond_the_engines_is_a_usage_error(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    settings = dataclasses.replace(QUICK, batch_sizes=(1, 9))
    async with run_alongside(tmp_path, engine):
        with pytest.raises(ProfilingUsageError, match="runs at most 8 sequences"):
            await profile(tmp_path, engine, settings=settings)


async def test_an_engine_with_an_api_key_wants_it(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.api_key = "secret"
    settings = dataclasses.replace(QUICK, batch_sizes=(1,))
    async with run_alongside(tmp_path, engine):
        with pytest.raises(EngineUnreachableError, match="--api-key"):
            await profile(tmp_path, engine, settings=settings)
        await profile(tmp_path, engine, settings=settings, api_key="secret")


async def test_an_engine_without_a_tokenizer_gets_ids_that_every_vocabulary_has(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    engine.has_tokenizer = False
    settings = dataclasses.replace(QUICK, batch_sizes=(1,))
    async with run_alongside(tmp_path, engine):
        await profile(tmp_path, engine, settings=settings)
        assert max(max(prompt) for prompt in engine.prompts) < 256
        with pytest.raises(ProfilingUsageError, match="prompt file"):
            await profile(tmp_path, engine, prompt_text="abc", force=True)


async def test_prompts_are_cut_from_the_users_text(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    settings = dataclasses.replace(QUICK, batch_sizes=(1,))
    async with run_alongside(tmp_path, engine):
        await profile(tmp_path, engine, settings=settings, prompt_text="xyz" * 100)
    assert {token for prompt in engine.prompts for token in prompt} == set(b"xyz")


async def test_two_measurements_of_one_engine_do_not_mix(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    begun = asyncio.Event()
    async with run_alongside(tmp_path, engine):
        notes = Notes(on_progress=lambda _: begun.set())
        first = asyncio.create_task(profile(tmp_path, engine, notes))
        await begun.wait()
        with pytest.raises(MeasurementError, match="is being measured already"):
            await profile(tmp_path, engine, output=tmp_path / "other.json")
        outcome = await first
    errors = relative_errors(outcome, truth_at(outcome.profile.kv_tokens_per_sequence))
    assert max(map(abs, errors)) < 0.03


async def test_a_sidecar_that_goes_away_ends_the_measurement_and_keeps_it(tmp_path):
    engine = ClockworkEngine(socket_address(tmp_path))
    begun = asyncio.Event()
    notes = Notes(on_progress=lambda share: begun.set() if share > 0.3 else None)
    async with sidecar(tmp_path) as serving, running(engine):
        task = asyncio.create_task(profile(tmp_path, engine, notes))
        await asyncio.wait_for(begun.wait(), 120)
        await serving.stop()
        with pytest.raises((SidecarUnreachableError, MeasurementError), match="shutting down"):
            await task
        assert engine.busy == 0
    assert partial_path(tmp_path / "profile.json").exists()

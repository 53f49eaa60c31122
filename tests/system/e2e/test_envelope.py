"""The drafter envelope with short runs: two real engines, a sidecar and a profile a concurrency."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab.cpu_engine.pace.acceptance import DrawnAcceptance
from lab.cpu_engine.pace.step_costs import load_step_costs
from lab.cpu_engine.pace.step_log import LoggedStep, read_log
from lab.paced.envelope.outcome import GAMMAS, TABLE
from lab.paced.traffic import published_curves
from tests.support.engine import run_lab

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

# E[accepted | gamma] of the published curves.
EXPECTED = {"mtp 1": 0.779, "dflash 3": 1.757, "mtp 2": 1.362, "dflash 15": 3.425}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("envelope")
    # Late steps of a short run do not matter, so it need not be as slow as a long one.
    process = run_lab(
        "lab.paced.envelope", "--quick", "--dilation", "16", "--concurrency", "1,8",
        "--output", str(output),
    )  # fmt: skip
    print(process.stdout)
    assert process.returncode == 0, process.stdout
    assert "Step times are imposed" in " ".join(process.stdout.split())
    assert (output / "envelope.png").read_bytes().startswith(b"\x89PNG")
    return output


@pytest.fixture(scope="module")
def points(quick: Path) -> list[dict[str, Any]]:
    measured_points: list[dict[str, Any]] = json.loads((quick / "result.json").read_text())[
        "points"
    ]
    return measured_points


@pytest.fixture(scope="module")
def steps(quick: Path) -> tuple[LoggedStep, ...]:
    """The steered engine's decode steps."""
    return tuple(s for s in read_log(quick / "steps" / "steered.jsonl").steps if s.is_decode)


def test_each_step_of_a_lone_sequence_accepts_what_its_drafter_drew(quick: Path):
    log = read_log(quick / "steps" / "steered.jsonl")
    drawn = DrawnAcceptance(published_curves(TABLE))
    lone = [s for s in log.steps if s.is_decode and s.kinds == {"published": 1}]
    seen: Counter[str] = Counter()
    for request in log.requests:
        position = 0
        for step in lone:
            if not request.first_token <= step.began < step.ended <= request.last_token:
                continue
            # Within rounds of eight the batch may be of one, and then of another request.
            if step.kv_tokens != position + 2:
                break
            expected = min(drawn.accepted_at(request.rid, step.drafter, position), step.gamma)
            assert step.accepted == expected
            position += expected + 1
            seen[step.drafter if step.gamma else ""] += 1
    assert seen["eagle3"] > 50
    assert seen["dflash"] > 50


def test_both_drafters_accept_about_what_was_published(points: list[dict[str, Any]]):
    assert [point["concurrency"] for point in points] == [1, 8]
    assert [p["runs"]["mtp"]["arm"] for p in points] == ["mtp 1", "mtp 2"]
    assert [p["runs"]["dflash"]["arm"] for p in points] == ["dflash 3", "dflash 15"]
    for point in points:
        for policy in ("mtp", "dflash"):
            run = point["runs"][policy]
            accepted = run["acceptance_length"] - 1
            assert accepted == pytest.approx(EXPECTED[run["arm"]], rel=0.25)
        assert point["runs"]["off"]["acceptance_length"] == 1


def test_the_engine_without_speculation_has_the_table_s_rate_where_it_kept_the_pace(
    points: list[dict[str, Any]],
):
    for point in points:
        rate, table = point["runs"]["off"]["tokens_per_second"], point["table"]["off"]
        # A late step takes longer; none takes less.
        assert rate <= 1.02 * table
        if point["runs"]["off"]["late"] == 0:
            assert rate >= 0.95 * table


def test_every_arm_is_steered_to_while_it_is_profiled(steps: tuple[LoggedStep, ...]):
    ran = {(s.drafter, s.gamma) for s in steps if s.steered and s.gamma}
    assert ran == {(d, g) for d in ("eagle3", "dflash") for g in GAMMAS if g}


def test_steps_are_priced_by_the_drafter_that_drafted(steps: tuple[LoggedStep, ...]):
    costs = load_step_costs(TABLE, GAMMAS, 8)
    for step in steps:
        arm = next(
            a for a in costs.surface.arms
            if (a.drafter, a.gamma) == (step.drafter if step.gamma else "eagle3", step.gamma)
        )  # fmt: skip
        plain = costs.decode_seconds(arm, step.batch_size, step.kv_tokens, warm=not step.asleep)
        imposed = step.seconds - step.switch_seconds - step.catch_up_seconds
        assert imposed == pytest.approx(plain)
    asleep = [s for s in steps if s.gamma == 0 and s.asleep]
    assert asleep
    # While both sleep, neither reads anything, but where a step finds the buffer of what was missed
    # full (`SleepingDrafter.before_step`).
    assert sum(s.catch_up_seconds > 0 for s in asleep) < len(asleep) / 2


def test_the_drafter_that_does_not_draft_is_charged_for_reading(steps: tuple[LoggedStep, ...]):
    per_token = load_step_costs(TABLE, GAMMAS, 8).surface.catch_up_seconds_per_token
    drafted = [s for s in steps if s.gamma > 0]
    charged = [s for s in drafted if s.catch_up_seconds >= 0.999 * per_token * s.tokens]
    assert len(charged) == len(drafted)


def test_a_pace_that_the_machine_cannot_keep_is_refused_with_one_to_try(tmp_path: Path):
    process = run_lab(
        "lab.paced.envelope", "--dilation", "1", "--concurrency", "1", "--output", str(tmp_path)
    )
    assert process.returncode == 1, process.stdout
    printed = " ".join(process.stdout.split())
    (late,) = re.findall(r"off at 1: ([\d.]+)% of the steps took the machine longer", printed)
    assert float(late) > 50
    suggested = int(printed.rpartition("try --dilation ")[2].split()[0])
    assert suggested > 1


def test_a_concurrency_that_was_not_published_is_refused():
    process = run_lab("lab.paced.envelope", "--concurrency", "3")
    assert process.returncode == 2

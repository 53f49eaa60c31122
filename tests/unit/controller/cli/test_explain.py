import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

import controller as package
from controller.cli import app
from controller.cli.explain import line_text, paragraph_text
from controller.cli.explain_numbers import (
    count_text,
    probe_budget_text,
    probing_text,
    resembles_text,
)
from controller.util.exit_codes import Exit
from speculation.v1 import plan_pb2, policy_pb2, service_pb2, service_pb2_grpc
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    engine_message,
    make_profile,
    report_message,
)
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """Steers "measured" (profile, reports) and "prior" (neither)."""
    directory: Path = tmp_path_factory.mktemp("sidecar")
    (directory / "p.json").write_text(make_profile("profiled").to_json())
    with (
        sidecar_process(directory, "--profile", str(directory / "p.json")) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        for name, model in (("measured", "profiled"), ("prior", "unknown")):
            session = stub.Introduce(
                service_pb2.IntroduceRequest(engine=engine_message(name, target_model=model)),
                timeout=PATIENCE_SECONDS,
            )
            if name == "measured":
                for step in range(1, 30):
                    stub.Decide(
                        service_pb2.DecideRequest(
                            session_id=session.session_id, report=report_message(step)
                        ),
                        timeout=PATIENCE_SECONDS,
                    )
        yield running


def run(*arguments: str) -> Any:
    """A command in this process."""
    return CliRunner().invoke(app, arguments)


def test_engines_are_listed(sidecar: SidecarProcess):
    result = controller("engines", "--address", sidecar.address)
    assert result.returncode == 0, result.stderr
    lines = {name: line for line in result.stdout.splitlines() for name in line.split()[:1]}
    assert make_profile("profiled").profile_id in lines["measured"]
    assert " 29 " in lines["measured"]
    assert "none (prior)" in lines["prior"]
    assert "never" in lines["prior"]


def test_words_of_engines_and_operators_are_no_markup(tmp_path: Path):
    words = "[/red] [bold]x :smile:"
    with sidecar_process(tmp_path) as running:
        engine = engine_message("odd")
        engine.drafters[0].name = words
        with grpc.insecure_channel(running.address) as channel:
            service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
                service_pb2.IntroduceRequest(engine=engine), timeout=PATIENCE_SECONDS
            )
        pin = ("override", "set", "--fleet", "--gamma", "0", "--id", "odd", "--reason", words)
        result = run(*pin, "--allow-no-effect", "--address", running.address)
        assert result.exit_code == 0, result.output
        shown = (
            ("engines",), ("explain", "odd"), ("explain", "odd", "--short"),
            ("explain", "odd", "--numbers"), ("override", "list"), ("override", "log"),
        )  # fmt: skip
        for command in shown:
            result = run(*command, "--address", running.address)
            assert result.exit_code == 0, result.output
            assert words in result.stdout, command


def test_the_address_comes_from_the_environment_too(sidecar: SidecarProcess):
    result = controller("engines", environment={"CONTROLLER_ADDRESS": sidecar.address})
    assert result.returncode == 0, result.stderr
    assert "measured" in result.stdout


def test_all_numbers_have_every_choice_and_mark_the_one_that_runs(sidecar: SidecarProcess):
    result = controller(
        "explain", "measured", "--numbers", "--batch-size", "8", "--address", sidecar.address
    )
    assert result.returncode == 0, result.stderr
    assert "measured at B = 8" in result.stdout
    assert result.stdout.count("->") == 1
    assert f"profile {make_profile('profiled').profile_id}" in result.stdout
    assert "behind the best" in result.stdout
    assert "probing has cost" in result.stdout
    lines = result.stdout.splitlines()
    header = next(index for index, line in enumerate(lines) if "tokens/s" in line)
    end = lines[header].index("tokens/s") + len("tokens/s")
    rates = [float(line[:end].split()[-1]) for line in lines[header + 1 : header + 5]]
    assert rates == sorted(rates, reverse=True)
    assert lines[header + 5] == "acceptance"
    assert not any("\u2500" <= letter <= "\u257f" for letter in result.stdout)


def test_the_paragraph_tells_in_sentences_what_runs_and_why(sidecar: SidecarProcess):
    result = controller("explain", "measured", "--batch-size", "8", "--address", sidecar.address)
    assert result.returncode == 0, result.stderr
    paragraph, *troubles, hint = result.stdout.splitlines()
    assert all("NOT_SERVING" in line for line in troubles)
    assert paragraph.startswith("With 8 sequences in its batch, measured drafts ")
    assert "times those of plain decoding." in paragraph
    assert f"Step times come from profile {make_profile('profiled').profile_id}" in paragraph
    assert "The second best choice, " in paragraph
    assert hint == "All numbers: controller explain measured --numbers"


def test_one_line_names_engine_batch_size_choice_and_value(sidecar: SidecarProcess):
    words = ("explain", "measured", "--batch-size", "8", "--address", sidecar.address)
    short, document = (run(*words, *form) for form in (("--short",), ("-o", "json")))
    arms = json.loads(document.stdout)["arms"]
    [chosen] = [arm for arm in arms if arm.get("chosen")]
    assert short.stdout.count("\n") == 1
    assert short.stdout.startswith(
        f"measured at B = 8: {chosen['drafter']} with {chosen['gamma']} draft tokens, "
        f"{chosen['tokens_per_second']:.0f} tokens/s expected, "
    )
    both = run(*words, "--short", "--numbers")
    assert both.exit_code == Exit.USAGE
    assert "contradict" in both.output


def test_without_speculation_the_words_compare_with_the_best_draft_length():
    answer = service_pb2.ExplainResponse(engine_id="e", batch_size=64)
    answer.plan.rows.add(max_batch_size=64, drafter="mtp", reason=plan_pb2.REASON_EXPLOIT)
    answer.arms.add(drafter="mtp", gamma=0, tokens_per_second=100, step_seconds=0.01, chosen=True)
    answer.arms.add(drafter="mtp", gamma=3, tokens_per_second=80)
    answer.arms.add(drafter="mtp", gamma=5, tokens_per_second=400, forbidden=True)
    answer.store.ok = True
    assert line_text(answer) == (
        "e at B = 64: no speculation (mtp off), 100 tokens/s expected, 1.25 times those of the "
        "best draft length; this is the best choice by the current estimates"
    )
    assert "e decodes without speculation: this is the best" in paragraph_text(answer)


def test_a_careful_start_without_a_profile_is_not_called_the_best_choice():
    answer = service_pb2.ExplainResponse(engine_id="e", batch_size=1, prior="generic")
    answer.plan.rows.add(max_batch_size=64, drafter="mtp", reason=plan_pb2.REASON_EXPLOIT)
    off = answer.arms.add(drafter="mtp", gamma=0, tokens_per_second=50, chosen=True)
    answer.arms.add(drafter="mtp", gamma=3, tokens_per_second=92)
    answer.arms.add(drafter="mtp", gamma=5, tokens_per_second=99, forbidden=True)
    answer.runner_up_drafter, answer.runner_up_gamma, answer.margin = "mtp", 5, 0.016
    answer.store.ok = True
    paragraph = paragraph_text(answer)
    assert "best choice" not in paragraph
    assert "without a profile it starts with short drafts" in paragraph
    assert "The highest estimate is that of mtp with 3 draft tokens, 92 tokens/s." in paragraph
    off.tokens_per_second = 95
    paragraph = paragraph_text(answer)
    assert "this is the best choice by assumed step times" in paragraph
    assert "The second best choice, mtp with 5 draft tokens, is 1.6% behind the best." in paragraph


def test_the_paragraph_names_overrides_bounds_and_troubles():
    answer = service_pb2.ExplainResponse(engine_id="e", batch_size=1)
    answer.plan.rows.add(max_batch_size=64, drafter="mtp", gamma=1)
    answer.arms.add(drafter="mtp", gamma=1, tokens_per_second=100, step_seconds=0.01, chosen=True)
    answer.positions.add(drafter="mtp", position=1, exposures=7)
    for name in ("counts", "elsewhere"):
        override = policy_pb2.Override(override_id=name, author="ada", reason="INC-1")
        override.rule.gamma_max = 1
        answer.overrides.add(override=override)
    answer.limits.overrides.append("counts")
    answer.bound.seconds, answer.bound.expected_seconds = 0.02, 0.03
    answer.store.detail = "no space"
    paragraph = paragraph_text(answer)
    assert "Override counts limits the choice (fleet: gamma <= 1; ada: INC-1)." in paragraph
    assert "Overrides that do not apply at this batch size: 1." in paragraph
    assert "The bound of 20 ms per output token is not met: 30.00 ms are expected." in paragraph
    assert "is uncertain: it has 7 recent observations" in paragraph
    assert "the store of overrides has failed: no space" in paragraph


def test_probes_that_gained_time_have_not_lost_any():
    assert probing_text(-0.29) == "0.29 s gained"
    assert probing_text(0.29) == "0.29 s lost"


def test_a_negative_probe_credit_is_called_over_budget():
    assert probe_budget_text(0.062) == "0.062 s to spend"
    assert probe_budget_text(-0.012) == "0.012 s over budget"


def test_past_traffic_is_named_by_the_time_of_day():
    answer = service_pb2.ExplainResponse()
    assert resembles_text(answer) == ""
    now = time.time()
    answer.resembles.began_seconds_ago, answer.resembles.ended_seconds_ago = 420.0, 120.0
    answer.resembles.visits = 1
    began = time.strftime("%H:%M", time.localtime(now - 420))
    ended = time.strftime("%H:%M", time.localtime(now - 120))
    time_match = re.fullmatch(
        r"; it resembles (\d\d:\d\d):\d\d to (\d\d:\d\d):\d\d, seen 1 time before",
        resembles_text(answer),
    )
    assert time_match is not None
    # A minute may begin between the two readings of the clock.
    assert time_match.groups() == (began, ended) or time.time() % 60 < 5


def test_an_explanation_from_the_prior_says_so(sidecar: SidecarProcess):
    prior_result = run("explain", "prior", "--address", sidecar.address)
    assert "No profile matches this engine" in prior_result.stdout
    result = controller("explain", "prior", "--numbers", "--address", sidecar.address)
    assert result.returncode == 0, result.stderr
    assert "costs: generic prior (no profile matches)" in result.stdout
    assert "profile-missing" in result.stdout


def test_an_engine_that_is_not_there_is_named(sidecar: SidecarProcess):
    result = controller("explain", "absent", "--address", sidecar.address)
    assert result.returncode == Exit.NOT_INTRODUCED
    assert "no engine 'absent' has a session; introduced: measured, prior" in result.stderr


def test_no_sidecar_is_said_in_words(tmp_path: Path):
    result = controller("engines", "--address", f"unix:{tmp_path}/absent.sock")
    assert result.returncode == Exit.NO_SIDECAR
    assert "is `controller serve` running there?" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_is_printed():
    assert controller("version").stdout.strip() == package.__version__


@pytest.mark.parametrize(("number", "text"), [(0, "0 shifts"), (1, "1 shift"), (2, "2 shifts")])
def test_one_is_counted_in_the_singular(number: int, text: str):
    assert count_text(number, "shift", "shifts") == text

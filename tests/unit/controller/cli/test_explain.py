import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import controller as package
from controller.cli.explain import _counted, probing_text, resembles_text
from controller.util.exit_codes import Exit
from speculation.v1 import service_pb2, service_pb2_grpc
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
        result = controller(*pin, "--allow-no-effect", "--address", running.address)
        assert result.returncode == 0, result.stderr
        shown = (
            ("engines",), ("explain", "odd"), ("override", "list"), ("override", "log"),
        )  # fmt: skip
        for command in shown:
            result = controller(*command, "--address", running.address)
            assert result.returncode == 0, result.stderr
            assert words in result.stdout, command


def test_the_address_comes_from_the_environment_too(sidecar: SidecarProcess):
    result = controller("engines", environment={"CONTROLLER_ADDRESS": sidecar.address})
    assert result.returncode == 0, result.stderr
    assert "measured" in result.stdout


def test_an_explanation_shows_every_choice_and_marks_the_one_that_runs(sidecar: SidecarProcess):
    result = controller("explain", "measured", "--batch-size", "8", "--address", sidecar.address)
    assert result.returncode == 0, result.stderr
    assert "measured at B = 8" in result.stdout
    assert result.stdout.count("->") == 1
    assert f"profile {make_profile('profiled').profile_id}" in result.stdout
    assert "behind the best" in result.stdout
    assert "probing has cost" in result.stdout
    table = result.stdout[: result.stdout.index("└")].splitlines()
    header = next(line for line in table if "tokens/s" in line)
    column = [title.strip() for title in header.strip("┃").split("┃")].index("tokens/s")
    rates = [float(line.strip("│").split("│")[column]) for line in table if "│" in line]
    assert len(rates) == 4
    assert rates == sorted(rates, reverse=True)


def test_probes_that_gained_time_have_not_lost_any():
    assert probing_text(-0.29) == "0.29 s gained"
    assert probing_text(0.29) == "0.29 s lost"


def test_past_traffic_is_named_by_the_time_of_day():
    answer = service_pb2.ExplainResponse()
    assert resembles_text(answer) == ""
    now = time.time()
    answer.resembles.began_seconds_ago, answer.resembles.ended_seconds_ago = 420.0, 120.0
    answer.resembles.visits = 1
    began = time.strftime("%H:%M", time.localtime(now - 420))
    ended = time.strftime("%H:%M", time.localtime(now - 120))
    found = re.fullmatch(
        r"; it resembles (\d\d:\d\d):\d\d to (\d\d:\d\d):\d\d, seen 1 time before",
        resembles_text(answer),
    )
    assert found is not None
    # A minute may begin between the two readings of the clock.
    assert found.groups() == (began, ended) or time.time() % 60 < 5


def test_an_explanation_from_the_prior_says_so(sidecar: SidecarProcess):
    result = controller("explain", "prior", "--address", sidecar.address)
    assert result.returncode == 0, result.stderr
    assert "costs: generic prior (no profile matches)" in result.stdout
    assert "profile-missing" in result.stdout


def test_an_engine_that_is_not_there_is_named(sidecar: SidecarProcess):
    result = controller("explain", "nobody", "--address", sidecar.address)
    assert result.returncode == Exit.NOT_INTRODUCED
    assert "no engine 'nobody' has a session; introduced: measured, prior" in result.stderr


def test_no_sidecar_is_said_in_words(tmp_path: Path):
    result = controller("engines", "--address", f"unix:{tmp_path}/nobody.sock")
    assert result.returncode == Exit.NO_SIDECAR
    assert "is `controller serve` running there?" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_is_printed():
    assert controller("version").stdout.strip() == package.__version__


@pytest.mark.parametrize(("number", "text"), [(0, "0 shifts"), (1, "1 shift"), (2, "2 shifts")])
def test_one_is_counted_in_the_singular(number: int, text: str):
    assert _counted(number, "shift", "shifts") == text

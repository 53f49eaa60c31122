"""`top --fleet` and `engines --fleet`: two sidecar processes, a real Redis, and terminals."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from controller.cli.fleet import FLEET, footer_lines, show_fleet
from controller.cli.output import Output, fit_table, print_list
from controller.util.exit_codes import Exit
from speculation.v1.service_pb2 import FleetEngine, FleetTotals, ListFleetResponse
from tests.support.eventually import eventually
from tests.support.linked_engine import linked_engine
from tests.support.redis_server import RedisServer
from tests.support.sidecar_process import controller, sidecar_process

ID = "inference-7f9c4d-x2x9q:30000"
BOTH = ["pod-1", "pod-2"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one of two sidecars, each with an engine."""
    folder = tmp_path_factory.mktemp("fleet")
    places = [folder / "a", folder / "b"]
    for place in places:
        place.mkdir()
    with RedisServer(folder / "redis") as server:
        variables = {"CONTROLLER_REDIS_URL": server.url}
        with (
            sidecar_process(places[0], environment=variables) as one,
            sidecar_process(places[1], environment=variables) as two,
            linked_engine(one.address, "pod-1"),
            linked_engine(two.address, "pod-2"),
        ):
            # A sidecar may have reported its engine to the other one before its stream was open.
            command = ("engines", "--fleet", "-o", "name", "--filter", "link=waiting")
            eventually(
                lambda: controller(*command, "--address", one.address).stdout.split() == BOTH,
                description="both are listed with their streams",
            )
            yield one.address


@pytest.mark.parametrize("command", [("engines",), ("top", "--once")])
def test_each_form_lists_both_engines(address: str, command: tuple[str, ...]):
    def asked(*more: str) -> str:
        done = controller(*command, "--fleet", *more, "--address", address)
        assert (done.returncode, done.stderr) == (Exit.DONE, "")
        return done.stdout

    table = asked()
    assert [line.split()[0] for line in table.splitlines() if line.startswith("pod")] == BOTH
    assert "2 engines of 2 sidecars: steered 0, off 0, unsteered 0, not heard of 0, waiting 2" in (
        table
    )
    assert "+0 against γ = 0 (estimated)" in table
    document = json.loads(asked("-o", "json"))
    assert document == yaml.safe_load(asked("-o", "yaml")) | {
        "items": document["items"],
        "totals": document["totals"],
    }
    assert (document["api_version"], document["kind"]) == ("speculation.v1", "FleetEngineList")
    assert [item["engine_id"] for item in document["items"]] == BOTH
    assert [item["local"] for item in document["items"]] == [True, False]
    # Zeros are printed: a program counts them.
    assert {item["batch_size"] for item in document["items"]} == {0}
    assert (document["totals"]["engines"], document["totals"]["off"]) == (2, 0)
    assert asked("-o", "name").split() == BOTH
    assert asked("-o", "name", "--filter", "pod-2 link=waiting").split() == ["pod-2"]


def test_wrong_options_are_usage_errors(address: str):
    for arguments in (
        ("engines", "--filter", "x"),
        ("top", "--once", "--filter", "x"),
        ("engines", "--fleet", "--filter", "speed=9"),
    ):
        done = controller(*arguments, "--address", address)
        assert done.returncode == Exit.USAGE, done.stderr
        assert "Traceback" not in done.stderr
    assert "there are sidecar, engine, model" in done.stderr


def test_a_sidecar_without_redis_shows_its_own_and_says_why(tmp_path: Path):
    with sidecar_process(tmp_path) as alone, linked_engine(alone.address, "pod-1"):
        done = controller("engines", "--fleet", "--address", alone.address)
        assert done.returncode == Exit.DONE
        assert "\npod-1 " in done.stdout
        assert (
            "only the engines of this sidecar are shown: this sidecar shares no store with others "
            "(CONTROLLER_REDIS_URL)"
        ) in done.stdout


def engine(**changes: object) -> FleetEngine:
    values: dict[str, object] = {
        "engine_id": ID, "sidecar": "inference-7f9c4d-x2x9q", "batch_size": 128, "gamma": 3,
        "drafter": "eagle3+ngram", "accept_length": 2.5, "tokens_per_second": 12345, "gain": 1.3,
        "tokens_gained_per_second": 2848.8, "reason": "exploit", "link": "steered",
        "overrides": ["night-pin-of-the-fleet"], "age_seconds": 3.2, "target_model": "m",
    }  # fmt: skip
    return FleetEngine(**values | changes)  # type: ignore[arg-type]


def render_fleet(width: int, *engines: FleetEngine) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    table, left_out = fit_table(FLEET, engines, console)
    console.print(table)
    return f"{shown.getvalue()}left out: {left_out}"


def test_at_80_columns_batch_and_draft_length_stay_and_ids_are_whole():
    rendered = render_fleet(80, engine())
    assert f"{ID} │ 128 │ 3 │" in rendered
    assert "steered" in rendered
    longer = engine(engine_id=f"{ID}-of-a-deployment-with-a-long-name-in-a-namespace-{ID}")
    rendered = render_fleet(80, longer)
    assert "128 │ 3 │" in rendered
    cells = (line.split("│")[1].strip() for line in rendered.splitlines() if "│" in line)
    assert longer.engine_id in "".join(cells)


def test_wide_shows_all_and_counts_overrides_that_are_not_named(
    capsys: pytest.CaptureFixture[str],
):
    print_list(FLEET, [engine(more_overrides=3)], Output.WIDE)
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "engine", "B", "γ", "drafter", "τ", "tokens/s", "gain", "gained/s", "reason", "link",
        "overrides", "age", "sidecar", "model",
    ]  # fmt: skip
    assert "night-pin-of-the-fleet, and 3 more" in row
    assert "x1.30  " in row
    assert "+2849" in row


def test_words_of_the_store_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str]):
    answer = ListFleetResponse(engines=[engine(drafter="\x1b[2J")], trouble="\x1b]0;x\x07")
    for output in (Output.TABLE, Output.NAME, Output.JSON, Output.YAML):
        show_fleet(answer, output)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07"} & set(shown)
    assert "only the engines of this sidecar are shown" in shown


def test_what_is_missing_is_said_below_the_table():
    answer = ListFleetResponse(
        totals=FleetTotals(
            engines=9, sidecars=4, steered=5, off=2, unsteered=1, silent=2, waiting=1, overridden=3,
            generated_per_second=12345.6, tokens_gained_per_second=-12.3,
        ),
        trouble="the store is unavailable: x", refused=7, left_out=8,
    )  # fmt: skip
    assert footer_lines(answer) == [
        (
            "9 engines of 4 sidecars: steered 5, off 2, unsteered 1, not heard of 2, waiting 1, "
            "overridden 3"
        ),
        "12,346 tokens/s, -12 against γ = 0 (estimated)",
        "only the engines of this sidecar are shown: the store is unavailable: x",
        "7 entries in the store cannot be used",
        "8 engines or sidecars are not shown: the view is full",
    ]

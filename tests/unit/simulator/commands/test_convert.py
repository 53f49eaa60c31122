import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Fingerprint
from simulator.commands.convert import convert

DRAFTERS = (DrafterIdentity("mtp", "models/mtp", "r1"), DrafterIdentity("dflash"))
CELLS = tuple(
    ProfileCell(drafter, gamma, size, 0.01 * (1 + gamma) + 0.001 * size, 0.0, 1)
    for drafter in ("mtp", "dflash")
    for gamma in (0, 3)
    for size in (1, 4)
)
BOTH = Profile(Fingerprint("qwen3", device="H200"), DRAFTERS, 256.0, 1e-8, CELLS, hardware="H200")
ONE = Profile(BOTH.fingerprint, DRAFTERS[:1], 256.0, 1e-8, CELLS[:4])

app = typer.Typer()
app.command()(convert)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("both.json").write_text(BOTH.to_json())
    Path("one.json").write_text(ONE.to_json())
    Path("bad.csv").write_text("batch_size,num_draft_tokens,step_seconds\n1,1,nan\n")
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_profile_becomes_a_table_and_a_profile_again():
    done = run("one.json", "costs.csv")
    assert done.exit_code == 0, done.output
    assert done.stdout == "costs.csv: 4 cells\n"
    assert Path("costs.csv").read_text().splitlines()[:2] == [
        "batch_size,num_draft_tokens,step_seconds",
        "1,1,0.011",
    ]
    done = run("costs.csv", "again.json", "--like", "one.json")
    assert done.exit_code == 0, done.output
    again = Profile.from_json(Path("again.json").read_text())
    assert again.cells == ONE.cells
    assert (again.fingerprint, again.drafters) == (ONE.fingerprint, ONE.drafters)
    assert (again.kv_tokens_per_sequence, again.seconds_per_kv_token) == (256.0, 1e-8)


def test_one_drafter_of_several_is_named():
    assert run("both.json", "costs.csv", "--drafter", "dflash").exit_code == 0
    done = run("costs.csv", "again.json", "--like", "both.json", "--drafter", "mtp")
    assert done.exit_code == 0
    again = Profile.from_json(Path("again.json").read_text())
    assert again.drafters == DRAFTERS[:1]
    assert {cell.drafter for cell in again.cells} == {"mtp"}


def test_a_file_is_replaced_by_force_only():
    Path("costs.csv").write_text("mine")
    refused = run("one.json", "costs.csv")
    assert refused.exit_code == 2
    assert "costs.csv: is there already; --force replaces it" in refused.stderr
    assert Path("costs.csv").read_text() == "mine"
    assert run("one.json", "costs.csv", "--force").exit_code == 0
    assert Path("costs.csv").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.json", "a.csv"], "no.json: cannot be read: No such file"),
        (["bad.csv", "a.json", "--like", "one.json"], "bad.csv:2: step_seconds 'nan'"),
        (["bad.csv", "a.json"], "--like PROFILE.json is needed"),
        (["bad.csv", "a.json", "--like", "bad.csv"], "bad.csv: is not a profile"),
        (["one.json", "a.csv", "--like", "one.json"], "a profile knows its engine"),
        (["one.json", "a.json"], "only .json to .csv and .csv to .json are possible"),
        (["one.json", "a"], "only .json to .csv"),
        (["both.json", "a.csv"], "has the drafters ['mtp', 'dflash']; --drafter NAME is needed"),
        (["both.json", "a.csv", "--drafter", "x"], "drafter 'x' was not measured"),
        (["one.json", "one.json/a.csv"], "one.json/a.csv: cannot be written"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line_and_nothing_is_written(
    here: Path, arguments: list[str], message: str
):
    before = sorted(here.iterdir())
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("controller convert: ")
    assert refused.stderr.count("\n") == 1
    assert message in refused.stderr
    assert sorted(here.iterdir()) == before


def test_a_drafter_that_the_model_profile_lacks_is_refused():
    run("one.json", "costs.csv")
    refused = run("costs.csv", "a.json", "--like", "one.json", "--drafter", "x")
    assert refused.exit_code == 2
    assert "one.json: there is no drafter 'x', only ['mtp']" in refused.stderr


def test_the_profile_says_how_it_was_made(monkeypatch: pytest.MonkeyPatch):
    run("one.json", "costs.csv")
    monkeypatch.setattr("sys.argv", ["controller", "convert", "costs.csv", "a b.json"])
    assert run("costs.csv", "again.json", "--like", "one.json").exit_code == 0
    profile = json.loads(Path("again.json").read_text())
    assert profile["command"] == "controller convert costs.csv 'a b.json'"
    assert profile["measured_at"] == ""

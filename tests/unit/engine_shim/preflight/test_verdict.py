"""The answer of `speculation-would-steer`, as it is printed and as a program reads it."""

from dataclasses import replace

import pytest

from engine_shim.common.checks import Check, make_check, require_no_obstacle
from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.preflight.__main__ import build_parser
from engine_shim.preflight.verdict import (
    Drafter,
    Memory,
    Verdict,
    environment_variables,
    render_text,
)
from engine_shim.sglang.api.settings import PluginSettings

LONG = "the draft length can be steered for chains only, not for trees; set this option to 1"
REFUSED = Verdict("SGLang", "0.5.23", (Check("version", "0.5.23"), Check("topk", "4", LONG)))
STEERED = Verdict(
    "SGLang",
    "0.5.23",
    (Check("topk", "1"),),
    {"page size": "64"},
    (Drafter("eagle3", (0, 1, 3), "folder/of/a/drafter"), Drafter("ngram", (1, 3))),
    Memory({"total_mib": 12.5}, ("MiB: 12.5, of which a line can be longer than a terminal",)),
    {"SPECULATION_GAMMAS": "0,1,3"},
)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for verdict in (REFUSED, STEERED):
        assert max(map(len, render_text(verdict, width).splitlines())) <= width


def test_the_help_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, build_parser().format_help().splitlines())) <= 80


def test_an_obstacle_stands_below_what_was_looked_at_and_nothing_else_is_promised() -> None:
    lines = render_text(REFUSED, 60).splitlines()
    assert lines[0] == "SGLang 0.5.23: this engine would not be steered."
    assert lines[2:4] == ["yes  version  0.5.23", "no   topk     4"]
    assert lines[4].startswith("     -> the draft length can be")
    assert " ".join(" ".join(lines[4:]).split()) == f"-> {LONG}"


def test_a_steered_engine_has_its_drafters_memory_and_variables() -> None:
    text = render_text(STEERED, 80)
    assert "yes  page size  64" in text
    assert "  eagle3  draft lengths 0,1,3\n  ngram   draft lengths 1,3\n" in text
    assert "\n  SPECULATION_GAMMAS=0,1,3\n" in text


def test_a_path_is_never_broken_and_commands_no_terminal() -> None:
    path = "/a/" + "long-folder/" * 12
    text = render_text(Verdict("SGLang", "1", (Check("model", f"{path}\x1b[2J"),)), 40)
    assert path in text
    assert "\x1b" not in text


def test_what_was_not_looked_at_is_said() -> None:
    verdict = replace(STEERED, left_out=("--trust-remote-code", "--load-format"))
    lines = render_text(verdict, 120).splitlines()
    assert lines[1].startswith("Ignored flags: --trust-remote-code, --load-format. They are not")
    assert verdict.document()["left_out"] == ["--trust-remote-code", "--load-format"]


def test_a_program_reads_the_same() -> None:
    document = STEERED.document()
    assert (document["api_version"], document["kind"]) == ("speculation.v1", "WouldSteer")
    assert document["would_be_steered"] is True
    assert document["memory"] == {"total_mib": 12.5}
    assert document["drafters"][1] == {"name": "ngram", "gammas": (1, 3), "model": ""}
    assert REFUSED.document()["checks"][1]["obstacle"] == LONG
    assert REFUSED.document()["memory"] is None


def test_the_first_obstacle_ends_a_start_with_its_lead() -> None:
    failed_check = make_check(
        "topk", 4, {"never": False, "trees": True, "too late": True}, "it is on, but "
    )
    assert failed_check == Check("topk", "4", "trees", "it is on, but ")
    assert make_check("topk", 1, {"never": False}).refusal == ""
    require_no_obstacle([make_check("topk", 1, {"never": False})])
    with pytest.raises(UnsupportedEngineError, match=r"^it is on, but trees$"):
        require_no_obstacle([Check("version", "1"), failed_check, Check("x", "y", "z")])


def test_the_variables_are_those_that_are_set_and_those_that_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECULATION_LOOKUP", "true")
    monkeypatch.setenv("SPECULATION_GRAPH_LIMITS", "5:8,7:4")
    monkeypatch.setenv("SPECULATION_SIDECAR", "")
    assert environment_variables(PluginSettings(), (0, 1, 2, 3, 5, 7)) == {
        "SPECULATION_SIDECAR": "unix:/run/speculation/controller.sock",
        "SPECULATION_GAMMAS": "0,1,2,3,5,7",
        "SPECULATION_GRAPH_LIMITS": "5:8,7:4",
        "SPECULATION_LOOKUP": "1",
    }


def test_an_engine_that_gains_nothing_starts_and_its_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    useless = Check("drafter", "eagle3", "set EAGLE3", engine_starts=True)
    hint = Check("name", "Llama", advice="write LlamaForCausalLMEagle")
    require_no_obstacle((useless, hint))
    assert [record.getMessage() for record in caplog.records] == [
        "drafter: set EAGLE3", "name: write LlamaForCausalLMEagle",
    ]  # fmt: skip
    verdict = Verdict("SGLang", "1", (useless, hint))
    lines = render_text(verdict, 80).splitlines()
    assert lines[0] == "SGLang 1: this engine would start, and gain nothing from its drafter."
    assert lines[2:6] == [
        "no   drafter  eagle3", "     -> set EAGLE3", "yes  name     Llama",
        "     !  write LlamaForCausalLMEagle",
    ]  # fmt: skip
    assert not verdict.document()["would_be_steered"]
    assert [check["starts"] for check in verdict.document()["checks"]] == [True, False]


def test_one_obstacle_that_ends_the_start_is_enough() -> None:
    both = (Check("drafter", "x", "no gain", engine_starts=True), Check("topk", "4", LONG))
    assert render_text(Verdict("SGLang", "1", both), 80).startswith(
        "SGLang 1: this engine would not be steered."
    )
    with pytest.raises(UnsupportedEngineError, match="the draft length can be"):
        require_no_obstacle(both)

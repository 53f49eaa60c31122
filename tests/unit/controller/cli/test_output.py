"""What lists look like: on terminals of any width, in pipes, and for programs."""

import ast
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from controller.cli import output as output_module
from controller.cli.explain import _ENGINES
from controller.cli.output import (
    Column,
    Listing,
    Output,
    fit_table,
    print_change,
    print_document,
    print_error,
    print_line,
    print_lines,
    print_list,
    print_wrapped,
)
from controller.cli.override_lists import _OVERRIDES
from controller.cli.top import ENGINES
from speculation.v1.policy_pb2 import HeldOverride, Override
from speculation.v1.service_pb2 import EngineOverview


@dataclass(frozen=True)
class Pod:
    name: str
    gain: str = "x1.20"
    note: str = "quiet"
    missing: str = ""


PODS: Listing[Pod] = Listing(
    "PodList",
    lambda pod: pod.name,
    (
        Column("pod", lambda pod: pod.name),
        Column("gain", lambda pod: pod.gain, is_right_aligned=True, priority=1),
        Column("note", lambda pod: pod.note, priority=2),
        Column("host", lambda pod: f"host of {pod.name}", is_wide_only=True),
    ),
    lambda pod: {"name": pod.name, "gain": pod.gain},
    lambda pod: pod.missing,
)
# No column may be left out.
NOTES: Listing[Pod] = Listing(
    "PodList",
    lambda pod: pod.name,
    (Column("pod", lambda pod: pod.name), Column("note", lambda pod: pod.note)),
    lambda pod: pod.name,
)
LONG = "a-pod-with-a-name-as-kubernetes-makes-them-7f9c4d-x2x9q"


def on_terminal(
    listing: Listing[Any], items: Sequence[Any], width: int, *, wide: bool = False
) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    table, left_out = fit_table(listing, items, console, wide=wide)
    console.print(table)
    return f"{shown.getvalue()}left out: {left_out}"


def test_in_a_pipe_there_is_one_aligned_line_for_each_item(capsys) -> None:
    print_list(PODS, [Pod(LONG), Pod("b", gain="x10.00")], Output.TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["pod", "gain", "note"]
    assert lines[1].split() == [LONG, "x1.20", "quiet"]
    assert lines[2].index("x10.00") + 6 == lines[1].index("x1.20") + 5


def test_the_least_important_columns_go_first_and_ids_are_never_cut() -> None:
    assert "left out: []" in on_terminal(PODS, [Pod(LONG)], 90)
    narrow = on_terminal(PODS, [Pod(LONG)], 74)
    assert "left out: ['note']" in narrow
    assert LONG in narrow
    assert "left out: ['note', 'gain']" in on_terminal(PODS, [Pod(LONG)], 62)
    folded = on_terminal(PODS, [Pod(LONG)], 30)
    assert LONG in "".join(c for c in folded if c not in "│ \n")


def test_wide_shows_all_columns(capsys) -> None:
    print_list(PODS, [Pod("a")], Output.WIDE)
    assert capsys.readouterr().out.splitlines()[0].split() == ["pod", "gain", "note", "host"]
    assert "left out: []" in on_terminal(PODS, [Pod(LONG)], 40, wide=True)


def test_documents_name_their_version_and_kind(capsys) -> None:
    expected = {
        "api_version": "speculation.v1",
        "kind": "PodList",
        "items": [{"name": "ä", "gain": "x1.20"}],
    }
    print_list(PODS, [Pod("ä")], Output.JSON)
    assert json.loads(capsys.readouterr().out) == expected
    print_list(PODS, [Pod("ä")], Output.YAML)
    assert yaml.safe_load(capsys.readouterr().out) == expected
    print_list(PODS, [], Output.JSON)
    assert json.loads(capsys.readouterr().out)["items"] == []


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_values_that_no_language_has_are_written_as_ones_that_it_has(
    output: Output, capsys
) -> None:
    values = {"a": math.nan, "b": (1, math.inf), "c": Path("/x"), "d": {7: Output.NAME}, "e": None}
    print_document("Odd", values, output)
    document = yaml.safe_load(capsys.readouterr().out)
    del document["api_version"], document["kind"]
    assert document == {"a": None, "b": [1, None], "c": "/x", "d": {"7": "name"}, "e": None}


def test_text_of_others_keeps_its_lines_and_commands_nothing(capsys) -> None:
    print_wrapped("one\x1b[2J\ntwo")
    assert capsys.readouterr().out == "one\N{REPLACEMENT CHARACTER}[2J\ntwo\n"


def test_a_name_is_whole_where_only_other_cells_need_two_lines() -> None:
    rendered = on_terminal(PODS, [Pod(LONG, missing="")], 58)
    assert LONG not in rendered
    rendered = on_terminal(NOTES, [Pod(LONG, note="word " * 9)], 75)
    assert LONG in rendered
    assert max(map(len, rendered.splitlines())) <= 75


def test_names_are_one_a_line(capsys) -> None:
    print_list(PODS, [Pod("a"), Pod("b")], Output.NAME)
    assert capsys.readouterr().out == "a\nb\n"
    print_list(PODS, [], Output.NAME, "nothing is there")
    assert capsys.readouterr().out == ""


def test_an_empty_table_says_so(capsys) -> None:
    print_list(PODS, [], Output.TABLE, "nothing is there")
    assert capsys.readouterr().out == "nothing is there\n"


def test_an_item_that_cannot_be_shown_says_why(capsys) -> None:
    print_list(PODS, [Pod("a"), Pod("b", missing="it is away")], Output.TABLE)
    assert capsys.readouterr().out.splitlines()[2].split(maxsplit=1) == ["b", "it is away"]
    assert "it is away" in on_terminal(PODS, [Pod("b", missing="it is away")], 60)


@pytest.mark.parametrize("output", [Output.TABLE, Output.NAME])
def test_the_words_of_others_cannot_command_a_terminal(output: Output, capsys) -> None:
    print_list(PODS, [Pod("a\x1b[2J\nb")], output)
    assert "\x1b" not in capsys.readouterr().out


def test_at_80_columns_top_has_the_batch_and_the_draft_length_and_lists_whole_ids() -> None:
    line = EngineOverview(
        engine_id="inference-7f9c4d-x2x9q:30000", batch_size=128, gamma=3, drafter="eagle3+ngram",
        accept_length=2.5, tokens_per_second=12345, gain=1.3, regime="off", reason="exploit",
        link="steered", overrides=["night-pin-of-the-fleet"],
    )  # fmt: skip
    rendered = on_terminal(ENGINES, [line], 80)
    assert "inference-7f9c4d-x2x9q:30000 │ 128 │ 3 │" in rendered
    held = HeldOverride(override=Override(override_id="o-20261126-093015-7f9c4d2a"), etag="1-ab")
    assert "o-20261126-093015-7f9c4d2a" in on_terminal(_OVERRIDES, [held], 80)
    assert _ENGINES.columns[0].priority == 0


# Commands of a terminal of 7 and of 8 bits, text that turns around, line ends that are not
# ours, half a character, an invisible one beyond 16 bits, and deletion.
HOSTILE = "a\x1b[2J\x9b31m\x85\u202eb\u2066\u200b\u2028\ufeff\ud800\U000e0041\x7f\rc\nd\tγ"


def is_harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("where", ["value", "key"])
@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_documents_escape_what_is_not_printable_and_lose_nothing(
    output: Output, where: str, capsys
) -> None:
    # Each alone as well: YAML has its own view of which strings need quotes.
    texts = [HOSTILE, *(f"a{character}b" for character in HOSTILE)]
    values = {"texts": texts} if where == "value" else dict.fromkeys(texts, 1)
    print_document("Odd", values, output)
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert "γ" in shown
    document = json.loads(shown) if output is Output.JSON else yaml.safe_load(shown)
    assert {key: document[key] for key in values} == values


def test_news_are_one_line_each_whatever_they_hold(capsys) -> None:
    print_change("News", {"text": HOSTILE}, Output.JSON, "")
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    assert is_harmless(shown)
    assert json.loads(shown)["text"] == HOSTILE


@pytest.mark.parametrize("output", [Output.TABLE, Output.WIDE, Output.NAME])
def test_tables_and_names_show_a_character_that_means_unknown(output: Output, capsys) -> None:
    print_list(PODS, [Pod(HOSTILE, note=HOSTILE, missing="")], output)
    print_list(PODS, [Pod(HOSTILE, missing=HOSTILE)], output)
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert shown.count("\n") == (2 if output is Output.NAME else 4)


def test_text_and_errors_are_harmless(capsys) -> None:
    print_wrapped(HOSTILE)
    print_lines(HOSTILE)
    print_error(HOSTILE)
    captured = capsys.readouterr()
    assert is_harmless(captured.out)
    assert is_harmless(captured.err)
    print_line(HOSTILE)
    assert capsys.readouterr().out.count("\n") == 1


def test_commands_print_through_these_functions_only() -> None:
    """What is printed elsewhere would reach a terminal as it came."""
    folder = Path(output_module.__file__).parent
    for path in sorted(folder.glob("*.py")):
        if path.name in {"output.py", "completion.py"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in {"print", "typer.echo", "typer.secho", "sys.stdout.write"}, path

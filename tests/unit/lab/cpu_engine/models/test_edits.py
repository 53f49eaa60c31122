"""Code edits from a library's sources, and their encoding."""

import ast
import random

import numpy as np
import pytest

from lab.cpu_engine.models import edits
from lab.cpu_engine.models.edits import (
    KINDS,
    EditSampler,
    EncodedEdit,
    edits_of,
    load_edits,
    padded,
    save_edits,
)

SOURCE = '''
@cached
def area(shape, unit):
    """Return the area of a shape in square units."""
    width = shape.width
    # width of the border
    width = max(width, unit)

    def scale(factor):
        return width * factor

    return scale(shape.height)


class Box:
    """A box."""

    def close(self): pass
'''


def found(kind: str, source: str = SOURCE) -> list[edits.Edit]:
    return [edit for edit in edits_of(source, random.Random(0)) if edit.kind == kind]


def test_docstrings_are_taken_out_of_the_request_and_stand_in_the_answer() -> None:
    area, box = found("document")
    assert area.request == "# Write the docstrings.\n" + area.answer.replace(
        '    """Return the area of a shape in square units."""\n', ""
    )
    assert area.answer.startswith("@cached\ndef area(")
    assert '"""A box."""' in box.answer
    assert '"""A box."""' not in box.request


def test_every_function_logs_its_arguments_first() -> None:
    (area, scale) = found("log")
    assert '    log.debug("area shape=%r unit=%r", shape, unit)\n    width = shape' in area.answer
    assert '        log.debug("scale factor=%r", factor)\n        return' in area.answer
    assert scale.answer.startswith("def scale(factor):\n    log.debug(")
    assert '"""' not in area.request


def test_boilerplate_is_the_same_in_every_answer() -> None:
    (area, scale) = found("guard")
    assert area.answer.count("if not features.is_enabled(FEATURE):\n") == 2
    assert scale.answer.count("raise RuntimeError(") == 1
    licensed = found("licence")
    (notice,) = {edit.answer.removesuffix(edit.request.partition("\n")[2]) for edit in licensed}
    assert notice.startswith("# Licensed under")


def test_a_description_has_a_line_for_each_argument() -> None:
    (area, scale) = found("describe")
    assert "        shape: the value that is used.\n        unit: the value" in area.answer
    assert "            factor: the value" in area.answer
    assert scale.answer.startswith('def scale(factor):\n    """Does what its name says.\n')


def test_a_rename_changes_the_name_and_neither_attributes_nor_comments() -> None:
    (area,) = found("rename")
    new = area.request.split("\n")[0].removeprefix("# Rename width to ").removesuffix(".")
    assert f"{new} = shape.width" in area.answer
    assert "# width of the border" in area.answer
    assert f"return {new} * factor" in area.answer


@pytest.mark.parametrize("kind", KINDS)
def test_requests_and_answers_are_python(kind: str) -> None:
    for edit in found(kind):
        ast.parse(edit.request)
        ast.parse(edit.answer)
        assert edit.request.partition("\n")[2] != edit.answer


@pytest.mark.parametrize("source", ["def broken(:", "x = 1\n", "\tdef tabs():\n\t\tpass\n"])
def test_sources_without_an_edit_have_none(source: str) -> None:
    assert not list(edits_of(source, random.Random(0)))


def test_held_out_edits_are_read_as_they_were_written(tmp_path) -> None:
    kept = (EncodedEdit("log", (0, 5, 0), (7, 8, 0)), EncodedEdit("rename", (0, 9, 1, 0), (1, 0)))
    save_edits(kept, tmp_path)
    assert load_edits(tmp_path) == kept


def test_rows_are_padded_and_what_is_padding_counts_for_nothing() -> None:
    tokens, aims = padded([(0, 5, 6), (0, 7)])
    assert tokens.tolist() == [[0, 5, 6], [0, 7, 0]]
    assert aims.tolist() == [[5, 6], [7, -100]]


def test_a_batch_stays_within_its_tokens_and_has_the_kinds_that_were_asked_for() -> None:
    some = [EncodedEdit("log", (0, 1, 0), tuple(range(1, n))) for n in range(10, 200)]
    some += [EncodedEdit("rename", (0, 2, 0), tuple(range(1, n))) for n in range(10, 200)]
    sampler = EditSampler(some, {"rename": 1.0}, 600, seed=3)
    for _ in range(20):
        tokens, _ = sampler.draw()
        assert tokens.numel() <= 600
        assert np.all(tokens[:, 1].numpy() == 2)

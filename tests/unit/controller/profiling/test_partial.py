import dataclasses
import json
import os
from datetime import UTC, datetime, timedelta

import pytest

from controller.core.engine_spec import DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.profiling.errors import InvalidPartialError
from controller.profiling.profile_file import (
    PartialMeasurement,
    load_partial,
    partial_path,
    save_partial,
)
from controller.profiling.samples import CellKey, Context, Samples
from controller.util.files import write_atomically

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)
SPEC = EngineSpec(
    "engine-0",
    Fingerprint("target", device="cpu", graph_batch_sizes=(1, 2)),
    (DrafterSpec("mtp", DrafterKind.MTP, (0, 1), "draft", "r1"),),
    8,
)

CELLS = {
    CellKey("mtp", 0, 1): Samples([0.01, 0.02], [128, 129], [0, 1]),
    CellKey("mtp", 1, 4, Context.LONG): Samples([0.03], [4096], [0]),
}


def a_partial(started_at=NOW):
    return PartialMeasurement.from_cells(SPEC, started_at, ("grid:1",), CELLS)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    path = tmp_path / "p.partial.json"
    save_partial(path, a_partial())
    loaded_partial = load_partial(path)
    assert loaded_partial == a_partial()
    assert loaded_partial is not None
    assert loaded_partial.cells_by_key() == CELLS
    assert [p.name for p in tmp_path.iterdir()] == ["p.partial.json"]


def test_it_lies_beside_the_output(tmp_path):
    assert partial_path(tmp_path / "a.json") == tmp_path / "a.partial.json"


def test_no_file_is_no_partial(tmp_path):
    assert load_partial(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("format",), "speculation-profile/1", "format"),
        (("started_at",), "yesterday", "started_at"),
        (("started_at",), "2030-05-01T12:00:00", "time zone"),
        (("cells", 0, "seconds"), [0.01], "different numbers of"),
        (("cells", 0, "seconds"), [0.01, -1.0], "invalid seconds or kv_tokens"),
        (("cells", 0, "seconds"), [0.01, "0.02"], "seconds"),
        (("cells", 0, "kv_tokens"), [128, -5], "invalid seconds or kv_tokens"),
        (("cells", 0, "batch_size"), 0, "batch size 0"),
        (("cells", 0, "context"), "medium", "context"),
        (("cells", 0, "colour"), "red", "colour"),
        (("fingerprint",), None, "fingerprint"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path, path, value, complaint):
    file = tmp_path / "p.json"
    save_partial(file, a_partial())
    body = json.loads(file.read_text())
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(body))
    with pytest.raises(InvalidPartialError, match=complaint):
        load_partial(file)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"NaN", b'{"format": 1}'])
def test_what_is_no_partial_at_all_is_refused(tmp_path, content):
    file = tmp_path / "p.json"
    file.write_bytes(content)
    with pytest.raises(InvalidPartialError, match=r"p\.json"):
        load_partial(file)


def test_a_partial_of_this_engine_and_day_can_be_gone_on_with():
    assert a_partial().unusable_reason(SPEC, NOW + timedelta(hours=23)) == ""


def test_an_old_partial_cannot():
    assert "more than a day" in a_partial().unusable_reason(SPEC, NOW + timedelta(hours=25))


def test_nor_can_one_from_the_future():
    assert a_partial().unusable_reason(SPEC, NOW - timedelta(hours=1))


def test_nor_one_of_another_engine_and_the_field_is_named():
    other = dataclasses.replace(
        SPEC, fingerprint=dataclasses.replace(SPEC.fingerprint, device="gpu")
    )
    assert "device differs" in a_partial().unusable_reason(other, NOW)
    drafter = dataclasses.replace(SPEC.drafters[0], revision="r2")
    other = dataclasses.replace(SPEC, drafters=(drafter,))
    assert "drafter mtp differs" in a_partial().unusable_reason(other, NOW)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]

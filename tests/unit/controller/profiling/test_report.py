import dataclasses
import io

import pytest

from controller.core.clock import VirtualClock
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.profiling.profile_file import default_path, uncovered_choices
from controller.profiling.progress import BarReporter, LineReporter
from controller.profiling.report import hardware_note, measured_text, profile_tables

PROFILE = Profile(
    Fingerprint("target"),
    (DrafterIdentity("mtp"),),
    300.0,
    2e-6,
    (
        ProfileCell("mtp", 0, 1, 0.010, 0.001, 40),
        ProfileCell("mtp", 3, 1, 0.015, 0.001, 30),
        ProfileCell("mtp", 3, 4, 0.0205, 0.002, 20),
    ),
    hardware="a machine",
)


def text_of(profile):
    tables = list(profile_tables(profile))
    cells = [
        " ".join(
            cell for row in table.rows for cell in (*row, table.columns[-1].title, table.title)
        )
        for table in tables
    ]
    return "\n".join(
        [*(c.title for t in tables for c in t.columns), *cells, measured_text(profile)]
    )


def test_the_table_shows_milliseconds_and_ratios_to_gamma_zero():
    text = text_of(PROFILE)
    assert "B = 1" in text
    assert "15.00 1.50x" in text
    # No gamma = 0 there, so no ratio; and no cell where none was measured.
    assert "20.50 " in text
    assert "-" in text
    assert "300 tokens of context" in text
    assert "2.000 us" in text
    assert "20 to 40" in text
    assert "a machine" in text


def test_columns_that_are_left_out_first_lie_between_others():
    cells = tuple(ProfileCell("mtp", 0, 2**exponent, 0.01, 0.0, 1) for exponent in range(8))
    [table] = profile_tables(dataclasses.replace(PROFILE, cells=cells))
    assert [column.priority for column in table.columns] == [0, 0, 3, 2, 3, 1, 3, 2, 0]


def test_each_drafter_has_its_own_table():
    cells = (*PROFILE.cells, ProfileCell("dflash", 7, 1, 0.02, 0.0, 9))
    names = (DrafterIdentity("mtp"), DrafterIdentity("dflash"))
    text = text_of(dataclasses.replace(PROFILE, cells=cells, drafters=names))
    assert "mtp: milliseconds" in text
    assert "dflash: milliseconds" in text


def test_the_hardware_note_names_the_device_and_the_host():
    assert hardware_note("NVIDIA H200").startswith("device: NVIDIA H200; measured from a host")
    assert "processors" in hardware_note("")


def spec(model, device="AMD EPYC 7B13 @ 2.4GHz", gammas=(0, 3), **fingerprint):
    drafter = DrafterSpec("mtp", DrafterKind.MTP, gammas)
    return EngineSpec("e", Fingerprint(model, device=device, **fingerprint), (drafter,), 8)


def test_the_default_path_names_model_device_and_identity():
    path = default_path(spec("/models/Qwen3-8B/"))
    assert path.parent.name == "profiles"
    assert path.name.startswith("qwen3-8b-amd-epyc-7b13-2.4ghz-")
    assert path == default_path(spec("/models/Qwen3-8B/", shim_version="9"))
    assert path != default_path(spec("/models/Qwen3-8B/", dtype="float16"))
    assert default_path(spec("../..", device="")).name.startswith("unknown-unknown-")


def test_what_a_reused_profile_did_not_measure_is_listed():
    assert uncovered_choices(PROFILE, spec("target")) == ["batches above 4"]
    assert uncovered_choices(PROFILE, spec("target", gammas=(0, 3, 9)))[0] == "mtp gamma 9"


def test_lines_come_now_and_then():
    out, clock = io.StringIO(), VirtualClock()
    reporter = LineReporter(out, clock)
    for i in range(100):
        reporter.progress(i / 100, "B=1", 10.0)
        clock.advance(0.1)
    assert 1 <= len(out.getvalue().splitlines()) <= 3
    reporter.waiting("waiting for the engine")
    reporter.note("done")
    assert out.getvalue().splitlines()[-2:] == ["waiting for the engine", "done"]


def test_the_bar_takes_every_kind_of_news(capsys: pytest.CaptureFixture[str]):
    with BarReporter() as reporter:
        reporter.waiting("waiting")
        reporter.progress(0.5, "B=1", 3.0)
        reporter.note("[not markup]")
    assert "[not markup]" in capsys.readouterr().err

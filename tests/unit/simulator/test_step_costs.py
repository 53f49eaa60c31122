import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Fingerprint
from simulator.errors import InvalidInputError
from simulator.step_costs import (
    profile_table,
    read_profile,
    read_step_costs,
    write_step_costs,
)

HEADER = "batch_size,num_draft_tokens,step_seconds\n"
SECONDS = st.floats(1e-9, 3600)
GRIDS = st.tuples(
    st.lists(st.integers(1, 65_536), min_size=1, max_size=5, unique=True),
    st.lists(st.integers(1, 64), max_size=5, unique=True),
).flatmap(
    lambda axes: st.fixed_dictionaries({(b, g): SECONDS for b in axes[0] for g in (0, *axes[1])})
)


def profile_of(grid, drafter="mtp"):
    return Profile(
        Fingerprint("model"),
        (DrafterIdentity(drafter),),
        512.0,
        1e-8,
        tuple(ProfileCell(drafter, g, b, s, 0.0, 1) for (b, g), s in grid.items()),
    )


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "costs.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_widths_are_draft_lengths_plus_one_in_any_order_of_lines(write):
    table = read_step_costs(write(HEADER + "8,4,0.5\n1,1,0.1\n8,1,0.2\n1,4,0.3\n"))
    assert table.batch_sizes == (1, 8)
    assert table.gammas == (0, 3)
    assert table.seconds.tolist() == [[0.1, 0.2], [0.3, 0.5]]


@given(GRIDS)
def test_a_profile_survives_the_table(tmp_path_factory, grid):
    path = tmp_path_factory.mktemp("costs") / "a.csv"
    profile = profile_of(grid)
    path.write_text(write_step_costs(profile_table(profile, "mtp")))
    assert sorted(read_step_costs(path).cells("mtp"), key=repr) == sorted(profile.cells, key=repr)


@given(GRIDS)
def test_a_profile_survives_its_file(tmp_path_factory, grid):
    path = tmp_path_factory.mktemp("profile") / "a.json"
    path.write_text(profile_of(grid).to_json())
    assert read_profile(path) == profile_of(grid)


@pytest.mark.parametrize(
    ("rows", "line", "message"),
    [
        ("2,1,", 3, "step_seconds is blank"),
        (",1,0.1", 3, "batch_size is blank"),
        ("2,,0.1", 3, "num_draft_tokens is blank"),
        ("2,1", 3, "2 fields, the header names 3"),
        ("2,1,nan", 3, "step_seconds 'nan' is not a finite number"),
        ("2,1,inf", 3, "step_seconds 'inf' is not a finite number"),
        ("2,1,0", 3, "step_seconds 0 must be above 0"),
        ("2,1,-0.1", 3, "step_seconds -0.1 must be above 0"),
        ("2,1,4000", 3, "step_seconds 4000 must be above 0 and at most 3600"),
        ("2,0,0.1", 3, r"num_draft_tokens '0' must be in \[1, 65\]"),
        ("2,66,0.1", 3, r"num_draft_tokens '66' must be in \[1, 65\]"),
        ("0,1,0.1", 3, r"batch_size '0' must be in \[1, 65536\]"),
        ("2.0,1,0.1", 3, "batch_size '2.0' is not an integer"),
        ("1,1,0.1", 3, "batch size 1 at width 1 is in line 2 already"),
        ("1,2,0.1\n2,2,0.1", 4, r"batch size 2 lacks num_draft_tokens 1 \(plain decoding\)"),
        ("2,3,.1\n2,1,.1", 2, r"batch size 1 lacks num_draft_tokens 3 \(other batch sizes have it"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(write, rows, line, message):
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_step_costs(write(HEADER + "1,1,0.1\n" + rows + "\n"))
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (HEADER, "no row below the header"),
        ("1,1,0.1\n", "costs.csv:1: column batch_size is missing"),
        ("batch_size,gamma,step_seconds\n1,1,1\n", "column num_draft_tokens is missing"),
        (HEADER.strip() + ",drafter\n1,1,1,mtp\n", "the header names 'drafter' beside"),
        (HEADER + "4,2,0.1\n", r"costs.csv:2: batch size 4 lacks num_draft_tokens 1"),
    ],
)
def test_what_is_no_table_of_step_costs_is_refused(write, text, message):
    with pytest.raises(InvalidInputError, match=message):
        read_step_costs(write(text))


def test_a_drafter_that_was_not_measured_is_refused():
    with pytest.raises(InvalidInputError, match=r"p.json: drafter 'x' was not measured, \['mtp'\]"):
        profile_table(profile_of({(1, 0): 0.1}), "x", "p.json")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({(1, 0): 0.1, (2, 3): 0.1}, "batch size 1 lacks num_draft_tokens 4"),
        ({(1, 3): 0.1}, "lacks num_draft_tokens 1"),
        ({(1, 0): 0.1, (1, 65): 0.1}, "gamma goes up to 64"),
        ({(65_537, 0): 0.1}, "the batch size to 65536"),
        ({(1, 0): 4000.0}, "a step to 3600 s"),
    ],
)
def test_a_profile_that_is_no_full_grid_is_refused(grid, message):
    with pytest.raises(InvalidInputError, match=message):
        profile_table(profile_of(grid), "mtp")


def test_only_the_cells_of_the_drafter_are_taken():
    one, other = profile_of({(1, 0): 0.1}), profile_of({(4, 0): 0.7}, "dflash")
    both = dataclasses.replace(
        one, drafters=one.drafters + other.drafters, cells=one.cells + other.cells
    )
    assert profile_table(both, "dflash").seconds.tolist() == [[0.7]]


def test_plain_decoding_that_was_measured_once_serves_every_drafter():
    one = profile_of({(1, 0): 0.1, (1, 2): 0.2, (4, 0): 0.3, (4, 2): 0.4})
    other = profile_of({(1, 3): 0.5, (4, 3): 0.6}, "dflash")
    both = dataclasses.replace(
        one, drafters=one.drafters + other.drafters, cells=one.cells + other.cells
    )
    table = profile_table(both, "dflash")
    assert (table.gammas, table.batch_sizes) == ((0, 3), (1, 4))
    assert table.seconds.tolist() == [[0.1, 0.3], [0.5, 0.6]]
    assert profile_table(both, "mtp").gammas == (0, 2)


def test_a_long_complaint_about_a_profile_is_cut(write):
    with pytest.raises(InvalidInputError, match="is not a profile") as caught:
        read_profile(write('{"format": "' + "x" * 100_000 + '"}'))
    assert len(str(caught.value)) < 600

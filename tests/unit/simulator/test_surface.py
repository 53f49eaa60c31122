import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Arm, Fingerprint
from controller.core.model_shapes import DrafterKind
from simulator.errors import InvalidInputError
from simulator.step_costs import CostTable
from simulator.surface import (
    csv_surface,
    profile_sizes,
    profile_surface,
    table_surface,
)

HEADER = "batch_size,num_draft_tokens,step_seconds\n"


def table(sizes, rows):
    """rows: gamma -> seconds."""
    return CostTable(tuple(sizes), tuple(rows), np.array(list(rows.values()), dtype=np.float64))


def test_costs_are_linear_between_sizes_constant_below_and_go_on_above():
    costs = table([2, 4, 8], {0: [1.0, 2.0, 3.0], 2: [2.0, 2.0, 1.0]})
    surface = table_surface("t", {"mtp": costs}, max_batch_size=10)
    assert surface.arms == (Arm("mtp", 0), Arm("mtp", 2))
    assert surface.seconds[0].tolist() == [1, 1, 1, 1.5, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5]
    # A last slope that falls is not gone on with.
    assert surface.seconds[1].tolist() == [2, 2, 2, 2, 2, 1.75, 1.5, 1.25, 1, 1, 1]


def test_by_default_nothing_is_extrapolated_upwards():
    tables = {
        "a": table([1, 8], {0: [1.0, 2.0]}),
        "b": table([1, 4, 16], {0: [1.0, 2.0, 3.0]}),
    }
    assert table_surface("t", tables).max_batch_size == 8
    assert table_surface("t", tables, max_batch_size=32).max_batch_size == 32


def test_a_single_size_is_a_constant():
    surface = table_surface("t", {"mtp": table([4], {0: [1.0], 1: [2.0]})}, max_batch_size=6)
    assert surface.seconds[1].tolist() == [2.0] * 7


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True).map(sorted), st.integers(0, 9)
)
def test_measured_cells_are_met_exactly(sizes, seed):
    rng = np.random.default_rng(seed)
    costs = table(sizes, {0: rng.uniform(1, 2, len(sizes)), 3: rng.uniform(1, 2, len(sizes))})
    surface = table_surface("t", {"mtp": costs}, max_batch_size=64)
    assert np.allclose(surface.seconds[:, sizes], costs.seconds)
    assert surface.seconds.min() > 0


def test_drafters_share_plain_decoding(tmp_path):
    (tmp_path / "mtp.csv").write_text(HEADER + "1,1,1.0\n4,1,2.0\n1,3,3.0\n4,3,4.0\n")
    (tmp_path / "dflash.csv").write_text(HEADER + "1,1,1.1\n8,1,9.0\n1,16,5.0\n8,16,6.0\n")
    surface = csv_surface(
        {"mtp": tmp_path / "mtp.csv", "dflash": tmp_path / "dflash.csv"},
        {"dflash": DrafterKind.DFLASH},
        kv_reference=100.0,
        seconds_per_kv_token=1e-6,
    )
    assert surface.name == "mtp+dflash"
    assert [(d.name, d.kind, d.gammas) for d in surface.drafters] == [
        ("mtp", DrafterKind.MTP, (0, 2)),
        ("dflash", DrafterKind.DFLASH, (0, 15)),
    ]
    assert surface.seconds[:, 4].tolist() == pytest.approx([2.0, 4.0, 2.0, 5 + 3 / 7])
    assert surface.kv_reference == 100.0
    assert surface.kv_seconds.tolist() == [1e-6] * 4


def test_a_profile_comes_out_of_the_surface_that_it_went_into():
    cells = tuple(
        ProfileCell(d, g, b, s, 0.0, 20)
        for d, g, seconds in (("mtp", 0, (1, 2)), ("mtp", 3, (2, 4)), ("x", 0, (1, 2)))
        for b, s in zip((1, 8), map(float, seconds), strict=True)
    )
    drafters = (DrafterIdentity("mtp", "m", "r"), DrafterIdentity("x"))
    profile = Profile(
        Fingerprint("model"), drafters, 300.0, 1e-7, cells, catch_up_seconds_per_token=1e-5
    )
    kinds = {"x": DrafterKind.NGRAM, "another": DrafterKind.DFLASH}
    surface = profile_surface("p.json", profile, kinds)
    assert surface.make_profile(profile.fingerprint, [1, 8]) == profile
    assert [d.kind for d in surface.drafters] == [DrafterKind.MTP, DrafterKind.NGRAM]
    assert surface.catch_up_seconds_per_token == 1e-5


def test_a_profile_with_holes_is_refused_by_name():
    cells = (ProfileCell("mtp", 0, 1, 1.0, 0.0, 1), ProfileCell("mtp", 2, 4, 1.0, 0.0, 1))
    profile = Profile(Fingerprint("m"), (DrafterIdentity("mtp"),), 0.0, 0.0, cells)
    with pytest.raises(InvalidInputError, match=r"p.json: batch size 1 lacks num_draft_tokens 3"):
        profile_surface("p.json", profile)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, r"max_batch_size 0 must be in \[1, 65536\]"),
        ({"max_batch_size": 65_537}, "max_batch_size 65537 must be in"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        table_surface("t", {"mtp": table([1], {0: [1.0]})}, **options)


def test_no_drafter_a_name_that_is_none_and_a_context_that_cannot_be_are_refused(tmp_path):
    for make in (lambda: table_surface("t", {}), lambda: csv_surface({})):
        with pytest.raises(InvalidInputError, match="is named"):
            make()
    with pytest.raises(InvalidInputError, match="drafter name ''"):
        table_surface("t", {"": table([1], {0: [1.0]})})
    with pytest.raises(InvalidInputError, match="context term: nan"):
        csv_surface({"mtp": tmp_path / "a.csv"}, kv_reference=float("nan"))


def test_what_a_table_does_not_state_is_derived(tmp_path):
    (tmp_path / "mtp.csv").write_text(HEADER + "1,1,1.0\n4,1,2.0\n1,3,1.5\n4,3,6.0\n")
    surface = csv_surface({"mtp": tmp_path / "mtp.csv"})
    token = (6.0 - 1.5) / (3 * 3)
    assert surface.prefill_seconds_per_token == pytest.approx(token)
    # Two passes of the drafter add half a second to the smallest batch.
    assert surface.catch_up_seconds(64) == pytest.approx(0.25 + 2 * token)


def test_a_table_of_one_size_has_prices_too(tmp_path):
    (tmp_path / "mtp.csv").write_text(HEADER + "4,1,2.0\n4,3,6.0\n")
    surface = csv_surface({"mtp": tmp_path / "mtp.csv"})
    assert surface.prefill_seconds_per_token == pytest.approx(4.0 / 12)
    assert surface.catch_up_pass_seconds == pytest.approx(2.0)
    (tmp_path / "off.csv").write_text(HEADER + "4,1,2.0\n")
    assert csv_surface({"mtp": tmp_path / "off.csv"}).catch_up_seconds(1) == 0


def test_the_seconds_of_a_step_follow_the_context_but_are_never_free(tmp_path):
    (tmp_path / "mtp.csv").write_text(HEADER + "1,1,1.0\n4,1,2.0\n1,3,3.0\n4,3,4.0\n")
    surface = csv_surface(
        {"mtp": tmp_path / "mtp.csv"}, kv_reference=100.0, seconds_per_kv_token=0.001
    )
    assert surface.step_seconds(4, 400).tolist() == pytest.approx([2.0, 4.0])
    assert surface.step_seconds(4, 1400).tolist() == pytest.approx([3.0, 5.0])
    # A batch beyond the table costs as the largest one, with its own context.
    assert surface.step_seconds(8, 900).tolist() == pytest.approx([2.1, 4.1])
    cheap = csv_surface({"mtp": tmp_path / "mtp.csv"}, kv_reference=1e6, seconds_per_kv_token=0.001)
    assert cheap.step_seconds(4, 400).tolist() == pytest.approx([0.2, 0.4])


def test_profiles_are_measured_at_powers_of_two_and_the_limit():
    assert profile_sizes(1) == [1]
    assert profile_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert profile_sizes(33) == [1, 2, 4, 8, 16, 32, 33]


def test_some_drafters_of_a_surface():
    tables = {name: table([1, 8], {0: [1.0, 2.0], 2: [2.0, 3.0]}) for name in ("a", "b", "c")}
    surface = table_surface("t", tables).with_drafters("c", "a")
    assert surface.arms == (Arm("a", 0), Arm("a", 2), Arm("c", 0), Arm("c", 2))
    assert surface.seconds.shape == (4, 9)
    assert surface.kv_seconds.shape == (4,)

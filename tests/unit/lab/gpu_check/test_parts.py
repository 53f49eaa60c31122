import pytest

from lab.gpu_check.parts import DEFAULT_PARTS, PARTS, UnknownPartError, parse_parts


@pytest.mark.parametrize(
    ("listing", "parts"),
    [
        ("costs, exact", ("costs", "exact")),
        ("costs,arms,costs", ("costs", "arms")),
        ("all", tuple(PARTS)),
        ("outage,all", ("outage", *(name for name in PARTS if name != "outage"))),
        (",".join(DEFAULT_PARTS), DEFAULT_PARTS),
    ],
)
def test_parts_run_in_the_order_in_which_they_are_named(listing: str, parts: tuple[str, ...]):
    assert parse_parts(listing) == parts


@pytest.mark.parametrize("listing", ["exact,graph", "all,x", "", ","])
def test_an_unknown_or_no_part_is_refused(listing: str):
    with pytest.raises(UnknownPartError, match="choose from exact"):
        parse_parts(listing)

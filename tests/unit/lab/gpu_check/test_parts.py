import pytest

from lab.gpu_check.parts import DEFAULT_PARTS, PARTS, UnknownPartError, parse_parts


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("costs, exact", ("exact", "costs")),
        ("profile,arms", ("costs", "arms")),
        ("all", PARTS),
        (",".join(DEFAULT_PARTS), DEFAULT_PARTS),
    ],
)
def test_parts_run_in_their_own_order(given: str, parts: tuple[str, ...]):
    assert parse_parts(given) == parts


@pytest.mark.parametrize("given", ["exact,graph", "all,x", "", ","])
def test_an_unknown_or_no_part_is_refused(given: str):
    with pytest.raises(UnknownPartError, match="choose from exact"):
        parse_parts(given)

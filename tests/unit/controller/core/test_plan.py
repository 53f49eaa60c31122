"""A plan serves every batch size by one of its rows."""

from hypothesis import given
from hypothesis import strategies as st

from controller.core.engine_spec import Arm
from controller.core.plan import Plan, PlanRow, Reason, Regime


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=12, unique=True),
    st.integers(1, 1000),
)
def test_a_batch_is_served_by_the_smallest_row_that_holds_it(sizes, batch):
    rows = tuple(PlanRow(b, Arm("mtp", 0), Reason.EXPLOIT) for b in sorted(sizes))
    row = Plan(1, rows, Regime(), 5.0, Reason.EXPLOIT, "").row_for(batch)
    fitting = [b for b in sizes if b >= batch]
    assert row.max_batch_size == (min(fitting) if fitting else max(sizes))

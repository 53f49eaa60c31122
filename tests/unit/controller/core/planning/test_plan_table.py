"""A probe runs wherever the batch goes while it is under way, within the same choice."""

import numpy as np

from controller.core.engine_spec import Arm
from controller.core.plan import Probe, Reason
from controller.core.planning.plan_table import make_rows, rows_for_probe
from tests.support.virtual_engine import engine_spec

UPPER = (1, 2, 4, 8, 16, 32)


def test_a_probe_reaches_batches_up_to_twice_and_half_as_large_with_the_same_choice():
    assert rows_for_probe(UPPER, [1] * 6, 3, None) == (2, 3, 4)
    assert rows_for_probe(UPPER, [1, 1, 0, 1, 1, 1], 3, None) == (3, 4)
    assert rows_for_probe(UPPER, [1] * 6, 0, None) == (0, 1)


def test_a_probe_stays_where_its_arm_may_run():
    feasible = np.array([True, True, False, True, True, False])
    assert rows_for_probe(UPPER, [1] * 6, 3, feasible) == (3, 4)


def test_its_rows_share_one_probe():
    spec, probe = engine_spec(max_batch_size=32), Probe(7, Arm("mtp", 0), 3)
    chosen, reasons = [Arm("mtp", 3)] * 6, [Reason.EXPLOIT] * 6
    rows = make_rows(spec, UPPER, chosen, reasons, ((2, 3, 4), probe), ())
    assert [row.probe for row in rows] == [None, None, probe, probe, probe, None]

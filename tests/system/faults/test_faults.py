"""The quick ones of `python -m tools.faults`."""

import pytest

from tools.faults.catalogue import linked_faults
from tools.faults.fault import Fault, run_fault

_KILLS = 6
_DAMAGES = 40
_FULL_DISKS = 4
QUICK = [fault for fault in linked_faults(_KILLS, _DAMAGES, _FULL_DISKS) if fault.quick]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_it_goes_as_expected(fault: Fault) -> None:
    outcome = run_fault(fault)
    print(outcome.figures)
    if outcome.holds is None:
        pytest.skip(outcome.observed)
    assert outcome.holds, outcome.observed

"""The quick ones of the faults beside the real SGLang, at one engine."""

from collections.abc import Iterator

import pytest

from tools.faults.engine_faults import QUICK, engine_faults, open_stage
from tools.faults.fault import Fault, run_fault

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def faults(
    plain: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Fault]]:
    with open_stage(tmp_path_factory.mktemp("faults"), plain["batch"]) as stage:
        yield {fault.name: fault for fault in engine_faults(lambda: stage)}


@pytest.mark.parametrize("name", QUICK)
def test_it_goes_as_expected(faults: dict[str, Fault], name: str) -> None:
    outcome = run_fault(faults[name])
    print(outcome.figures)
    assert outcome.holds, outcome.observed

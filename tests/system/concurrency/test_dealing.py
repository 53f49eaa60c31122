"""What is dealt depends on the machine's rules and the number of the run alone."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from simulator import gpu_allocation
from tests.system.concurrency.dealing import run


def test_no_constant_of_an_imported_module_is_dealt():
    constant = gpu_allocation._MAX_ALLOCATIONS
    dealt: list[int] = []

    class Numbers(RuleBasedStateMachine):
        @rule(number=st.integers(constant - 50_000, constant + 50_000))
        def draw(self, number: int) -> None:
            dealt.append(number)

    run(Numbers, 50, 1)
    assert len(set(dealt)) > 100
    assert constant not in dealt

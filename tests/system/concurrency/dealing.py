"""Deals courses of events to the machine, the same ones in every run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.dealing import without_constants_of_modules


def run(
    machine: type[RuleBasedStateMachine],
    examples: int,
    number: int,
    phases: Sequence[Phase] = tuple(Phase),
) -> None:
    """Runs `count` courses of events, the same ones for the same `number`."""
    with silence(), without_constants_of_modules():
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=phases,
                suppress_health_check=list(HealthCheck),
            ),
        )


@contextmanager
def silence() -> Iterator[None]:
    """Nothing is logged by the sidecar and the agents."""

    def drop(*_: object) -> dict[str, object]:
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[drop])
    try:
        yield
    finally:
        structlog.configure(**before)

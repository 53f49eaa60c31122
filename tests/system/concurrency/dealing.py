"""Deals courses of events to the machine, the same ones in every run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run(
    machine: type[RuleBasedStateMachine],
    examples: int,
    number: int,
    phases: Sequence[Phase] = tuple(Phase),
) -> None:
    """Runs so many courses of events, the same ones for the same `number`."""
    with silence(), _without_constants_of_modules():
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
def _without_constants_of_modules() -> Iterator[None]:
    """Hypothesis draws only numbers that the strategies name.

    It would also draw constants from the source of every module of this project that happens to be
    imported, so that courses would differ between a run of one file and a run of all tests.
    """
    with (
        patch.object(providers, "_get_local_constants", Constants),
        patch.object(providers, "CONSTANTS_CACHE", {}),
    ):
        yield


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

"""Runs the long-lived tasks of a store that no sidecar runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from controller.store.interface import Store
from controller.util.tasks import Supervisor


@asynccontextmanager
async def run_store_tasks(store: Store) -> AsyncIterator[Supervisor]:
    """The tasks of an open store, inside the block."""
    supervisor = Supervisor()
    supervisor.run_all(store.tasks)
    try:
        yield supervisor
        assert not any(state.failures for state in supervisor.states.values()), supervisor.states
    finally:
        await supervisor.stop()

"""All targets."""

from collections.abc import Mapping

from tests.system.fuzz.target import Target
from tests.system.fuzz.targets import engine, http, rpc, sidecar, simulation, specforge, store

TARGETS: Mapping[str, Target] = {
    target.name: target
    for module in (rpc, sidecar, store, simulation, engine, specforge, http)
    for target in module.TARGETS
}

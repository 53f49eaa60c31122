"""All targets."""

from collections.abc import Mapping

from tools.fuzz.target import Target
from tools.fuzz.targets import engine, http, rpc, sidecar, simulation, specforge, store

TARGETS: Mapping[str, Target] = {
    target.name: target
    for module in (rpc, sidecar, store, simulation, engine, specforge, http)
    for target in module.TARGETS
}

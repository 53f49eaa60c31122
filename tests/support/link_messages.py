"""An engine of one drafter, as it introduces itself, and plans for it."""

from speculation.v1.engine_pb2 import DRAFTER_KIND_MTP, Drafter, EngineSpec
from speculation.v1.plan_pb2 import REASON_EXPLOIT, Plan, PlanRow, Probe

GAMMAS = (0, 1, 2, 3, 5, 7)


def engine_spec(engine_id: str = "engine-1") -> EngineSpec:
    return EngineSpec(
        engine_id=engine_id,
        drafters=[Drafter(name="eagle3", kind=DRAFTER_KIND_MTP, gammas=GAMMAS)],
        max_batch_size=64,
    )


def plan(epoch: int, gamma: int, lease_ms: int = 60_000, probe: Probe | None = None) -> Plan:
    row = PlanRow(max_batch_size=64, drafter="eagle3", gamma=gamma, reason=REASON_EXPLOIT)
    if probe is not None:
        row.probe.CopyFrom(probe)
    return Plan(epoch=epoch, rows=[row], lease_ms=lease_ms, reason=REASON_EXPLOIT)

"""Checks the plans of one session against the contract and the engine that they are for."""

import math
from itertools import pairwise

from lab.conformance.finding import Findings
from speculation.v1.engine_pb2 import EngineSpec
from speculation.v1.plan_pb2 import Plan


def check_plan(found: Findings, engine: EngineSpec, plan: Plan, newest: int) -> None:
    """Notes the rules that a plan breaks.  newest: the largest epoch before it, 0 for none."""
    where = f"plan {plan.epoch}"
    arms = {(drafter.name, gamma) for drafter in engine.drafters for gamma in drafter.gammas}
    found.expect(plan.epoch >= newest, "epochs do not go back", f"{where} after {newest}")
    found.expect(plan.lease_ms > 0, "a plan has a lease", where)
    found.expect(bool(plan.rows), "a plan has rows", where)
    sizes = [row.max_batch_size for row in plan.rows]
    found.expect(all(a < b for a, b in pairwise([0, *sizes])), "rows ascend", f"{where}: {sizes}")
    for row in plan.rows:
        asked = [(row.drafter, row.gamma)]
        if row.HasField("probe"):
            asked.append((row.probe.drafter, row.probe.gamma))
            found.expect(
                row.probe.probe_id > 0 and row.probe.steps > 0, "a probe has an id and steps", where
            )
        found.expect(set(asked) <= arms, "a plan asks for what was introduced", f"{where}: {asked}")
        found.expect(
            not row.drafter_asleep or any(gamma == 0 for _, gamma in asked),
            "a drafter sleeps at gamma 0 only",
            where,
        )
    mixtures = {d.name for d in engine.drafters if d.HasField("mixture")}
    for rule in plan.rules:
        numbers = [rule.main_expected, rule.ratio_weight, *rule.free_expected]
        found.expect(
            rule.drafter in mixtures and (rule.drafter, rule.gamma) in arms,
            "a rule is of a mixture at one of its draft lengths",
            f"{where}: {rule.drafter} at {rule.gamma}",
        )
        found.expect(
            bool(rule.free_expected) and all(math.isfinite(n) and n >= 0 for n in numbers),
            "a rule's numbers are finite and not negative",
            where,
        )

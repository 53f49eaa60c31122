"""Defines the settings of the decision core.

Each is declared with its unit, its range, what it trades, and how its default was found;
docs/decision-settings.md shows them all.
"""

from dataclasses import dataclass

from controller.core.constants.acceptance import AcceptanceConstants, MemoryConstants
from controller.core.constants.costs import CostConstants
from controller.core.constants.exploration import ExplorationConstants
from controller.core.constants.losses import LossConstants
from controller.core.constants.pace import PaceConstants
from controller.core.constants.setting import require_ranges, setting

POLICIES = ("goodput", "tide", "sglang-ema")


@dataclass(frozen=True)
class PlannerSettings(
    AcceptanceConstants,
    MemoryConstants,
    CostConstants,
    ExplorationConstants,
    LossConstants,
    PaceConstants,
):
    """These set the rule, the pace of plans, the budget of probes, and the windows of estimates.

    The defaults need no tuning; read docs/decisions.md before changing one.  Raises ValueError for
    values out of range.
    """

    # Which rule decides: expected throughput ("goodput"), TIDE's threshold or SGLang's average.
    policy: str = "goodput"
    tide_gamma: int = setting(
        3,
        "tokens",
        1,
        64,
        "the draft length that TIDE's threshold switches",
        "no tuning on record: the first value",
    )
    lease_seconds: float = setting(
        5.0,
        "s",
        0.0,
        86_400.0,
        "larger: an engine steers by an old plan for longer without contact",
        "no tuning on record: the first value",
        is_open=True,
    )
    replan_seconds: float = setting(
        0.07,
        "s",
        0.0,
        3600.0,
        "larger: less work for each engine, and slower reactions",
        "raised from 0.02 by way of 0.05 to make plans cheaper; no figures on record",
        is_open=True,
    )
    replan_steps: float = setting(
        16.0,
        "steps",
        0.0,
        1e6,
        "the same on a fast engine, where it comes first",
        "no tuning on record: the first value",
        is_open=True,
    )
    switch_margin: float = setting(
        0.01,
        "relative gain",
        0.0,
        0.999,
        "larger: fewer changes of arm, and less gained by each",
        "halved from 0.02; an early standard suite lost 0.2 to 1 % with more or less",
    )
    payback_seconds: float = setting(
        2.0,
        "s",
        0.0,
        1e9,
        "larger: a change of arm may cost more",
        "the first value; an early standard suite lost 0.2 to 1 % with more or less",
        is_open=True,
    )
    tpot_ceiling_seconds: float = setting(
        0.0,
        "s",
        0.0,
        3600.0,
        "the longest mean time between a sequence's tokens; 0: no bound",
        "off: the bound is the operator's",
    )
    probe_share: float = setting(
        0.009,
        "share of step time",
        0.0,
        0.999,
        "larger: changes are found sooner, and calm traffic pays more",
        "varied between 0.008 and 0.01; no figures on record",
    )
    probe_credit_start_seconds: float = setting(
        0.05,
        "s",
        0.0,
        3600.0,
        "larger: more probes at the start",
        "lowered from 0.2 by way of 0.1; no figures on record",
    )
    probe_credit_max_seconds: float = setting(
        0.5,
        "s",
        0.0,
        3600.0,
        "larger: more probes after a calm time",
        "lowered from 1; no figures on record",
    )
    probe_exposures: int = setting(
        16,
        "exposures",
        1,
        100_000,
        "larger: a probe is longer and surer",
        "lowered from 24; no figures on record",
    )
    probe_steps_max: int = setting(
        8,
        "steps",
        1,
        10_000,
        "larger: a probe of a small batch is longer",
        "no tuning on record: the first value",
    )
    confidence_z: float = setting(
        1.28,
        "standard errors",
        0.0,
        100.0,
        "the width of the bounds that `explain` shows; no decision uses it",
        "argued: a tenth of a normal distribution lies beyond each bound",
        is_open=True,
    )
    prior_acceptance: float = setting(
        0.7,
        "probability",
        0.0,
        0.999,
        "larger: an unknown drafter is drafted for more",
        "no tuning on record: the first value",
        is_open=True,
    )
    prior_exposures: float = setting(
        4.0,
        "exposures",
        0.0,
        1e6,
        "larger: the first evidence counts less",
        "no tuning on record: the first value",
        is_open=True,
    )
    class_exposures: float = setting(
        24.0,
        "exposures",
        0.0,
        1e6,
        "larger: a request class is like all traffic for longer",
        "no tuning on record: the first value",
        is_open=True,
    )
    fast_exposures: float = setting(
        20.0,
        "exposures",
        0.0,
        1e6,
        "larger: shifts are found later, with fewer false alarms",
        "lowered from 96 to find shifts sooner; no figures on record",
        is_open=True,
    )
    fast_steps: float = setting(
        2.5,
        "steps",
        0.0,
        1e6,
        "the same for large batches, in steps",
        "no tuning on record: the first value",
        is_open=True,
    )
    slow_exposures: float = setting(
        1500.0,
        "exposures",
        0.0,
        1e9,
        "larger: surer estimates that follow gradual changes later",
        "no tuning on record: the first value",
        is_open=True,
    )
    slow_steps: float = setting(
        150.0,
        "steps",
        0.0,
        1e9,
        "the same for large batches, in steps",
        "no tuning on record: the first value",
        is_open=True,
    )
    idle_steps: float = setting(
        2000.0,
        "steps",
        0.0,
        1e12,
        "larger: what is not observed is believed for longer",
        "no tuning on record: the first value",
        is_open=True,
    )
    shift_z: float = setting(
        3.2,
        "standard errors",
        0.0,
        1e12,
        "larger: fewer false alarms of the windows, and later ones",
        "varied between 2.8 and 3.5; no figures on record",
        is_open=True,
    )
    shift_alarm: float = setting(
        6.0,
        "log-likelihood ratio",
        0.0,
        1e12,
        "larger: fewer false alarms over all positions, and later ones",
        "no tuning on record: the first value",
        is_open=True,
    )
    cost_drift_max_profiled: float = setting(
        2.0,
        "factor",
        1.0,
        1e6,
        "larger: a worse profile is corrected, and a worse measurement believed",
        "raised from 1.5; no figures on record",
    )
    cost_drift_max_prior: float = setting(
        10.0,
        "factor",
        1.0,
        1e6,
        "the same without a profile",
        "no tuning on record: the first value",
    )

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.fast_exposures > self.slow_exposures or self.fast_steps > self.slow_steps:
            raise ValueError("the fast window must not be longer than the slow one")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")

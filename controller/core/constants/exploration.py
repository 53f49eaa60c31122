"""Constants of `planning/exploration.py` and of `planning/observation_schedule.py`."""

from dataclasses import dataclass

from controller.core.constants.setting import setting


@dataclass(frozen=True)
class ExplorationConstants:
    """These set when an arm is probed, for how long, and what that may cost."""

    probe_patience_seconds: float = setting(
        2.0,
        "s",
        0.0,
        3600.0,
        "larger: a probe whose steps do not run keeps others waiting for longer",
        "no tuning on record: the first value",
    )
    probe_patience_steps: int = setting(
        48,
        "steps",
        1,
        10_000,
        "larger: a probe that other arms displace is given up later",
        "no tuning on record: the first value",
    )
    other_row_patience_steps: int = setting(
        3,
        "steps",
        1,
        1000,
        "larger: a probe survives a longer visit to another batch size",
        "no tuning on record: the first value",
    )
    review_every_reports: int = setting(
        12,
        "reports",
        1,
        10_000,
        "larger: doubts are weighed less often, at less work",
        "raised from 8 to make plans cheaper; no figures on record",
    )
    off_check_steps: int = setting(
        3,
        "steps",
        1,
        100,
        "larger: a check of gamma = 0 is surer and costs more",
        "argued: the first of three steps may include the cost of the switch",
    )
    remeasure_steps: int = setting(
        2,
        "steps",
        1,
        100,
        "larger: a stale cost is measured better at a higher price",
        "argued: the first of two steps may include the cost of the switch",
    )
    remeasure_every_reports: int = setting(
        50,
        "reports",
        1,
        1_000_000,
        "larger: stale costs are corrected later",
        "no tuning on record: the first value",
    )
    remeasure_drift: float = setting(
        2.0,
        "factor",
        1.0,
        1000.0,
        "smaller: arms that are really expensive are measured again, too",
        "raised from 1.25, with which random scenarios lost to plain decoding",
    )
    probe_step_share: float = setting(
        0.011,
        "share of steps",
        0.0,
        1.0,
        "larger: more probes for doubt, even if they lose nothing",
        "no tuning on record: the first value",
    )
    probe_step_credit_start: float = setting(
        24.0,
        "steps",
        0.0,
        1e6,
        "larger: more probes for doubt at the start",
        "no tuning on record: the first value",
    )
    probe_step_credit_max: float = setting(
        48.0,
        "steps",
        0.0,
        1e6,
        "larger: more probes for doubt after a calm time",
        "no tuning on record: the first value",
    )
    idle_drafter_fit_probability: float = setting(
        0.25,
        "probability",
        0.0,
        1.0,
        "larger: idle drafters are tried more often",
        "no tuning on record: the first value",
    )
    cold_credit_steps: float = setting(
        0.75,
        "steps",
        0.0,
        1e6,
        "larger: more may be lost to probes before costs are known",
        "no tuning on record: the first value",
    )
    probe_return_min: float = setting(
        2.0,
        "factor",
        0.0,
        1e6,
        "larger: only surer probes for doubt run",
        "no tuning on record: the first value",
    )
    optimistic_acceptance: float = setting(
        0.8,
        "probability",
        0.01,
        0.999,
        "larger: more is expected of better traffic, so it is looked for more often",
        "argued: the acceptance of a drafter that fits its traffic",
    )
    look_accepted_tokens: float = setting(
        4.0,
        "tokens",
        0.0,
        1000.0,
        "larger: a probe from gamma = 0 is longer and surer",
        "no tuning on record: the first value",
    )
    look_interval_min_steps: float = setting(
        4.0,
        "steps",
        1.0,
        1e6,
        "larger: probes from gamma = 0 are further apart at least",
        "lowered from 8; no figures on record",
    )
    look_found_factor_max: float = setting(
        6.0,
        "factor",
        1.0,
        1000.0,
        "larger: more looks where they have found better traffic again and again",
        "no tuning on record: the first value",
    )
    look_step_share: float = setting(
        0.015,
        "share of steps",
        1e-6,
        1.0,
        "larger: more looks in calm traffic, even if they cost nothing",
        "argued: on some cost tables looks came every 12 steps without it",
    )
    look_cost_min_steps: float = setting(
        0.01,
        "plain steps",
        1e-9,
        1000.0,
        "larger: looks that seem free are further apart",
        "no tuning on record: the first value",
    )
    busy_steps: float = setting(
        1000.0,
        "steps",
        1.0,
        1e9,
        "larger: traffic that shifts more rarely still has the whole budget",
        "no tuning on record: the first value",
    )
    calm_budget_share: float = setting(
        0.35,
        "share of `probe_share`",
        0.0,
        1.0,
        "larger: traffic without shifts is explored more",
        "no tuning on record: the first value",
    )

"""Constants of `planning/exploration.py` and of `planning/observation_schedule.py`."""

from dataclasses import dataclass

from controller.core.constants.setting import setting


@dataclass(frozen=True)
class ExplorationConstants:
    """When an arm is probed, for how long, and what that may cost."""

    probe_patience_seconds: float = setting(
        2.0,
        "s",
        0.0,
        3600.0,
        "larger: a probe whose steps do not run keeps others waiting for longer",
        "reasoned: longer than any pause of a loaded engine",
    )
    probe_patience_steps: int = setting(
        48,
        "steps",
        1,
        10_000,
        "larger: a probe that other arms displace is given up later",
        "reasoned",
    )
    other_row_patience_steps: int = setting(
        3,
        "steps",
        1,
        1000,
        "larger: a probe survives a longer visit to another batch size",
        "standard suite, load",
    )
    review_every_reports: int = setting(
        12,
        "reports",
        1,
        10_000,
        "larger: doubts are weighed less often, at less work",
        "standard suite",
    )
    off_check_steps: int = setting(
        3,
        "steps",
        1,
        100,
        "larger: a check of gamma = 0 is surer and costs more",
        "reasoned: the first step may include the cost of the switch",
    )
    remeasure_steps: int = setting(
        2,
        "steps",
        1,
        100,
        "larger: a stale cost is measured better at a higher price",
        "reasoned: the first step may include the cost of the switch",
    )
    remeasure_every_reports: int = setting(
        50,
        "reports",
        1,
        1_000_000,
        "larger: stale costs are corrected later",
        "standard suite, wrong profiles",
    )
    remeasure_drift: float = setting(
        2.0,
        "factor",
        1.0,
        1000.0,
        "smaller: arms that are really dear are measured again, too",
        "the most that a profiled cost may drift",
    )
    probe_step_share: float = setting(
        0.011,
        "share of steps",
        0.0,
        1.0,
        "larger: more probes for doubt, even if they lose nothing",
        "standard suite, stationary cells",
    )
    probe_step_credit_start: float = setting(
        24.0,
        "steps",
        0.0,
        1e6,
        "larger: more probes for doubt at the start",
        "standard suite",
    )
    probe_step_credit_max: float = setting(
        48.0,
        "steps",
        0.0,
        1e6,
        "larger: more probes for doubt after a calm time",
        "standard suite",
    )
    idle_drafter_fit_probability: float = setting(
        0.25,
        "probability",
        0.0,
        1.0,
        "larger: idle drafters are tried more often",
        "standard suite, recurring drafters",
    )
    cold_credit_steps: float = setting(
        0.75,
        "steps",
        0.0,
        1e6,
        "larger: more may be lost to probes before costs are known",
        "standard suite, no profile",
    )
    probe_return_min: float = setting(
        2.0,
        "factor",
        0.0,
        1e6,
        "larger: only surer probes for doubt run",
        "standard suite",
    )
    optimistic_acceptance: float = setting(
        0.8,
        "probability",
        0.0,
        0.999,
        "larger: more is expected of better traffic, so it is looked for more often",
        "acceptance of published drafters on traffic that suits them",
    )
    look_accepted_tokens: float = setting(
        4.0,
        "tokens",
        0.0,
        1000.0,
        "larger: a probe from gamma = 0 is longer and surer",
        "standard suite, collapse",
    )
    look_interval_min_steps: float = setting(
        4.0,
        "steps",
        1.0,
        1e6,
        "larger: probes from gamma = 0 are further apart at least",
        "reasoned",
    )
    look_found_factor_max: float = setting(
        6.0,
        "factor",
        1.0,
        1000.0,
        "larger: more looks where they have found better traffic again and again",
        "standard suite, recurring traffic",
    )
    look_step_share: float = setting(
        0.015,
        "share of steps",
        0.0,
        1.0,
        "larger: more looks in calm traffic, even if they cost nothing",
        "standard suite, stationary cells",
    )
    look_cost_min_steps: float = setting(
        0.01,
        "plain steps",
        1e-9,
        1000.0,
        "larger: looks that seem free are further apart",
        "reasoned: keeps the interval finite",
    )
    busy_steps: float = setting(
        1000.0,
        "steps",
        1.0,
        1e9,
        "larger: traffic that shifts more rarely still has the whole budget",
        "standard suite",
    )
    calm_budget_share: float = setting(
        0.35,
        "share of probe_share",
        0.0,
        1.0,
        "larger: traffic without shifts is explored more",
        "standard suite, stationary cells",
    )

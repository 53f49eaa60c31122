"""Constants of `acceptance/`: how evidence about drafts is kept, and when traffic has shifted."""

from dataclasses import dataclass

from controller.core.constants.setting import setting


@dataclass(frozen=True)
class AcceptanceConstants:
    """These set how much evidence counts, and when the traffic has shifted."""

    shift_exposures_min: float = setting(
        8.0,
        "exposures",
        0.0,
        1e6,
        "larger: small windows raise fewer false alarms",
        "lowered from 24 by way of 10 to find shifts sooner; no figures on record",
    )
    shift_kept_share: float = setting(
        0.1,
        "share",
        0.0,
        1.0,
        "larger: more evidence from before a shift is kept",
        "lowered from 0.25 to find shifts sooner; no figures on record",
    )
    shift_idle_exposures: float = setting(
        0.1,
        "exposures",
        0.0,
        1e6,
        "larger: an idle drafter is believed more after a shift",
        "lowered from 8 so that idle drafters are tried again; no figures on record",
    )
    walk_exposures: float = setting(
        20.0,
        "exposures",
        1e-3,
        1e9,
        "larger: neighbouring positions differ less",
        "argued: the standard deviation between two neighbours is then about 0.1",
    )
    resumed_exposures: float = setting(
        200.0,
        "exposures",
        0.0,
        1e9,
        "larger: traffic that returns is believed for longer",
        "no tuning on record: the first value",
    )
    shift_prior_exposures: float = setting(
        3.0,
        "exposures",
        1e-9,
        1e6,
        "larger: positions never reached are tested more strictly",
        "no tuning on record: the first value",
    )
    hazard_prior_steps: float = setting(
        2000.0,
        "steps",
        1.0,
        1e9,
        "larger: shifts are expected more rarely at the start",
        "no tuning on record: the first value",
    )
    hazard_memory_steps: float = setting(
        20_000.0,
        "steps",
        1.0,
        1e12,
        "larger: the rate of shifts follows later",
        "no tuning on record: the first value",
    )
    gradual_shift_steps: int = setting(
        100,
        "steps",
        -1,
        1_000_000,
        "larger: more shifts in one direction count as one change",
        "argued: a batch that drained was noticed as 15 shifts in 45 steps",
    )
    move_window_steps: int = setting(
        12,
        "steps",
        0,
        10_000,
        "larger: more shifts are attributed to a change of batch size",
        "no tuning on record: the first value",
    )
    move_memory: float = setting(
        100.0,
        "moves of the batch size",
        1.0,
        1e6,
        "larger: the share of moves follows later",
        "no tuning on record: the first value",
    )
    move_prior: float = setting(
        0.02,
        "probability",
        0.0,
        1.0,
        "larger: moves of the batch size bring other traffic",
        "no tuning on record: the first value",
    )
    unobserved_detection_steps: int = setting(
        16,
        "steps",
        -1,
        10_000,
        "larger: more shifts count as having come at gamma = 0",
        "no tuning on record: the first value",
    )
    class_unused_steps: int = setting(
        1000,
        "steps",
        0,
        1_000_000,
        "larger: an unused request class keeps its place longer",
        "argued: 20 s at 20 ms a step",
    )
    rule_tolerance: float = setting(
        0.04,
        "relative change",
        0.0,
        1.0,
        "larger: fewer plans because of mixtures' rules",
        "no tuning on record: the first value",
    )
    rule_ratio_weight: float = setting(
        0.1,
        "share a step",
        0.0,
        1.0,
        "larger: a request's own ratios follow faster",
        "no tuning on record: the first value",
    )
    usage_weight: float = setting(
        0.02,
        "share a step",
        0.0,
        1.0,
        "the memory of the figures that explain a mixture; no decision uses it",
        "no tuning on record: the first value",
    )


@dataclass(frozen=True)
class MemoryConstants:
    """These set when traffic counts as traffic that was seen before."""

    remembered_states_max: int = setting(
        5,
        "states",
        1,
        64,
        "larger: more kinds of traffic are recognised, at more work",
        "no tuning on record: the first value",
    )
    forget_state_steps: int = setting(
        20_000,
        "steps",
        1,
        1_000_000_000,
        "larger: traffic is recognised after a longer time",
        "no tuning on record: the first value",
    )
    state_half_trust_exposures: float = setting(
        8.0,
        "exposures",
        1e-6,
        1e6,
        "larger: states with little evidence are recognised later",
        "no tuning on record: the first value",
    )
    state_acceptance_min: float = setting(
        0.03,
        "probability",
        1e-6,
        0.5,
        "larger: single tokens distinguish states less",
        "no tuning on record: the first value",
    )
    octave_prior_visits: float = setting(
        1.0,
        "visits",
        1e-9,
        1e6,
        "larger: states depend less on the batch size",
        "no tuning on record: the first value",
    )
    alike_divergence: float = setting(
        0.03,
        "nats a sequence",
        0.0,
        100.0,
        "larger: more states are merged",
        "no tuning on record: the first value",
    )
    alike_total_divergence: float = setting(
        3.0,
        "nats",
        0.0,
        1e6,
        "larger: states with little evidence are merged",
        "no tuning on record: the first value",
    )
    alike_exposures_min: float = setting(
        16.0,
        "exposures",
        0.0,
        1e6,
        "larger: fewer drafters are compared before a merge",
        "no tuning on record: the first value",
    )
    state_sequences_max: float = setting(
        16.0,
        "sequences",
        1.0,
        1e6,
        "larger: a large batch recognises a state faster",
        "no tuning on record: the first value",
    )
    state_log_odds_max: float = setting(
        12.0,
        "nats a report",
        0.0,
        1e3,
        "larger: one report may decide more surely",
        "no tuning on record: the first value",
    )
    young_state_steps: int = setting(
        15,
        "steps",
        0,
        1_000_000,
        "larger: short visits to new traffic are not remembered",
        "no tuning on record: the first value",
    )
    state_explains_probability: float = setting(
        0.3,
        "probability",
        0.0,
        1.0,
        "larger: a shift more often begins a new state",
        "no tuning on record: the first value",
    )
    new_state_probability: float = setting(
        0.8,
        "probability",
        1e-6,
        1.0,
        "larger: a new state is left later",
        "no tuning on record: the first value",
    )
    mistaken_reports: int = setting(
        8,
        "reports",
        0,
        10_000,
        "larger: more returns to a state count as mistakes",
        "no tuning on record: the first value",
    )
    mistakes_max: int = setting(
        2,
        "mistakes",
        1,
        1_000_000_000,
        "larger: mistaken states begin a new one later",
        "no tuning on record: the first value",
    )
    octave_visit_reports: int = setting(
        12,
        "reports",
        1,
        10_000,
        "larger: only longer visits link a state to a batch size",
        "no tuning on record: the first value",
    )
    negligible_probability: float = setting(
        0.01,
        "probability",
        0.0,
        1.0,
        "larger: unlikely states are left out of values sooner",
        "no tuning on record: the first value",
    )

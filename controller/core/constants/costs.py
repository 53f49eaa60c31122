"""Constants of `cost/`: how live steps correct the costs of the table."""

from dataclasses import dataclass

from controller.core.constants.setting import setting


@dataclass(frozen=True)
class CostConstants:
    """These set how live steps correct costs, and what they leave out."""

    pace_rate: float = setting(
        0.1,
        "share an update",
        0.0,
        1.0,
        "larger: the variation of the machine's pace is learnt faster",
        "no tuning on record: the first value",
    )
    pace_variation_max: float = setting(
        0.3,
        "log seconds",
        0.0,
        10.0,
        "larger: a slow minute is more easily taken for the machine's pace",
        "no tuning on record: the first value",
    )
    kv_rate: float = setting(
        0.05,
        "share a step",
        0.0,
        1.0,
        "larger: learnt costs are ordered at a more recent context",
        "no tuning on record: the first value",
    )
    neighbour_share: float = setting(
        0.5,
        "share of the error",
        0.0,
        1.0,
        "larger: a cell's error moves the batch sizes beside it further",
        "no tuning on record: the first value",
    )
    extrapolated_deviation: float = setting(
        0.3,
        "log seconds",
        0.0,
        10.0,
        "larger: steps outside of the profile correct their cells faster",
        "no tuning on record: the first value",
    )
    change_deviations: float = setting(
        3.0,
        "standard deviations",
        0.0,
        100.0,
        "larger: an error counts as noise, not as a change, for longer",
        "no tuning on record: the first value",
    )
    change_min: float = setting(
        0.1,
        "log seconds",
        0.0,
        10.0,
        "larger: the same, as the least error of a change",
        "no tuning on record: the first value",
    )
    leap_min: float = setting(
        0.3,
        "log seconds",
        0.0,
        1e9,
        "larger: after a change of cell only larger errors are taken for pace",
        "no tuning on record: the first value",
    )
    leap_share: float = setting(
        0.2,
        "share of the error",
        0.0,
        1.0,
        "larger: a leap moves the cell itself further",
        "no tuning on record: the first value",
    )
    trusted_cell_steps: int = setting(
        4,
        "steps",
        1,
        10_000,
        "larger: a cell needs more steps until single outliers are left out",
        "no tuning on record: the first value",
    )
    new_bucket_steps: int = setting(
        2,
        "steps",
        0,
        10_000,
        "larger: more steps at a new batch size make a plan at once",
        "no tuning on record: the first value",
    )
    steps_per_update: int = setting(
        8,
        "steps",
        1,
        10_000,
        "larger: less work for a cell that keeps running, and later corrections",
        "no tuning on record: the first value",
    )
    known_cell_steps: int = setting(
        32,
        "steps",
        1,
        10_000,
        "larger: a cell is updated at every decision for longer",
        "no tuning on record: the first value",
    )
    cell_rate_min: float = setting(
        0.01,
        "share a step",
        0.0,
        1.0,
        "larger: a well-known cell follows its newest steps faster",
        "no tuning on record: the first value",
    )
    scatter_start: float = setting(
        0.05,
        "log seconds",
        1e-6,
        10.0,
        "the scatter of steps before any is known",
        "no tuning on record: the first value",
    )
    scatter_min: float = setting(
        0.01,
        "log seconds",
        1e-6,
        10.0,
        "larger: quiet machines are learnt more slowly",
        "no tuning on record: the first value",
    )
    scatter_rate: float = setting(
        0.02,
        "share a step",
        0.0,
        1.0,
        "larger: the scatter follows newer steps",
        "no tuning on record: the first value",
    )
    outlier_deviations: float = setting(
        6.0,
        "scatters",
        0.0,
        1e6,
        "larger: fewer steps are outliers",
        "no tuning on record: the first value",
    )
    outlier_min: float = setting(
        0.4,
        "log seconds",
        0.0,
        100.0,
        "larger: a slower step is believed at once (0.4: 1.5 times the estimate)",
        "no tuning on record: the first value",
    )
    outliers_accepted: int = setting(
        6,
        "steps",
        1,
        10_000,
        "larger: a real change is believed later",
        "no tuning on record: the first value",
    )
    speedup_max: float = setting(
        1.8,
        "log seconds",
        0.0,
        100.0,
        "larger: a faster step is believed at once (1.8: a sixth of the estimate)",
        "lowered from 3: one step in a sixteenth of its time kept drafting off for 800 steps",
    )
    surprise_rate: float = setting(
        0.2,
        "share a first visit",
        0.0,
        1.0,
        "larger: cells that have not run become uncertain sooner after errors elsewhere",
        "no tuning on record: the first value",
    )
    surprise_max: float = setting(
        100.0,
        "variances",
        1.0,
        1e9,
        "larger: one error makes more cells uncertain",
        "no tuning on record: the first value",
    )
    surprise_usual: float = setting(
        4.0,
        "variances",
        0.0,
        1e9,
        "larger: only larger errors raise the doubt",
        "no tuning on record: the first value",
    )
    doubt_growth_max: float = setting(
        9.0,
        "factor",
        1.0,
        1e9,
        "larger: the table is doubted more after surprises",
        "no tuning on record: the first value",
    )
    steps_before_longer: int = setting(
        8,
        "steps",
        0,
        10_000,
        "larger: without a profile drafts get longer more slowly",
        "no tuning on record: the first value",
    )
    cell_idle_steps: float = setting(
        2000.0,
        "steps",
        1.0,
        1e12,
        "larger: an old cost is believed for longer",
        "no tuning on record: the first value",
    )
    settled_steps: int = setting(
        48,
        "steps",
        0,
        1_000_000,
        "larger: gamma = 0 is checked later at each batch size",
        "no tuning on record: the first value",
    )
    clear_gain: float = setting(
        1.5,
        "ratio",
        1.0,
        1000.0,
        "larger: gamma = 0 is checked even where drafting clearly gains",
        "no tuning on record: the first value",
    )
    stale_steps: int = setting(
        900,
        "steps",
        1,
        1_000_000,
        "larger: a stale cost is measured again later",
        "no tuning on record: the first value",
    )
    disagreement_max: float = setting(
        0.05,
        "log seconds",
        0.0,
        10.0,
        "larger: gamma = 0 is checked after larger errors only",
        "no tuning on record: the first value",
    )
    near_batch_octaves: float = setting(
        1.0,
        "octaves",
        0.0,
        16.0,
        "larger: a step at gamma = 0 counts as a check for more batch sizes",
        "no tuning on record: the first value",
    )
    context_steps: float = setting(
        20.0,
        "steps",
        1.0,
        1e6,
        "larger: contexts by batch size follow later",
        "no tuning on record: the first value",
    )
    context_adapt_steps: float = setting(
        100.0,
        "steps",
        1.0,
        1e6,
        "larger: a batch size that returns keeps its old context for longer",
        "no tuning on record: the first value",
    )
    context_fade_steps: float = setting(
        2000.0,
        "steps",
        1.0,
        1e9,
        "larger: an unused context is believed for longer",
        "no tuning on record: the first value",
    )
    context_near_octaves: float = setting(
        0.5,
        "octaves",
        1e-3,
        16.0,
        "larger: contexts of more distant batch sizes count",
        "no tuning on record: the first value",
    )
    context_neighbour_weight: float = setting(
        0.02,
        "steps",
        1e-9,
        1e6,
        "larger: few steps are corrected by the neighbours more",
        "no tuning on record: the first value",
    )
    context_overall_weight: float = setting(
        1e-3,
        "steps",
        1e-9,
        1e6,
        "larger: the mean of all batch sizes counts more",
        "no tuning on record: the first value",
    )
    prefill_memory_steps: float = setting(
        64.0,
        "steps with prompts",
        1.0,
        1e6,
        "larger: the price of prompts follows later",
        "no tuning on record: the first value",
    )
    prompt_memory_steps: float = setting(
        256.0,
        "steps",
        1.0,
        1e6,
        "larger: the number of prompt tokens follows later",
        "no tuning on record: the first value",
    )
    switch_memory: float = setting(
        50.0,
        "switches",
        1.0,
        1e6,
        "larger: the price of a switch follows later",
        "no tuning on record: the first value",
    )
    switch_prior: float = setting(
        4.0,
        "switches",
        0.0,
        1e6,
        "larger: the first switches count less",
        "no tuning on record: the first value",
    )
    switch_excess_max: float = setting(
        2.0,
        "plain steps",
        0.0,
        1000.0,
        "larger: an outlier makes switches dear",
        "argued: one outlier must not make the next 50 switches expensive",
    )
    switch_known: float = setting(
        8.0,
        "switches",
        1.0,
        1e6,
        "larger: switched steps are no evidence about costs for longer",
        "no tuning on record: the first value",
    )
    switch_skipped_max: int = setting(
        4,
        "steps",
        0,
        10_000,
        "larger: an arm that only ever runs after switches is learnt later",
        "no tuning on record: the first value",
    )
    wake_up_memory: float = setting(
        50.0,
        "wake-ups",
        1.0,
        1e6,
        "larger: the price of waking a drafter follows later",
        "no tuning on record: the first value",
    )
    wake_up_prior_tokens: float = setting(
        1000.0,
        "missed tokens",
        1.0,
        1e9,
        "larger: the profile's price counts for longer",
        "no tuning on record: the first value",
    )
    wake_up_prior: float = setting(
        4.0,
        "wake-ups",
        0.0,
        1e6,
        "larger: less of the price is a fixed part",
        "no tuning on record: the first value",
    )

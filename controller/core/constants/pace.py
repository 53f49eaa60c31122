"""Constants of `engine/engine_controller.py` and `planning/value_uncertainty.py`."""

from dataclasses import dataclass

from controller.core.constants.setting import setting


@dataclass(frozen=True)
class PaceConstants:
    """These set how often plans are made, and how cautious they are without a profile."""

    wild_step_factor: float = setting(
        3.0,
        "factor",
        1.0,
        1000.0,
        "larger: a slow step is charged to its arm in full for longer",
        "no tuning on record: the first value",
    )
    unsettled_reports: int = setting(
        30,
        "reports",
        0,
        1_000_000,
        "larger: plans follow each other quickly for longer after a shift",
        "no tuning on record: the first value",
    )
    unsettled_reports_cold: int = setting(
        500,
        "reports",
        0,
        1_000_000,
        "the same at the start without a profile",
        "argued: the 500 steps that `simulate --suite cold-start` shows",
    )
    unsettled_pause: float = setting(
        0.2,
        "share of the pause",
        0.0,
        1.0,
        "smaller: plans follow each other more quickly while estimates change",
        "no tuning on record: the first value",
    )
    start_deviations: float = setting(
        2.5,
        "standard deviations",
        0.0,
        100.0,
        "larger: without a profile speculation starts later and more safely",
        "no tuning on record: the first value",
    )
    extend_deviations: float = setting(
        1.0,
        "standard deviations",
        0.0,
        100.0,
        "larger: without a profile drafts get longer more slowly",
        "no tuning on record: the first value",
    )

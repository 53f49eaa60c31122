"""Constants of `planning/loss_account.py`, which limits the loss against plain decoding."""

from dataclasses import dataclass

from controller.core.constants.setting import setting


@dataclass(frozen=True)
class LossConstants:
    """These bound what may be lost against plain decoding, in plain steps."""

    debt_max_steps: float = setting(
        4.0,
        "plain steps",
        0.0,
        1000.0,
        "larger: probes and wake-ups start sooner; the worst stretch loses more",
        "argued: with the allowance 7.5 in 500 steps, 0.985 of plain decoding (bar: 0.98)",
    )
    debt_allowance_per_step: float = setting(
        0.007,
        "plain steps a step",
        0.0,
        1.0,
        "larger: more may be lost over many steps",
        "argued, together with `debt_max_steps`",
    )
    wake_up_share: float = setting(
        0.002,
        "share of steps",
        0.0,
        1.0,
        "larger: wake-ups that cost more than `debt_max_steps` come more often",
        "no tuning on record: the first value",
    )
    wake_up_payback_steps: float = setting(
        50.0,
        "steps",
        0.0,
        1e6,
        "larger: an expensive wake-up happens at once for a smaller gain",
        "no tuning on record: the first value",
    )
    exchange_gain_share: float = setting(
        0.5,
        "share of the gain",
        0.0,
        1.0,
        "larger: drafters are exchanged more freely while drafting gains",
        "no tuning on record: the first value",
    )
    gain_memory_steps: float = setting(
        250.0,
        "steps",
        1.0,
        1e6,
        "larger: an older gain still pays for an exchange of drafters",
        "no tuning on record: the first value",
    )
    return_gain_share: float = setting(
        0.1,
        "share of the gain",
        0.0,
        1.0,
        "larger: probes from gamma = 0 may cost more where better traffic returns often",
        "no tuning on record: the first value",
    )
    trusted_exposures: float = setting(
        200.0,
        "exposures",
        0.0,
        1e6,
        "larger: the account is cautious about a drafter for longer",
        "no tuning on record: the first value",
    )

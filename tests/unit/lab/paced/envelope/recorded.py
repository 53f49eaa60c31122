"""Made-up steps and points, for tests of what is computed from them."""

from collections.abc import Sequence

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_log import LoggedStep
from lab.paced.envelope.outcome import DFLASH, MTP, OFF, STEERED, Point, Run

PLAIN, MTP_1, DFLASH_3 = Arm("eagle3", 0), Arm("eagle3", 1), Arm("dflash", 3)
PACE = 0.002
DILATION = 10.0


def steps_of(
    arm: Arm, count: int, *, batch_size: int = 2, tokens: int = 3, late: int = 0, used: float = 0.01
) -> list[LoggedStep]:
    """Steps of one length in a row; the last `late` of them end a whole pace too late."""
    steps = []
    for number in range(count):
        missed = number >= count - late
        began = 100.0 + number * PACE * DILATION
        due = began + PACE * DILATION
        steps.append(
            LoggedStep(
                began=began,
                launched=began,
                ended=due + (PACE * DILATION if missed else 0.0),
                due=due,
                seconds=PACE,
                batch_size=batch_size,
                kv_tokens=100,
                kinds={"published": batch_size},
                drafter=arm.drafter,
                gamma=arm.gamma,
                asleep=arm.gamma == 0,
                tokens=tokens,
                late=missed,
                used_seconds=used,
            )
        )
    return steps


def run_of(policy: str, arm: Arm | None, rate: float, shares: dict[Arm, float]) -> Run:
    """A run without late steps."""
    return Run(policy, arm, rate, 200, 0, 20.0, 1.5, shares, 0.0)


def point(concurrency: int = 1, rates: Sequence[float] = (1400, 1600, 1650, 1633.5)) -> Point:
    """One concurrency.  rates: of off, MTP, DFlash and steered, in tokens/s."""
    off, mtp, dflash, steered = rates
    return Point(
        concurrency,
        26.0,
        {PLAIN: 1390.0, MTP_1: 1610.0, Arm("eagle3", 2): 1500.0, DFLASH_3: 1660.0},
        {
            OFF: run_of(OFF, PLAIN, off, {PLAIN: 1.0}),
            MTP: run_of(MTP, MTP_1, mtp, {MTP_1: 1.0}),
            DFLASH: run_of(DFLASH, DFLASH_3, dflash, {DFLASH_3: 1.0}),
            STEERED: run_of(STEERED, None, steered, {DFLASH_3: 0.7, MTP_1: 0.25, PLAIN: 0.05}),
        },
        0.1,
    )

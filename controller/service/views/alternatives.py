"""Compares the last minutes' plan with what each arm would have given.

The batch sizes of those minutes are valued by the estimates of now, for each arm as if it had run
all along.  It is for people; no decision reads it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from controller.core.engine.explanation import ValueTable
from controller.core.engine_spec import Arm

# Seconds of history that are compared.
SECONDS: Final = 300.0

Point = Sequence[float | None]


def alternatives(
    table: ValueTable, arms: Sequence[Arm], drafters: Sequence[str], points: Iterable[Point]
) -> dict[str, Any] | None:
    """Compares the plan with every arm held fixed, ready for JSON; None if nothing was reported.

    arms: of the table.  drafters: names, in the order of the points' indices.  points: of the
    history (`FIELDS`), each with the same weight; those without a report are left out.  measured
    and planned: tokens per second of step time under the plan, as measured and by the same
    estimates as the arms'.  For an arm, share is the part of the seconds in which the plan named
    it, and allowed the part in which overrides and the engine let it run.
    """
    seconds: Counter[tuple[int, int]] = Counter()
    measured: list[float] = []
    for _, batch_size, gamma, drafter, _, tokens_per_second, _ in points:
        if batch_size is None or tokens_per_second is None or gamma is None or drafter is None:
            continue
        arm = Arm(drafters[int(drafter)], int(gamma))
        # A mixture that has been dropped is in the history and no longer in the table.
        if arm in arms:
            seconds[arms.index(arm), _row(table.batch_sizes, batch_size)] += 1
            measured.append(tokens_per_second)
    count = len(measured)
    if not count:
        return None
    rows = Counter[int]()
    for (_, row), times in seconds.items():
        rows[row] += times
    planned = sum(table.tokens_per_second[arm][row] * n for (arm, row), n in seconds.items())
    return {
        "seconds": count,
        "measured": sum(measured) / count,
        "planned": planned / count,
        "arms": [
            {
                "drafter": arm.drafter,
                "gamma": arm.gamma,
                "tokens_per_second": sum(
                    table.tokens_per_second[i][row] * n for row, n in rows.items()
                )
                / count,
                "share": sum(n for (named, _), n in seconds.items() if named == i) / count,
                "allowed": sum(n for row, n in rows.items() if table.feasible[i][row]) / count,
            }
            for i, arm in enumerate(arms)
        ],
    }


def _row(batch_sizes: Sequence[int], batch_size: float) -> int:
    fitting = (row for row, size in enumerate(batch_sizes) if batch_size <= size)
    return next(fitting, len(batch_sizes) - 1)

"""Divides batch sizes into the buckets of a plan, and makes its rows from the choices."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm, EngineSpec
from controller.core.plan import PlanRow, Probe, Reason

# Every batch size up to this one has its own row; above it, rows are about 19 % apart.
_EXACT_BUCKETS = 8
# Memory and time per engine grow with arms times buckets.
_BUCKETS_MAX = 128
_CELLS_MAX = 4096


def row_of(spec: EngineSpec, size: int, arm: Arm, reason: Reason, probe: Probe | None) -> PlanRow:
    """Makes one row; its drafter sleeps if the arm or the probe's arm allows it."""
    asleep = _sleeps(spec, arm) or (probe is not None and _sleeps(spec, probe.arm))
    return PlanRow(size, arm, reason, probe, asleep)


def rows_of(
    spec: EngineSpec,
    upper: Sequence[int],
    chosen: Sequence[Arm],
    reasons: Sequence[Reason],
    probing: tuple[tuple[int, ...], Probe] | None,
    kept: Sequence[PlanRow],
) -> tuple[PlanRow, ...]:
    """Makes all rows, and reuses those of `kept` (the previous plan) that have not changed.

    upper: largest batch of each row.  probing: (rows, probe), a probe and the rows that share it.
    """
    rows = []
    for j, (size, arm, reason) in enumerate(zip(upper, chosen, reasons, strict=True)):
        probe = probing[1] if probing and j in probing[0] else None
        row = kept[j] if j < len(kept) else None
        if row is None or (
            row.arm is not arm
            or row.reason is not reason
            or row.probe is not probe
            or row.max_batch_size != size
        ):
            row = row_of(spec, size, arm, reason, probe)
        rows.append(row)
    return tuple(rows)


def reach(
    upper: Sequence[int], choice: Sequence[int], bucket: int, feasible: NDArray[np.bool_] | None
) -> tuple[int, ...]:
    """Returns the rows in which a probe for one of them may run.

    The probe must continue if the batch size changes a little, so these are the rows up to twice or
    half as large that have the same choice.  feasible: [rows], where the probe's arm may run; None:
    everywhere.
    """
    size, chosen = upper[bucket], choice[bucket]
    return tuple(
        j
        for j, end in enumerate(upper)
        if size <= 2 * end
        and end <= 2 * size
        and choice[j] == chosen
        and (feasible is None or feasible[j])
    )


def forced_rows(
    spec: EngineSpec, upper: Iterable[int], arms: Sequence[Arm], forced: Arm
) -> tuple[PlanRow, ...]:
    """Makes rows with the forced arm, or the shortest draft where it cannot run."""
    rows = []
    for size in upper:
        able = [arm for arm in arms if spec.can_run(arm, size)] or arms
        arm = forced if forced in able else min(able, key=attrgetter("gamma"))
        rows.append(row_of(spec, size, arm, Reason.PROFILING, None))
    return tuple(rows)


def without_probes(spec: EngineSpec, rows: Iterable[PlanRow]) -> tuple[PlanRow, ...]:
    """Returns the same rows without probes."""
    return tuple(
        row if row.probe is None else row_of(spec, row.max_batch_size, row.arm, row.reason, None)
        for row in rows
    )


def _sleeps(spec: EngineSpec, arm: Arm) -> bool:
    return arm.gamma == 0 and spec.able.can_sleep


def batch_buckets(
    max_batch_size: int, graph_batch_sizes: Sequence[int] = (), arms: int = 1
) -> tuple[int, ...]:
    """Returns the ascending upper ends of the plan's batch buckets, up to `max_batch_size`.

    An engine with captured graphs pads a batch to the next captured size: then these sizes are the
    buckets.  There are at most 128 buckets, and at most 4096 cells (buckets times arms).  If an
    engine has captured more sizes, neighbouring sizes share a bucket, large ones first.
    """
    if graph_batch_sizes:
        sizes = {b for b in graph_batch_sizes if b < max_batch_size}
    else:
        sizes = set(range(1, min(_EXACT_BUCKETS, max_batch_size) + 1))
        size = float(_EXACT_BUCKETS)
        while size < max_batch_size:
            size *= 1.19
            sizes.add(min(round(size), max_batch_size))
    most = max(1, min(_BUCKETS_MAX, _CELLS_MAX // arms))
    return _coarse([*sorted(sizes - {max_batch_size}), max_batch_size], most)


def _coarse(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Keeps at most `most` of the ascending sizes, evenly spaced in log B, including the last."""
    if len(sizes) <= most:
        return tuple(sizes)
    *captured, last = sizes
    kept: list[int] = []
    at, left = 0, most - 1
    while left > 0 and at < len(captured):
        kept.append(captured[at])
        left -= 1
        # The remaining range is divided into equal ratios, one for each remaining bucket.
        ratio = (captured[-1] / captured[at]) ** (1 / left) if left else 1.0
        at = max(at + 1, bisect_left(captured, captured[at] * ratio * (1 - 1e-9)))
    return (*kept, last)

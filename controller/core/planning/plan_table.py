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


def make_row(spec: EngineSpec, size: int, arm: Arm, reason: Reason, probe: Probe | None) -> PlanRow:
    """Makes one row; its drafter sleeps if the arm or the probe's arm allows it."""
    asleep = _lets_drafter_sleep(spec, arm) or (
        probe is not None and _lets_drafter_sleep(spec, probe.arm)
    )
    return PlanRow(size, arm, reason, probe, asleep)


def make_rows(
    spec: EngineSpec,
    upper_batch_sizes: Sequence[int],
    chosen: Sequence[Arm],
    reasons: Sequence[Reason],
    shared_probe: tuple[tuple[int, ...], Probe] | None,
    previous_rows: Sequence[PlanRow],
) -> tuple[PlanRow, ...]:
    """Makes all rows; reuses unchanged ones of `previous_rows`, those of the previous plan.

    upper_batch_sizes: largest batch of each row.  shared_probe: (rows, probe), a probe and the rows
    that share it.
    """
    rows = []
    for j, (size, arm, reason) in enumerate(zip(upper_batch_sizes, chosen, reasons, strict=True)):
        probe = shared_probe[1] if shared_probe and j in shared_probe[0] else None
        row = previous_rows[j] if j < len(previous_rows) else None
        if row is None or (
            row.arm is not arm
            or row.reason is not reason
            or row.probe is not probe
            or row.max_batch_size != size
        ):
            row = make_row(spec, size, arm, reason, probe)
        rows.append(row)
    return tuple(rows)


def rows_for_probe(
    upper_batch_sizes: Sequence[int],
    choices: Sequence[int],
    row: int,
    feasible: NDArray[np.bool_] | None,
) -> tuple[int, ...]:
    """Returns the rows in which a probe for one of them may run.

    The probe must continue if the batch size changes a little, so these are the rows up to twice or
    half as large that have the same choice.  feasible: [rows], where the probe's arm may run; None:
    everywhere.
    """
    size, chosen = upper_batch_sizes[row], choices[row]
    return tuple(
        j
        for j, upper_size in enumerate(upper_batch_sizes)
        if size <= 2 * upper_size
        and upper_size <= 2 * size
        and choices[j] == chosen
        and (feasible is None or feasible[j])
    )


def make_forced_rows(
    spec: EngineSpec, upper_batch_sizes: Iterable[int], arms: Sequence[Arm], forced_arm: Arm
) -> tuple[PlanRow, ...]:
    """Makes rows with the forced arm, or the shortest draft where it cannot run."""
    rows = []
    for size in upper_batch_sizes:
        runnable_arms = [arm for arm in arms if spec.can_run(arm, size)] or arms
        arm = (
            forced_arm
            if forced_arm in runnable_arms
            else min(runnable_arms, key=attrgetter("gamma"))
        )
        rows.append(make_row(spec, size, arm, Reason.PROFILING, None))
    return tuple(rows)


def drop_probes(spec: EngineSpec, rows: Iterable[PlanRow]) -> tuple[PlanRow, ...]:
    """Returns the same rows without probes."""
    return tuple(
        row if row.probe is None else make_row(spec, row.max_batch_size, row.arm, row.reason, None)
        for row in rows
    )


def _lets_drafter_sleep(spec: EngineSpec, arm: Arm) -> bool:
    return arm.gamma == 0 and spec.remaining_capabilities.can_sleep


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
    max_buckets = max(1, min(_BUCKETS_MAX, _CELLS_MAX // arms))
    return _thin_out([*sorted(sizes - {max_batch_size}), max_batch_size], max_buckets)


def _thin_out(sizes: Sequence[int], max_count: int) -> tuple[int, ...]:
    """Keeps at most `max_count` of the ascending sizes, evenly spaced in log B, with the last."""
    if len(sizes) <= max_count:
        return tuple(sizes)
    *captured, last_size = sizes
    selected: list[int] = []
    index, remaining = 0, max_count - 1
    while remaining > 0 and index < len(captured):
        selected.append(captured[index])
        remaining -= 1
        # The remaining range is divided into equal ratios, one for each remaining bucket.
        ratio = (captured[-1] / captured[index]) ** (1 / remaining) if remaining else 1.0
        index = max(index + 1, bisect_left(captured, captured[index] * ratio * (1 - 1e-9)))
    return (*selected, last_size)

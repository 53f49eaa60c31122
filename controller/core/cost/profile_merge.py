"""Merges several pods' measurements of the same engine into one profile.

Every cell keeps all its steps: its time is the mean of the measured medians, weighted by their
steps, and its spread combines the spread within each pod with that between pods (law of total
variance, with the interquartile range as 1.349 standard deviations).  Cells are first converted to
a common context, each by its own profile's context term.  No measurement counts twice.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from controller.core.cost.profile import Profile, ProfileCell
from controller.core.errors import ProfileMergeError

# Interquartile range of a normal distribution, in standard deviations.
_IQR_DEVIATIONS = 1.349


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Merges profiles into one; a single profile is returned unchanged.

    Raises ProfileMergeError if the list is empty, if a measurement would count twice, and for
    profiles of different engines (it names the field that differs).
    """
    if not profiles:
        raise ProfileMergeError("there is no profile to merge")
    if len(profiles) == 1:
        return profiles[0]
    first_profile = profiles[0]
    for candidate in profiles[1:]:
        for field, first_value, other_value in differences(first_profile, candidate):
            raise ProfileMergeError(
                f"profiles of different engines cannot be merged: {field} is {first_value!r} in "
                f"{first_profile.profile_id} and {other_value!r} in {candidate.profile_id}"
            )
    measurements = [m for profile in profiles for m in measurements_of(profile)]
    if len(set(measurements)) < len(measurements):
        duplicate = next(m for m in measurements if measurements.count(m) > 1)
        raise ProfileMergeError(
            f"the measurement {duplicate} is in more than one of these profiles"
        )
    weights = [_total_steps(profile) for profile in profiles]
    reference = _mean([p.kv_tokens_per_sequence for p in profiles], weights)
    weighted_rates = [
        (p.catch_up_seconds_per_token, w)
        for p, w in zip(profiles, weights, strict=True)
        if p.catch_up_seconds_per_token > 0
    ]
    newest = max(profiles, key=lambda p: p.measured_at)
    return replace(
        newest,
        kv_tokens_per_sequence=reference,
        seconds_per_kv_token=_mean([p.seconds_per_kv_token for p in profiles], weights),
        cells=_merge_cells([(p, _cells_at_context(p, reference)) for p in profiles]),
        command=f"merged from {len(measurements)} measurements",
        hardware="; ".join(sorted({p.hardware for p in profiles if p.hardware})),
        catch_up_seconds_per_token=_mean(*map(list, zip(*weighted_rates, strict=True)))
        if weighted_rates
        else 0.0,
        merged_from=tuple(sorted(measurements)),
    )


def select_distinct(profiles: Iterable[Profile]) -> list[Profile]:
    """Returns profiles that can be merged: if two share a measurement, the larger or first one."""
    selected: list[Profile] = []
    used_measurements: set[str] = set()
    for profile in sorted(profiles, key=lambda p: -len(measurements_of(p))):
        if used_measurements.isdisjoint(measurements_of(profile)):
            selected.append(profile)
            used_measurements.update(measurements_of(profile))
    return selected


def measurements_of(profile: Profile) -> tuple[str, ...]:
    """Returns the ids of the single measurements that a profile was made from."""
    return profile.merged_from or (profile.profile_id,)


def differences(first: Profile, second: Profile) -> list[tuple[str, object, object]]:
    """Returns (field, first's, second's) for each difference between two profiles' engines."""
    all_differences = list(first.differences(second.fingerprint, second.drafters))
    named_fields = {field for field, *_ in all_differences}
    for field, second_value, first_value in second.differences(first.fingerprint, first.drafters):
        if field not in named_fields:
            all_differences.append((field, first_value, second_value))
    return all_differences


def _total_steps(profile: Profile) -> int:
    return sum(cell.steps for cell in profile.cells)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


def _cells_at_context(profile: Profile, reference: float) -> list[ProfileCell]:
    """Returns the cells converted to another context; their times stay positive."""
    context_change = reference - profile.kv_tokens_per_sequence
    return [
        replace(
            cell,
            step_seconds=max(
                cell.step_seconds + profile.seconds_per_kv_token * context_change * cell.batch_size,
                0.1 * cell.step_seconds,
            ),
        )
        for cell in profile.cells
    ]


def _merge_cells(parts: Sequence[tuple[Profile, list[ProfileCell]]]) -> tuple[ProfileCell, ...]:
    cells_by_key: dict[tuple[str, int, int], list[ProfileCell]] = {}
    for _, cells in parts:
        for cell in cells:
            cells_by_key.setdefault((cell.drafter, cell.gamma, cell.batch_size), []).append(cell)
    order = {d.name: i for i, d in enumerate(parts[0][0].drafters)}
    return tuple(
        _pool_cells(cells)
        for _, cells in sorted(
            cells_by_key.items(), key=lambda item: (order[item[0][0]], *item[0][1:])
        )
    )


def _pool_cells(cells: Sequence[ProfileCell]) -> ProfileCell:
    if len(cells) == 1:
        return cells[0]
    weights = [cell.steps for cell in cells]
    mean = _mean([cell.step_seconds for cell in cells], weights)
    variance = _mean(
        [(c.spread_seconds / _IQR_DEVIATIONS) ** 2 + (c.step_seconds - mean) ** 2 for c in cells],
        weights,
    )
    return replace(
        cells[0],
        step_seconds=mean,
        spread_seconds=_IQR_DEVIATIONS * math.sqrt(variance),
        steps=sum(weights),
    )

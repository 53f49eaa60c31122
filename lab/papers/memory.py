"""Fits `simulator.correlated_curves.AcceptanceMemory` to recorded acceptance.

Per drafter: did the draft for the next token succeed, position by position?  The latent correlation
of two outcomes at a distance, which thresholds on two jointly normal variables explain (tetrachoric
correlation), is fitted by

    rho(distance) = level + passage exp(-distance / tokens)

and the remainder to 1 is the part of each token alone.  The correlation between two drafters is
that of their outcomes at the same positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import MAX_GAMMA
from simulator.acceptance_trace import AcceptanceTrace, RecordedRequest, read_requests
from simulator.correlated_curves import AcceptanceMemory, CorrelatedCurves
from simulator.curves import IndependentCurves, conditional_curve

_DISTANCES = 50
_TOKENS = np.geomspace(0.5, 50, 200)
_MIN_TOKEN_SHARE = 0.02
_POSITIONS = 8
_CORRELATIONS = np.linspace(-0.98, 0.98, 1961)


@dataclass(frozen=True, slots=True)
class Fit:
    """Describes the memory of one drafter's acceptance.

    survival: s_1, s_2, ... over all positions.  consistent: share of positions with j > 0 accepted
    drafts that are followed by one with at least j - 1.  run: mean length of a run of successes.
    level_spread, passage_spread, passage_tokens: as in `Memory`.
    """

    drafter: str
    survival: tuple[float, ...]
    consistent: float
    run: float
    level_spread: float
    passage_spread: float
    passage_tokens: float


def fit(requests: Sequence[RecordedRequest], drafter: str) -> Fit:
    """Fits one drafter of recorded requests."""
    accepted = [r.accepted[drafter][: r.positions].astype(np.int64) for r in requests]
    all_counts = np.concatenate(accepted)
    success = [(values > 0).astype(np.float64) for values in accepted]
    share = float((all_counts > 0).mean())
    pairs = [(a[:-1], a[1:]) for a in accepted]
    current, following = (np.concatenate(side) for side in zip(*pairs, strict=True))
    consistent = float((following >= current - 1)[current > 0].mean())
    ends = sum(float((s[:-1] * (1 - s[1:])).sum() + s[-1]) for s in success)
    distances = np.arange(1, _DISTANCES + 1)
    rho = np.array([_correlation_at_distance(success, int(d), share) for d in distances])
    pairs_at = np.array([sum(max(0, len(s) - d) for s in success) for d in distances.tolist()])
    level, passage, tokens = _fit_decay(distances, rho, np.sqrt(pairs_at))
    token_share = 1 - level - passage
    return Fit(
        drafter,
        _survival(requests, drafter, _POSITIONS),
        consistent,
        float((all_counts > 0).sum()) / ends,
        float(np.sqrt(level / token_share)),
        float(np.sqrt(passage / token_share)),
        tokens,
    )


def correlation(
    requests: Sequence[RecordedRequest], first_drafter: str, second_drafter: str
) -> float:
    """Returns the latent correlation of two drafters at the same positions."""
    first, second = (
        np.concatenate([r.accepted[d][: r.positions] > 0 for r in requests])
        for d in (first_drafter, second_drafter)
    )
    return _latent(float((first & second).mean()), float(first.mean()), float(second.mean()))


def _correlation_at_distance(
    success: Sequence[NDArray[np.float64]], distance: int, share: float
) -> float:
    long = [s for s in success if len(s) > distance]
    joint_successes = sum(float((s[:-distance] * s[distance:]).sum()) for s in long)
    return _latent(joint_successes / sum(len(s) - distance for s in long), share, share)


def _latent(joint_probability: float, first: float, second: float) -> float:
    """Returns the correlation at which two normal variables lie below their thresholds together."""
    a, b = NormalDist().inv_cdf(first), NormalDist().inv_cdf(second)
    r = _CORRELATIONS
    residual_variance = 1 - r * r
    density = np.exp(-(a * a - 2 * r * a * b + b * b) / (2 * residual_variance)) / (
        2 * np.pi * np.sqrt(residual_variance)
    )
    steps = (density[1:] + density[:-1]) / 2 * np.diff(r)
    joint = np.concatenate(([0.0], np.cumsum(steps)))
    joint += first * second - np.interp(0.0, r, joint)
    return float(np.interp(joint_probability, joint, r))


def _fit_decay(
    distances: NDArray[np.int64], rho: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Returns level, passage and tokens of the least squares fit, none below 0."""
    best = (np.inf, 0.0, 0.0, 1.0)
    for tokens in _TOKENS:
        decay = np.exp(-distances / tokens)
        matrix = np.stack([np.ones_like(decay), decay], axis=1)
        solution = np.linalg.lstsq(weights[:, None] * matrix, weights * rho, rcond=None)[0]
        level, passage = np.maximum(0, solution)
        # Some part of every token is its own.
        passage = max(0.0, min(passage, 1 - _MIN_TOKEN_SHARE - level))
        error = float(((weights * (level + passage * decay - rho)) ** 2).sum())
        if error < best[0]:
            best = (error, float(level), float(passage), float(tokens))
    return best[1:]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares tokens per sequence and step at one draft length, replayed request by request.

    chain: drawn with the fitted memory.  independent: drawn from the survival curve alone.
    """

    drafter: str
    gamma: int
    recorded: float
    chain: float
    independent: float


def compare(
    path: Path, gammas: Sequence[int] = (1, 3, 8)
) -> tuple[list[Fit], float, list[Comparison]]:
    """Fits a SpecDecode-Bench file: its drafters, the correlation of the first two, and how close.

    Raises InvalidInputError for what `read_requests` refuses.
    """
    requests = read_requests(path, "")
    fits = [fit(requests, drafter) for drafter in requests[0].accepted]
    drafter_correlation = (
        correlation(requests, *[f.drafter for f in fits[:2]]) if len(fits) > 1 else 0.0
    )
    curves = {f.drafter: conditional_curve(_survival(requests, f.drafter, MAX_GAMMA)) for f in fits}
    memory = {
        f.drafter: AcceptanceMemory(f.level_spread, 0, 1, f.passage_spread, f.passage_tokens)
        for f in fits
    }
    recorded = AcceptanceTrace(path.stem, tuple(requests))
    pool = recorded.pool(np.random.default_rng(0), len(requests))
    simulated_pools = [
        source.pool(
            np.random.default_rng(1), len(requests), pool.output_tokens, pool.context_tokens
        )
        for source in (
            CorrelatedCurves(path.stem, curves, memory, max(0.0, drafter_correlation)),
            IndependentCurves(path.stem, curves),
        )
    ]
    comparisons = []
    for f in fits:
        tokens_by_source = [
            request_pool.tokens_per_step(f.drafter, gammas)
            for request_pool in (pool, *simulated_pools)
        ]
        comparisons += [
            Comparison(f.drafter, gamma, *(float(value) for value in row))
            for gamma, *row in zip(gammas, *tokens_by_source, strict=True)
        ]
    return fits, drafter_correlation, comparisons


def _survival(requests: Sequence[RecordedRequest], drafter: str, depth: int) -> tuple[float, ...]:
    every = np.concatenate([r.accepted[drafter][: r.positions] for r in requests])
    return tuple(float((every >= k).mean()) for k in range(1, depth + 1))

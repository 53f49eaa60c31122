"""Finds the true value of every draft length by replaying requests one step after the other.

An average over the positions of a recorded request would be wrong: a step starts where the last one
ended, so positions within an accepted draft are skipped, and gamma determines which.

A static arm of a mixture, and the oracle, use fixed rules: the mean accepted length of each
drafter's proposals over all positions of the workload, for the lookup by match length.  The running
ratios of each request are updated as usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.mixtures import MAX_MATCH_LENGTH, MIN_MATCH_LENGTH
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.plan import MixtureRule
from simulator.row_drafters import RowDrafterChooser
from simulator.surface import CostSurface
from simulator.workload import RequestPool, Workload, distinct_pools

# The value in the core's rules.
_RATIO_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a pool at every arm, by true kind of request.

    tokens: [kinds] output tokens.  steps: [kinds, arms].  Drafts that are accepted beyond the end
    of an output yield no token, so they do not count.
    """

    tokens: NDArray[np.float64]
    steps: NDArray[np.float64]

    @property
    def expected_by_kind(self) -> NDArray[np.float64]:
        """Returns [kinds, arms] of E[accepted | arm], drafts a step; 0 for a kind not served."""
        served = np.maximum(self.steps, 1.0)
        expected: NDArray[np.float64] = np.maximum(self.tokens[:, None] / served - 1.0, 0.0)
        return expected

    @property
    def expected(self) -> NDArray[np.float64]:
        """Returns [arms] of E[accepted | arm] over all requests, drafts a step."""
        expected: NDArray[np.float64] = self.tokens.sum() / self.steps.sum(axis=0) - 1.0
        return expected


def replay(pool: RequestPool, surface: CostSurface, rules: Sequence[MixtureRule] = ()) -> Replay:
    """Replays every request of the pool from its first position to its last, at every arm.

    rules: of mixtures.
    """
    kinds, count = pool.request_kinds, pool.kind_count
    tokens = np.bincount(kinds, weights=pool.output_tokens, minlength=count)
    steps = np.concatenate(
        [
            pool.steps_per_request(d.name, d.gammas)
            if d.mixture is None
            else mixture_steps(pool, surface.drafters, i, rules)
            for i, d in enumerate(surface.drafters)
        ]
    )
    by_kind = [np.bincount(kinds, weights=arm, minlength=count) for arm in steps]
    return Replay(tokens.astype(np.float64), np.stack(by_kind, axis=1).astype(np.float64))


class Truth:
    """Replays the pools of a workload; each is replayed once, on first use.

    rules: of mixtures, in hindsight.
    """

    def __init__(self, workload: Workload, surface: CostSurface) -> None:
        self.surface = surface
        self._pools = distinct_pools(workload)
        self.rules = hindsight_rules(self._pools, surface.drafters)
        self._replays: dict[int, Replay] = {}

    def replay_of(self, pool: RequestPool) -> Replay:
        """Returns the replay of one of the workload's pools."""
        if id(pool) not in self._replays:
            self._replays[id(pool)] = replay(pool, self.surface, self.rules)
        return self._replays[id(pool)]

    @property
    def has_mixed_kinds(self) -> bool:
        """Whether one pool has requests of several kinds."""
        return any(pool.kind_count > 1 for pool in self._pools)

    def expected_by_pool(self) -> NDArray[np.float64]:
        """Returns [kinds, arms] of E[accepted | arm]; all kinds of a pool have the pool's mean.

        Kinds are numbered as by `distinct_pools`.
        """
        return np.concatenate(
            [np.tile(self.replay_of(pool).expected, (pool.kind_count, 1)) for pool in self._pools]
        )

    def expected_by_kind(self) -> NDArray[np.float64]:
        """Returns [kinds, arms] of E[accepted | arm], separately for each kind."""
        return np.concatenate([self.replay_of(pool).expected_by_kind for pool in self._pools])


def hindsight_rules(
    pools: Sequence[RequestPool], drafters: Sequence[DrafterSpec]
) -> tuple[MixtureRule, ...]:
    """Returns the rule of every mixture at each of its draft lengths, over all these requests."""
    mixtures = [d for d in drafters if d.mixture is not None]
    if not mixtures:
        return ()
    match = np.concatenate([pool.known_matches for pool in pools]).astype(np.int64)
    match = np.minimum(match, MAX_MATCH_LENGTH)
    rows = np.maximum(np.bincount(match, minlength=MAX_MATCH_LENGTH + 1), 1)
    rules = []
    for drafter in mixtures:
        assert drafter.mixture is not None
        main, lookup_expected = (
            np.concatenate([pool.accepted[name] for pool in pools])
            for name in (drafter.mixture.main, drafter.mixture.free)
        )
        for gamma in drafter.gammas:
            tokens = np.bincount(match, np.minimum(lookup_expected, gamma), MAX_MATCH_LENGTH + 1)
            by_length = (tokens / rows)[MIN_MATCH_LENGTH:].tolist()
            rules.append(
                MixtureRule(
                    Arm(drafter.name, gamma),
                    float(np.minimum(main, gamma).mean()),
                    tuple(by_length),
                    MIN_MATCH_LENGTH,
                    _RATIO_WEIGHT,
                )
            )
    return tuple(rules)


def mixture_steps(
    pool: RequestPool,
    drafters: Sequence[DrafterSpec],
    mixture: int,
    rules: Sequence[MixtureRule],
) -> NDArray[np.int64]:
    """Returns [gammas, requests] steps of each request, as `RequestPool.steps` counts them.

    mixture: its index in `drafters`.
    """
    accepted = [pool.accepted[d.name] for d in drafters if d.mixture is None]

    def replay_gamma(gamma: int) -> NDArray[np.int64]:
        choice = RowDrafterChooser(drafters, accepted, pool.known_matches)
        return pool.replay_steps(
            lambda cursor, request: (
                choice.choose_rows(mixture, gamma, cursor, request, rules)[0] + 1
            )
        )

    return np.array([replay_gamma(gamma) for gamma in drafters[mixture].gammas])

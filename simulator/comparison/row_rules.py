"""The rules of mixtures in hindsight, and what a mixture under them gives: for those who know all.

A static arm of a mixture, and the oracle, use fixed rules: the mean of what each proposal would
have had accepted over all positions of the workload, the lookup's by the length of its match.  The
running ratios of each request are kept as everywhere.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.mixtures import LEAST_MATCH, LONGEST_MATCH
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.plan import MixtureRule
from simulator.rows import RowChoice
from simulator.workload import RequestPool

# As the core's rules have it.
_RATIO_WEIGHT = 0.1


def hindsight_rules(
    pools: Sequence[RequestPool], drafters: Sequence[DrafterSpec]
) -> tuple[MixtureRule, ...]:
    """Returns the rule of every mixture at each of its draft lengths, over all these requests."""
    mixtures = [d for d in drafters if d.mixture is not None]
    if not mixtures:
        return ()
    match = np.concatenate([pool.known_matches for pool in pools]).astype(np.int64)
    match = np.minimum(match, LONGEST_MATCH)
    rows = np.maximum(np.bincount(match, minlength=LONGEST_MATCH + 1), 1)
    rules = []
    for drafter in mixtures:
        assert drafter.mixture is not None
        main, free = (
            np.concatenate([pool.accepted[name] for pool in pools])
            for name in (drafter.mixture.main, drafter.mixture.free)
        )
        for gamma in drafter.gammas:
            tokens = np.bincount(match, np.minimum(free, gamma), LONGEST_MATCH + 1)
            by_length = (tokens / rows)[LEAST_MATCH:].tolist()
            rules.append(
                MixtureRule(
                    Arm(drafter.name, gamma),
                    float(np.minimum(main, gamma).mean()),
                    tuple(by_length),
                    LEAST_MATCH,
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
    """[gammas, requests] steps in which each request is done, as `RequestPool.steps` counts them.

    mixture: its index in `drafters`.
    """
    accepted = [pool.accepted[d.name] for d in drafters if d.mixture is None]
    found = np.zeros((len(drafters[mixture].gammas), pool.requests), dtype=np.int64)
    for steps, gamma in zip(found, drafters[mixture].gammas, strict=True):
        choice = RowChoice(drafters, accepted, pool.known_matches)
        request = np.flatnonzero(pool.output_tokens > 0)
        cursor = pool.offsets[request]
        end = cursor + pool.output_tokens[request]
        step = 0
        while len(request):
            step += 1
            cursor = cursor + choice.step(mixture, gamma, cursor, request, rules)[0] + 1
            running = cursor < end
            if not running.all():
                steps[request[~running]] = step
                request, cursor, end = request[running], cursor[running], end[running]
    return found

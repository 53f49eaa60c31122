"""Rules of mixtures, as a sidecar would send them."""

from collections.abc import Iterable

from engine_shim.sglang.drafters.lookup import MIN_MATCH_TOKENS
from speculation.v1.plan_pb2 import MixtureRule

# Look-ups are used after long matches.
FREE_EXPECTED = (1.0, 1.4, 1.8, 3.0)


def rules_of(
    names: Iterable[str],
    gammas: Iterable[int],
    main_expected: float = 1.5,
    free_expected: Iterable[float] = FREE_EXPECTED,
) -> tuple[MixtureRule, ...]:
    """The same rule for these mixtures at all draft lengths above 0."""
    lengths, expected = [gamma for gamma in gammas if gamma], list(free_expected)
    return tuple(
        MixtureRule(
            drafter=name,
            gamma=gamma,
            main_expected=main_expected,
            free_expected=expected,
            least_match=MIN_MATCH_TOKENS,
            ratio_weight=0.1,
        )
        for name in names
        for gamma in lengths
    )

"""Hypothesis strategies for what travels on the socket pair."""

from hypothesis import strategies as st

from engine_shim.link.packets import (
    MAX_GAMMA,
    MAX_MATCH_LENGTHS,
    PlanPacket,
    ProbeEntry,
    RowEntry,
    RuleEntry,
)

UINT8 = st.integers(0, 2**8 - 1)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
GAMMAS = st.integers(0, MAX_GAMMA)


def probes(arms: st.SearchStrategy[tuple[int, int]]) -> st.SearchStrategy[ProbeEntry]:
    return st.builds(
        lambda probe_id, arm, steps: ProbeEntry(probe_id, arm[0], arm[1], steps),
        st.integers(1, 2**64 - 1),
        arms,
        st.integers(1, 2**32 - 1),
    )


@st.composite
def rows(
    draw: st.DrawFn,
    arms: st.SearchStrategy[tuple[int, int]],
    probe: st.SearchStrategy[ProbeEntry],
    most: int = 8,
) -> tuple[RowEntry, ...]:
    bounds = draw(st.sets(st.integers(1, 2**32 - 1), min_size=1, max_size=most))
    made = []
    for bound in sorted(bounds):
        drafter, gamma = draw(arms)
        asleep = gamma == 0 and draw(st.booleans())
        made.append(RowEntry(bound, drafter, gamma, asleep, draw(st.none() | probe)))
    return tuple(made)


_EXPECTED = st.floats(0, MAX_GAMMA, width=32)
RULES = st.builds(
    RuleEntry,
    UINT8,
    st.integers(1, MAX_GAMMA),
    _EXPECTED,
    st.lists(_EXPECTED, min_size=1, max_size=MAX_MATCH_LENGTHS).map(tuple),
    st.integers(1, MAX_GAMMA),
    st.floats(0, 1, width=32),
)
ANY_ARM = st.tuples(UINT8, GAMMAS)
PLANS = st.builds(
    PlanPacket,
    session=UINT32,
    epoch=UINT64,
    arrival_ns=st.integers(-(2**63), 2**63 - 1),
    lease_ms=st.integers(1, 2**32 - 1),
    regime_mode=UINT8,
    regime_stride=UINT32,
    rows=rows(ANY_ARM, probes(ANY_ARM)),
    draft_version=UINT32,
    rules=st.lists(RULES, max_size=4).map(tuple),
)

"""The standard suite: published costs, drawn acceptance, and everything that is known to go wrong.

Every scenario is small enough to be read here, in one sitting.  Nothing in it needs a file; `extra`
adds scenarios on files that are given (`files.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from controller.core.cost.profile import Profile
from controller.simulation import published
from controller.simulation.controller_policy import FINGERPRINT
from controller.simulation.curves import Curves, conditional
from controller.simulation.engine import EngineOptions, Prefill
from controller.simulation.scenario import Scenario
from controller.simulation.sources import ClosedSource, Mixture, OpenSource, PhaseSpec, lengths
from controller.simulation.surface import CostSurface
from controller.simulation.workload import AcceptanceSource

H100, B200 = "h100-llama3.1-8b", "b200-qwen3.6-35b-a3b"
_TIDE = ("tide-gpt-oss-120b", "tide-qwen3-235b", "tide-llama4-scout", "tide-llama3.3-70b")

# Conditional acceptance of four kinds of traffic, position by position; the last value goes on.
KINDS: Mapping[str, tuple[float, ...]] = {
    "json": (0.92, 0.93, 0.93, 0.92),
    "code": (0.72, 0.68, 0.66, 0.66),
    "prose": (0.52, 0.45, 0.42, 0.40),
    "garbled": (0.10, 0.10, 0.10, 0.10),
}
_DEPTH = 16


def standard() -> list[Scenario]:
    """Lists all scenarios of the suite, in the order of the report."""
    return [*_stationary(), *_shifting(), *_hostile(), *_drafters(), *_served()]


def measured_profile(
    surface: CostSurface, max_batch_size: int, factors: float | np.random.Generator | None = None
) -> Profile:
    """Makes what `controller profile` would write: powers of two, gamma = 0 included.

    factors: every drafting cell is off by this factor; a generator draws +-30 % cell by cell.
    """
    sizes = profile_sizes(max_batch_size)
    drafting = np.array([[float(arm.gamma > 0)] for arm in surface.arms])
    wrong = None
    if isinstance(factors, np.random.Generator):
        wrong = factors.uniform(0.7, 1.3, (len(surface.arms), len(sizes)))
    elif factors is not None:
        wrong = np.tile(1 + drafting * (factors - 1), (1, len(sizes)))
    return surface.profile(FINGERPRINT, sizes, wrong)


def profile_sizes(max_batch_size: int) -> list[int]:
    """Lists 1, 2, 4, ... and the limit itself."""
    sizes = [1]
    while sizes[-1] * 2 < max_batch_size:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == max_batch_size else [*sizes, max_batch_size]


def only(surface: CostSurface, *drafters: str) -> CostSurface:
    """Returns the surface with these drafters alone."""
    keep = [i for i, arm in enumerate(surface.arms) if arm.drafter in drafters]
    return replace(
        surface,
        drafters=tuple(d for d in surface.drafters if d.name in drafters),
        seconds=surface.seconds[keep],
        kv_seconds=surface.kv_seconds[keep],
    )


def kinds(drafter: str) -> dict[str, Curves]:
    """Returns the four kinds of traffic for one drafter."""
    return {
        name: Curves(name, {drafter: [*curve, *[curve[-1]] * (_DEPTH - len(curve))]})
        for name, curve in KINDS.items()
    }


def _geometric(drafter: str, alpha: float) -> Curves:
    return Curves(f"alpha={alpha:g}", {drafter: [alpha] * _DEPTH})


def _single(
    surface: CostSurface, acceptance: AcceptanceSource, batch_size: int, steps: int
) -> Scenario:
    name = f"stationary/{surface.name}/{acceptance.name}/B={batch_size}"
    # A single sequence is luck for long: three times the tokens.
    steps *= 3 if batch_size == 1 else 1
    phase = PhaseSpec("only", acceptance, batch_size, batch_size * steps)
    return Scenario(
        name, "stationary", f"{batch_size} sequences at a time, {acceptance.name}, costs exact",
        surface, ClosedSource((phase,)), measured_profile(surface, surface.max_batch_size),
        surface.max_batch_size, shifting=False, seeds=2,
    )  # fmt: skip


def _stationary() -> list[Scenario]:
    found = []
    for name in _TIDE:
        surface = published.surface(name)
        drafter = surface.drafters[0].name
        sizes = [b for b in (1, 4, 16, 64) if b <= surface.max_batch_size]
        found += [
            _single(surface, _geometric(drafter, alpha), b, 5000)
            for alpha in (0.2, 0.5, 0.7, 0.9)
            for b in sizes
        ]
    eagle = only(published.surface(H100), "eagle")
    found += [
        _single(eagle, source, b, 5000) for source in kinds("eagle").values() for b in (1, 16, 64)
    ]
    mtp = only(published.surface(B200, max_batch_size=1024, extrapolate=True), "mtp")
    survival = published.acceptance_curves(B200)["mtp"]
    measured = Curves("survival", {"mtp": conditional(survival)})
    found += [
        _single(mtp, source, b, 5000 if b < 512 else 1500)
        for source in (measured, _geometric("mtp", 0.4), _geometric("mtp", 0.85))
        for b in (1, 16, 128, 1024)
    ]
    return found


Step = tuple[str, int, int]  # kind of traffic, concurrency, tokens a sequence


def phases(traffic: Mapping[str, AcceptanceSource], steps: Sequence[Step]) -> ClosedSource:
    """Makes a closed loop through kinds of traffic; the change of kind comes at once."""
    return ClosedSource(
        tuple(
            PhaseSpec(f"{kind} x{b}", traffic[kind], b, b * tokens, at_once=i > 0)
            for i, (kind, b, tokens) in enumerate(steps)
        )
    )


def _moving(
    name: str, description: str, surface: CostSurface, steps: Sequence[Step], **changes: object
) -> Scenario:
    drafter = surface.drafters[0].name
    scenario = Scenario(
        name, "shifting", description, surface, phases(kinds(drafter), steps),
        measured_profile(surface, surface.max_batch_size), surface.max_batch_size,
        shifting=True, seeds=3,
    )  # fmt: skip
    return replace(scenario, **changes)  # type: ignore[arg-type]


_LOAD: Sequence[Step] = (
    ("code", 1, 6000), ("code", 64, 3000), ("code", 8, 3000), ("code", 32, 3000),
    ("code", 2, 5000), ("code", 64, 3000), ("code", 4, 4000),
)  # fmt: skip
_BOTH: Sequence[Step] = (
    ("json", 1, 2500), ("code", 4, 2000), ("prose", 16, 2000), ("json", 8, 2000),
    ("garbled", 32, 2000), ("json", 32, 2000), ("prose", 64, 2000), ("code", 2, 2500),
)  # fmt: skip


def _traffic(batch_size: int, tokens: int) -> Sequence[Step]:
    order = ("json", "code", "prose", "json", "garbled", "json", "prose", "code")
    return [(kind, batch_size, tokens) for kind in order]


def _shifting() -> list[Scenario]:
    h100 = only(published.surface(H100), "eagle")
    scout = published.surface("tide-llama4-scout")
    b200 = only(published.surface(B200, max_batch_size=1024, extrapolate=True), "mtp")
    return [
        *(
            _moving(f"traffic/B={b}", f"kinds of traffic in turn, {b} sequences", h100,
                    _traffic(b, 2000))
            for b in (1, 16, 64)
        ),
        _moving("load/h100", "1 to 64 sequences and back, traffic constant", h100, _LOAD),
        _moving("load/scout", "the same on a mixture of experts", scout, _LOAD),
        _moving("load+traffic/h100", "both move", h100, _BOTH),
        _moving("load+traffic/scout", "both move, on a mixture of experts", scout, _BOTH),
        _moving(
            "bursts", "concurrency 1 and 1,024 in turn; the burst is other work", b200,
            (("code", 1, 4000), ("prose", 1024, 600), ("code", 1, 4000), ("json", 1024, 800),
             ("code", 1, 4000), ("code", 1024, 800)),
        ),
        _moving(
            "collapse/B=16", "60 s in which drafts are worthless, and recovery", h100,
            (("code", 16, 6000), ("garbled", 16, 8000), ("code", 16, 8000)),
        ),
        _moving(
            "collapse/B=64", "60 s in which drafts are worthless, and recovery", h100,
            (("code", 64, 6000), ("garbled", 64, 6500), ("code", 64, 8000)),
        ),
    ]  # fmt: skip


def _hostile() -> list[Scenario]:
    h100 = only(published.surface(H100), "eagle")
    largest = h100.max_batch_size
    without_context = h100.profile(
        FINGERPRINT, profile_sizes(largest), kv_tokens_per_sequence=16_384, with_context=False
    )
    wrong = (
        ("plus30", "the profile says drafting costs 30 % more than it does",
         measured_profile(h100, largest, 1.3)),
        ("minus30", "the profile says drafting costs 30 % less than it does",
         measured_profile(h100, largest, 0.7)),
        ("random30", "every cell of the profile is off by up to 30 %",
         measured_profile(h100, largest, np.random.default_rng(30))),
        ("none", "no profile at all", None),
        ("context", "profiled at 16,384 tokens of context, without the context term",
         without_context),
    )  # fmt: skip
    return [
        *(
            _moving(f"wrong-profile/{name}", text, h100, _BOTH, group="wrong-profile",
                    profile=profile)
            for name, text, profile in wrong
        ),
        _moving(
            "noise", "step times vary by 10 %, 1 % of them ten-fold", h100, _BOTH,
            options=EngineOptions(noise=0.1, outlier_share=0.01),
        ),
        _moving(
            "restless", "the machine's pace wanders by 12 % over some fifty steps", h100, _BOTH,
            options=EngineOptions(noise=0.05, pace=0.12),
        ),
        _moving(
            "stale", "a drafter that slept drafts badly for 5 steps; lag of two steps", h100,
            _traffic(16, 2000),
            options=EngineOptions(stale_steps=5, lag=2, switch_seconds=2e-4),
        ),
    ]  # fmt: skip


def _drafters() -> list[Scenario]:
    surface = published.surface(B200, max_batch_size=1024, extrapolate=True)
    curves = {d: conditional(s) for d, s in published.acceptance_curves(B200).items()}
    traffic = {"": Curves("survival", curves)}
    steps = ((16, 2500), (1024, 500), (64, 2500), (768, 500), (128, 2500), (1024, 700))
    source = phases(traffic, [("", b, n) for b, n in steps])
    return [
        Scenario(
            "drafters", "shifting", "MTP and DFlash cross over with load", surface, source,
            measured_profile(surface, 1024), 1024, shifting=True, seeds=2,
        )
    ]  # fmt: skip


def _served() -> list[Scenario]:
    h100 = only(published.surface(H100), "eagle")
    traffic = kinds("eagle")
    weights = (0.3, 0.3, 0.3, 0.1)
    mixed = Mixture("mixed", tuple(traffic.values()), weights)
    classed = replace(mixed, name="classed", labelled=True)
    exact = measured_profile(h100, h100.max_batch_size)
    chat = ClosedSource((PhaseSpec("chat", mixed, 1, 30_000),))
    rng = np.random.default_rng(60)
    # Calm and rush in turn: 2 and 14 requests a second.
    rate = np.repeat([2.0, 14.0, 2.0, 14.0], 60)
    counts = rng.poisson(rate)
    times = np.concatenate([np.sort(second + rng.random(n)) for second, n in enumerate(counts)])
    requests = len(times)
    arrivals = OpenSource(
        mixed, times - times[0], lengths(rng, requests, 900.0), lengths(rng, requests, 220.0),
        h100.max_batch_size, 10.0,
    )  # fmt: skip
    base = Scenario(
        "chat/B=1", "served", "one conversation after the other, of all kinds", h100, chat, exact,
        h100.max_batch_size, shifting=True, seeds=3,
    )  # fmt: skip
    return [
        base,
        replace(
            base, name="mixed-classes", description="24 sequences of all kinds, labelled",
            workload=ClosedSource((PhaseSpec("mixed", classed, 24, 24 * 6000),)), shifting=False,
        ),
        replace(
            base, name="arrivals/rush", description="2 and 14 requests a second in turn, prefill",
            workload=arrivals, options=EngineOptions(prefill=Prefill.CHUNKED),
        ),
    ]  # fmt: skip

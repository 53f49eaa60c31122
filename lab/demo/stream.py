"""Builds the demo's request stream: which prompts, in which order, at which concurrency.

The stream was laid out once, from what traffic looks like, before any policy was measured on it:
single users with structured answers and with free text, a few editors completing code, a batch job
over tables, bursts of sixteen.  Concurrency and domain move from phase to phase, so that neither
alone gives the draft length away: json and prose both come at 1 and at 16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.harness.stream import StreamPhase, StreamRequest, with_new_tokens

# Prompts are 48 to 64 tokens, answers 48 to 160, in steps that keep the sums easy to read.
_PROMPT_TOKENS = (48, 56, 64)
_NEW_TOKENS = tuple(range(48, 161, 16))
_MIXED = "mixed"
SEED = 20


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The plan of a phase; `domain` is one of the corpus's domains or "mixed"."""

    domain: str
    concurrency: int
    requests: int


FULL = (
    PhasePlan("json", 1, 3),
    PhasePlan("code", 4, 6),
    PhasePlan("prose", 16, 16),
    PhasePlan("csv", 8, 10),
    PhasePlan(_MIXED, 2, 4),
    PhasePlan("json", 16, 16),
    PhasePlan("prose", 1, 2),
)
QUICK = (
    PhasePlan("json", 1, 1),
    PhasePlan("prose", 16, 16),
    PhasePlan("csv", 2, 2),
    PhasePlan("code", 8, 8),
)


def build_stream(plans: Sequence[PhasePlan], seed: int) -> tuple[StreamPhase, ...]:
    """Builds the phases with their prompts; the same arguments give the same stream.

    No prompt of a domain comes twice, so that no answer is already in a prefix cache.
    """
    rng = np.random.default_rng([seed, len(plans)])
    draws = [
        [
            (DOMAINS[i % len(DOMAINS)] if plan.domain == _MIXED else plan.domain)
            for i in range(plan.requests)
        ]
        for plan in plans
    ]
    wanted = {domain: sum(phase.count(domain) for phase in draws) for domain in DOMAINS}
    prompts = {
        domain: iter(held_out_prompts(domain, count, max(_PROMPT_TOKENS), seed))
        for domain, count in wanted.items()
    }
    phases: list[StreamPhase] = []
    index = 0
    for number, (plan, domains) in enumerate(zip(plans, draws, strict=True), start=1):
        requests: list[StreamRequest] = []
        for domain in domains:
            prompt = next(prompts[domain])[: int(rng.choice(_PROMPT_TOKENS))]
            requests.append(
                StreamRequest(index, domain, tuple(prompt), int(rng.choice(_NEW_TOKENS)))
            )
            index += 1
        name = f"{number} {plan.domain} ×{plan.concurrency}"
        phases.append(StreamPhase(name, plan.domain, plan.concurrency, tuple(requests)))
    return tuple(phases)


def warm_up_stream() -> tuple[StreamPhase, ...]:
    """Builds a few short requests at low and high concurrency, to play before anything is timed."""
    phases = build_stream((PhasePlan(_MIXED, 1, 1), PhasePlan(_MIXED, 16, 16)), seed=977)
    return with_new_tokens(phases, lambda _: 24)


def halved(stream: Sequence[StreamPhase]) -> tuple[StreamPhase, ...]:
    """Returns the same phases and prompts with answers half as long."""
    return with_new_tokens(stream, lambda tokens: tokens // 2)

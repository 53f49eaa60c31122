"""Has the classes of requests with their measured acceptance, and makes streams of them.

The public traces and this repository's own small models give the classes' numbers again:

    python -m lab.paced.curves sdb_instructcoder_half.jsonl sdb_gsm8k.jsonl sdb_sharegpt.jsonl
    python -m lab.paced.curves --own

The curves "all" of the drafter "eagle" are those of code, math and chat, in this order; "least" of
sdb_sharegpt is that of hard; and "on csv" is that of unseen.

A stream has classes, concurrencies and seeds; its phases overlap, see `play_overlapping`.  DAY was
written down, with its seed, before any policy was run on it.  UNSEEN_DAY is held out for tests: no
policy was tuned on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId
from lab.harness.load_generator import StreamPhase, StreamRequest
from simulator import published
from simulator.curves import conditional_curve
from simulator.errors import InvalidInputError
from simulator.workload import ClosedLoop, RequestPool, WorkloadPhase

_TRACE = "Llama-3.1-8B with EAGLE (arXiv 2601.11580), replayed with 8 drafts a step: "
_FIRST_ID, _VOCABULARY = 16, 120
_SIGMA = 0.4
_MIN_TOKENS = 16
_NUMBERS_PER_SEED = 100_000
DAY_SEED = 1109
UNSEEN_SEED = 4711
_WARM_UP_SEED, _WARM_UP_TOKENS = 977, 48


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """Describes one kind of requests.

    survival: P(the first k drafts of a step are all accepted), k = 1, 2, ...
    """

    name: str
    survival: tuple[float, ...]
    source: str


CLASSES: Mapping[str, TrafficClass] = {
    traffic_class.name: traffic_class
    for traffic_class in (
        TrafficClass(
            "code",
            (0.647, 0.396, 0.260, 0.192, 0.146, 0.115, 0.092, 0.063),
            _TRACE + "InstructCoder",
        ),
        TrafficClass(
            "math", (0.663, 0.427, 0.269, 0.175, 0.108, 0.070, 0.046, 0.026), _TRACE + "GSM8K"
        ),
        TrafficClass(
            "chat", (0.595, 0.347, 0.221, 0.151, 0.110, 0.082, 0.062, 0.042), _TRACE + "ShareGPT"
        ),
        TrafficClass(
            "hard",
            (0.447, 0.137, 0.060, 0.036, 0.026, 0.020, 0.016, 0.012),
            _TRACE + "the tenth of the ShareGPT requests that accepts least",
        ),
        TrafficClass(
            "unseen",
            (0.120, 0.016),
            "this repository's code-only EAGLE3 drafter on CSV, measured with 8 drafts a step",
        ),
    )
}


def own_curves() -> dict[str, dict[str, Sequence[float]]]:
    """Class -> the engine's own drafter -> conditional acceptance a_1, a_2, ..."""
    return {
        name: {"eagle3": conditional_curve(traffic_class.survival)}
        for name, traffic_class in CLASSES.items()
    }


def published_curves(table: str) -> dict[str, dict[str, Sequence[float]]]:
    """Returns the curves that were published with a table, as one class "published".

    The serial drafter plays the engine's own, the block drafter the second one.  Raises
    InvalidInputError for a table without published curves.
    """
    curves = published.acceptance_curves(table)
    if not curves:
        raise InvalidInputError(table, 0, "no acceptance was published with it")
    names = {"mtp": "eagle3", "dflash": "dflash"}
    return {"published": {names[name]: conditional_curve(curve) for name, curve in curves.items()}}


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """Plans a phase.

    kinds: its classes, in equal shares.  concurrency: sequences at a time.  output_tokens,
    prompt_tokens: means of lognormal lengths.
    """

    name: str
    kinds: tuple[str, ...]
    concurrency: int
    requests: int
    output_tokens: int
    prompt_tokens: int = 96


@dataclass(frozen=True, slots=True)
class Stream:
    """Holds the requests that every policy is given.

    seed: of lengths, order and prompts, and in the ids.
    """

    name: str
    seed: int
    phases: tuple[StreamPhase, ...]

    @property
    def requests(self) -> int:
        """Counts the requests."""
        return sum(len(phase.requests) for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Counts the tokens that are decoded."""
        return sum(phase.new_tokens for phase in self.phases)

    @property
    def max_concurrency(self) -> int:
        """Returns the most sequences at a time."""
        return max(phase.concurrency for phase in self.phases)


# One compressed day, paced as an H100.
DAY = (
    PhasePlan("night", ("code",), 1, 6, 192),
    PhasePlan("morning", ("chat",), 64, 160, 192),
    PhasePlan("noon", ("math",), 8, 40, 192),
    PhasePlan("collapse", ("unseen",), 8, 28, 192),
    PhasePlan("recovery", ("math",), 8, 40, 192),
    PhasePlan("burst", ("chat", "code"), 128, 256, 192),
    PhasePlan("hard burst", ("hard",), 128, 192, 192),
    PhasePlan("evening", ("code",), 2, 12, 192),
)
# The same shape of a day with another order, other sizes and another seed.
UNSEEN_DAY = (
    PhasePlan("evening", ("chat",), 2, 4, 128),
    PhasePlan("burst", ("hard", "math"), 96, 112, 112),
    PhasePlan("collapse", ("unseen",), 12, 30, 112),
    PhasePlan("recovery", ("code",), 12, 30, 112),
    PhasePlan("night", ("math",), 1, 3, 128),
)


def build_stream(name: str, plans: Sequence[PhasePlan], seed: int) -> Stream:
    """Draws the requests, at least one a sequence; the same arguments give the same stream."""
    rng = np.random.default_rng([seed, 17])
    # A request's draws depend on its id: another seed has other numbers.
    number = seed * _NUMBERS_PER_SEED
    phases: list[StreamPhase] = []
    for plan in plans:
        count = max(plan.concurrency, plan.requests)
        outputs = _lengths(rng, count, plan.output_tokens)
        prompts = _lengths(rng, count, plan.prompt_tokens)
        kinds = [plan.kinds[i % len(plan.kinds)] for i in range(count)]
        rng.shuffle(kinds)
        requests = []
        for kind, output, prompt in zip(kinds, outputs, prompts, strict=True):
            tokens = rng.integers(_FIRST_ID, _VOCABULARY, prompt)
            requests.append(make_request(kind, number, int(output), tokens.tolist()))
            number += 1
        phases.append(StreamPhase(plan.name, plan.concurrency, tuple(requests)))
    return Stream(name, seed, tuple(phases))


def make_request(kind: str, number: int, tokens: int, prompt: Sequence[int]) -> StreamRequest:
    """Makes a request by whose id an engine draws its acceptance.  tokens: of the answer."""
    rid = str(RequestId(kind, number, tokens))
    return StreamRequest(number, kind, tuple(prompt), tokens, rid)


def warm_up_stream(kinds: Sequence[str], concurrency: int) -> Stream:
    """Builds a stream of one request, then of `concurrency` requests at a time."""
    plans = [
        PhasePlan("one", tuple(kinds), 1, 1, _WARM_UP_TOKENS),
        PhasePlan("all", tuple(kinds), concurrency, 1, _WARM_UP_TOKENS),
    ]
    return build_stream("warm-up", plans, _WARM_UP_SEED)


def as_workload(
    stream: Stream, curves: Mapping[str, Mapping[str, Sequence[float]]], drafters: Sequence[str]
) -> ClosedLoop:
    """The stream for the simulator, with the same draws as the paced engine's.

    A request's first token comes from its prefill, so it decodes one token less.
    """
    acceptance = DrawnAcceptance(curves)
    phases = []
    for phase in stream.phases:
        output = np.array([r.new_tokens - 1 for r in phase.requests], dtype=np.int64)
        kinds = phase.domains
        labels = np.array([kinds.index(r.domain) for r in phase.requests], dtype=np.int64)
        accepted: dict[str, NDArray[np.uint8]] = {
            drafter: np.concatenate(
                [
                    acceptance.accepted(RequestId(r.domain, r.index, r.new_tokens), drafter)[:-1]
                    for r in phase.requests
                ]
            )
            for drafter in drafters
        }
        context = np.array([len(r.prompt) + 1 for r in phase.requests], dtype=np.int64)
        pool = RequestPool(context, output, np.cumsum(output) - output, labels, accepted, kinds)
        phases.append(WorkloadPhase(phase.name, pool, phase.concurrency, None))
    return ClosedLoop(tuple(phases))


def _lengths(rng: np.random.Generator, count: int, mean: int) -> NDArray[np.int64]:
    lengths = rng.lognormal(np.log(mean) - _SIGMA * _SIGMA / 2, _SIGMA, count)
    return np.maximum(_MIN_TOKENS, np.rint(lengths)).astype(np.int64)

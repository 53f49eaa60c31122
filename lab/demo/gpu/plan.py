"""Plans a run: its pieces, the most useful ones first, and the seconds of each.

Everything is estimated from one price list a shape.  The day is made shorter until it fits: its
requests stay, and their answers shrink alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lab.gpu_check import budget
from lab.gpu_check.shapes import EMULATED, QWEN3_8B, SMALL, Shape
from lab.paced.engines import ADAPTIVE, OFF, STEERED
from lab.paced.traffic import DAY, DAY_SEED, PhasePlan, Stream, build_stream, warm_up_stream

# The best static draft length, before the costs are known.
STATIC_BEST = "static-best"
# Steered comes first, because it is profiled, and the profile says which static arm is the best.
ORDER = (STEERED, STATIC_BEST, ADAPTIVE, OFF)
# Lengths of the day's answers, as shares of those written down.
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)
# Share of the time that is reserved for what no price covers.
RESERVE = 0.04
# The first start may compile kernels that the others find compiled.
_SLOWNESS_MAX = 1.5
# Draft lengths between which SGLang's adaptive mode moves.
_ADAPTIVE_LENGTHS = 3
# Graphs of a draft length at one batch size: verification, draft, draft-extend.
_PASSES = 3


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds that a run's pieces take.

    start: an engine without its graphs: imports, weights, pools, the server.  graph: one capture.
    step: plain decoding of one sequence; sequence: what each sequence more adds to it.  request:
    its prompt, and its client.  profile: beside the budget of `controller profile`.
    """

    sidecar: float
    start: float
    graph: float
    stop: float
    step: float
    sequence: float
    request: float
    profile: float


_LISTED_PRICES = budget.Prices.read()
# The price list of `gpu_check`, which a run on a GPU replaces, and estimates beside it.
_H100 = Prices(
    sidecar=4.0, start=_LISTED_PRICES.launch, graph=_LISTED_PRICES.capture, stop=3.0,
    step=_LISTED_PRICES.decode_pass,
    sequence=5e-5, request=_LISTED_PRICES.request, profile=8.0,
)  # fmt: skip
# Two busy cores, with the small shape and emulated graphs.
_PROCESSOR = Prices(
    sidecar=4.0, start=12.0, graph=0.05, stop=1.0, step=0.03, sequence=0.01, request=0.03,
    profile=6.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DaySetting:
    """The day as it is played with a shape.

    plans, seed: of the stream.  gammas: of the steered engine, 0 included.  graph_sizes: batches
    that all engines capture.  kv_tokens: slots of all engines' caches.
    """

    shape: Shape
    plans: tuple[PhasePlan, ...]
    seed: int
    gammas: tuple[int, ...]
    graph_sizes: tuple[int, ...]
    kv_tokens: int
    prices: Prices

    @property
    def max_batch_size(self) -> int:
        """The most sequences at a time."""
        return max(plan.concurrency for plan in self.plans)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes of the day's requests."""
        return tuple(dict.fromkeys(kind for plan in self.plans for kind in plan.kinds))

    def stream(self, share: float) -> Stream:
        """Builds the day with answers of this share of their lengths."""
        plans = [
            replace(plan, output_tokens=round(share * plan.output_tokens)) for plan in self.plans
        ]
        return build_stream("day", plans, self.seed)

    def warm_up(self) -> Stream:
        """Builds what every engine plays before it counts."""
        return warm_up_stream(self.kinds, self.max_batch_size)


SETTINGS: Mapping[str, DaySetting] = {
    setting.shape.name: setting
    for setting in (
        # The published day, its draft lengths, and room for 128 sequences of twice the mean length.
        DaySetting(
            QWEN3_8B, DAY, DAY_SEED, (0, 1, 2, 3, 4, 5, 7), (1, 2, 4, 8, 16, 32, 64, 128), 65536,
            _H100,
        ),
        DaySetting(
            SMALL,
            (
                PhasePlan("night", ("code",), 1, 2, 48, 32),
                PhasePlan("burst", ("chat", "hard"), 4, 8, 48, 32),
                PhasePlan("collapse", ("unseen",), 2, 4, 48, 32),
            ),
            DAY_SEED, (0, 1, 3), (1, 2, 4), 8192, _PROCESSOR,
        ),
        DaySetting(
            EMULATED,
            (
                PhasePlan("night", ("code",), 1, 2, 24, 16),
                PhasePlan("burst", ("chat", "unseen"), 2, 4, 12, 16),
            ),
            DAY_SEED, (0, 1, 3), (1, 2), 4096, _PROCESSOR,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a run: counts for a reader, and estimated seconds.  policy: "" for none."""

    name: str
    policy: str
    counts: str
    seconds: float


def graphs(policy: str, setting: DaySetting) -> int:
    """Counts the graphs that an engine captures."""
    drafting = {
        OFF: 0,
        ADAPTIVE: _ADAPTIVE_LENGTHS,
        STEERED: sum(gamma > 0 for gamma in setting.gammas),
    }.get(policy, 1)
    plain = policy in (OFF, STEERED)
    return len(setting.graph_sizes) * (_PASSES * drafting + plain)


def start_seconds(policy: str, setting: DaySetting) -> float:
    """Estimates the seconds until an engine serves."""
    return setting.prices.start + setting.prices.graph * graphs(policy, setting)


def play_seconds(stream: Stream, prices: Prices) -> float:
    """Estimates the seconds of a play as those of plain decoding: a useful policy is no slower."""
    seconds = prices.request * stream.requests
    for phase in stream.phases:
        size = phase.concurrency
        seconds += phase.new_tokens / size * (prices.step + prices.sequence * (size - 1))
    return seconds


def pieces(setting: DaySetting, share: float, profile_seconds: float) -> tuple[Piece, ...]:
    """Lists what a run does, in its order."""
    prices, stream, warm_up = setting.prices, setting.stream(share), setting.warm_up()
    planned = [Piece("sidecar", "", "", prices.sidecar)]
    for policy in ORDER:
        captured = f"{graphs(policy, setting)} graphs"
        planned.append(Piece("start", policy, captured, start_seconds(policy, setting)))
        planned.append(Piece("warm up", policy, _counts(warm_up), play_seconds(warm_up, prices)))
        if policy == STEERED:
            arms = f"{len(setting.gammas)} draft lengths"
            planned.append(Piece("profile", policy, arms, profile_seconds + prices.profile))
        planned.append(Piece("play", policy, _counts(stream), play_seconds(stream, prices)))
        planned.append(Piece("stop", policy, "", prices.stop))
    return tuple(planned)


def total(planned: Sequence[Piece]) -> float:
    """Sums the estimated seconds."""
    return sum(piece.seconds for piece in planned)


def largest_share(seconds: float, fixed_seconds: float, full_day_seconds: float) -> float | None:
    """Returns the largest share of the answers' lengths that fits; None if none does.

    seconds: that there are.  fixed_seconds: of them, for everything but plays.  full_day_seconds:
    of all plays with the whole answers.
    """
    available_seconds = seconds * (1.0 - RESERVE) - fixed_seconds
    return next((share for share in SHARES if share * full_day_seconds <= available_seconds), None)


def planned_share(setting: DaySetting, seconds: float, profile_seconds: float) -> float | None:
    """Returns the largest share that fits by the price list."""
    planned = pieces(setting, SHARES[0], profile_seconds)
    plays = sum(piece.seconds for piece in planned if piece.name == "play")
    return largest_share(seconds, total(planned) - plays, plays)


@dataclass(slots=True)
class Forecast:
    """Estimates the remaining work during a run.

    slowness: time of a start on this machine, over that of the price list.
    """

    day: DaySetting
    slowness: float = 1.0

    def record_start(self, policy: str, seconds: float) -> None:
        """Learns from the first start."""
        self.slowness = min(seconds / start_seconds(policy, self.day), _SLOWNESS_MAX)

    def choose_share(self, remaining_seconds: float, day_seconds: float) -> float:
        """Chooses the share of the answers' lengths before the first play.

        remaining_seconds: seconds.  day_seconds: of one play of the whole day.  If none fits, the
        shortest day is chosen, and policies for which there is no time are left out.
        """
        fixed_seconds = sum(
            self.slowness * start_seconds(policy, self.day) + self._warm_up_seconds()
            for policy in ORDER[1:]
        )
        fixed_seconds += len(ORDER) * self.day.prices.stop
        share = largest_share(remaining_seconds, fixed_seconds, len(ORDER) * day_seconds)
        return SHARES[-1] if share is None else share

    def min_seconds(self, policy: str, play_seconds: float) -> float:
        """Estimates an engine's start, warm-up and play, with a start as quick as it may be."""
        start = min(self.slowness, 1.0) * start_seconds(policy, self.day)
        return start + self._warm_up_seconds() + play_seconds

    def _warm_up_seconds(self) -> float:
        return play_seconds(self.day.warm_up(), self.day.prices)


def _counts(stream: Stream) -> str:
    return f"{stream.requests} requests, {stream.tokens} tokens"

"""The stride of online updates, chosen, beside every fixed one: on streams made from the paper.

Test-Time Speculation (arXiv:2605.09329) leaves adapting the stride to future work (appendix C.2).
Here the production core does it on streams made of its tables, with drafters that have nothing to
learn, with batches at which nothing pays, and on all of them one after the other.  The streams
replace the paper's baseline (`stride_simulation`), and those of Table 7 are no test of the core's
prior, which was fitted to that table (`controller.core.training.update_response`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from controller.core.training.stride_planner import STRIDES
from lab.papers.stride_simulation import (
    Earned,
    Stream,
    aligned,
    compute_bound,
    in_hindsight,
    on_one_machine,
    play,
    streams_of_table_3,
    streams_of_table_7,
)
from simulator.process_pool import make_process_pool

# Sequences of each stream when they follow one another.
_MIX_SEQUENCES = 10


@dataclass(frozen=True, slots=True)
class StrideRun:
    """A stream, or several one after the other, once for each seed.

    fixed: stride -> tokens/s over those without updates, mean over seeds and streams.  chosen: the
    same of the core, for each seed.  ratios: the core over the best fixed stride, for each seed.
    """

    name: str
    fixed: Mapping[int, float]
    chosen: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def best(self) -> int:
        """The best fixed stride."""
        return max(self.fixed, key=lambda stride: self.fixed[stride])


@dataclass(frozen=True, slots=True)
class StrideReport:
    """Reports the strides.  single: one stream each; mixes: several, one after the other."""

    single: tuple[StrideRun, ...]
    mixes: tuple[StrideRun, ...]


def streams() -> tuple[Stream, ...]:
    """All streams that are played alone."""
    large, small = streams_of_table_3(), streams_of_table_7()
    easy = [aligned(table[i]) for table in (large, small) for i in (0, 4)]
    return (*large, *small, *easy, compute_bound(large[0]), compute_bound(small[0]))


def mixes() -> tuple[tuple[str, tuple[Stream, ...]], ...]:
    """Streams that follow one another on one machine, those that gain nothing among them."""
    found = []
    for name, table in (("3", streams_of_table_3()), ("7", streams_of_table_7())):
        on_one = on_one_machine(table)
        order = [*on_one[:3], aligned(on_one[0]), *on_one[3:6], compute_bound(on_one[0])]
        order += [*on_one[6:], aligned(on_one[4])]
        short = tuple(replace(s, sequences=min(s.sequences, _MIX_SEQUENCES)) for s in order)
        found.append((f"{name}, one after the other", short))
    return tuple(found)


def reproduce_tts(seeds: Sequence[int], processes: int | None = None) -> StrideReport:
    """Plays all of it; takes minutes."""
    alone = [(stream.name, (stream,)) for stream in streams()]
    together = mixes()
    tasks = [(group, seed) for _, group in (*alone, *together) for seed in seeds]
    with make_process_pool(processes) as pool:
        played = list(pool.map(_played, tasks))
    runs = []
    for i, (name, _) in enumerate((*alone, *together)):
        mine = played[i * len(seeds) : (i + 1) * len(seeds)]
        fixed = {s: sum(found[0][s] for found in mine) / len(mine) for s in STRIDES}
        runs.append(
            StrideRun(
                name,
                fixed,
                tuple(chosen for _, chosen in mine),
                tuple(chosen / max(strides.values()) for strides, chosen in mine),
            )
        )
    return StrideReport(tuple(runs[: len(alone)]), tuple(runs[len(alone) :]))


def _played(task: tuple[tuple[Stream, ...], int]) -> tuple[dict[int, float], float]:
    """Tokens/s over those without updates, mean over the streams: of each stride, and chosen."""
    group, seed = task
    hindsight = {stride: in_hindsight(group, stride, seed) for stride in STRIDES}
    off = hindsight[0]
    return (
        {stride: _over(earned, off) for stride, earned in hindsight.items()},
        _over(play(group, seed), off),
    )


def _over(earned: Sequence[Earned], off: Sequence[Earned]) -> float:
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(earned, off, strict=True)]
    return sum(ratios) / len(ratios)

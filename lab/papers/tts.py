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
    Stream,
    StreamResult,
    aligned_stream,
    average_step_times,
    compute_bound_stream,
    play,
    play_fixed_stride,
    streams_of_table_3,
    streams_of_table_7,
)
from simulator.process_pool import make_process_pool

# Sequences of each stream when they follow one another.
_MIX_SEQUENCES = 10


@dataclass(frozen=True, slots=True)
class StrideRun:
    """A stream, or several one after the other, once for each seed.

    fixed: stride -> tokens/s over those without updates, mean over seeds and streams.
    chosen_rates: the same of the core, for each seed.  ratios: the core over the best fixed stride,
    for each seed.
    """

    name: str
    fixed: Mapping[int, float]
    chosen_rates: tuple[float, ...]
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
    easy = [aligned_stream(table[i]) for table in (large, small) for i in (0, 4)]
    return (*large, *small, *easy, compute_bound_stream(large[0]), compute_bound_stream(small[0]))


def mixes() -> tuple[tuple[str, tuple[Stream, ...]], ...]:
    """Streams that follow one another on one machine, those that gain nothing among them."""
    named_mixes = []
    for name, table in (("3", streams_of_table_3()), ("7", streams_of_table_7())):
        averaged_streams = average_step_times(table)
        order = [
            *averaged_streams[:3],
            aligned_stream(averaged_streams[0]),
            *averaged_streams[3:6],
            compute_bound_stream(averaged_streams[0]),
        ]
        order += [*averaged_streams[6:], aligned_stream(averaged_streams[4])]
        short = tuple(replace(s, sequences=min(s.sequences, _MIX_SEQUENCES)) for s in order)
        named_mixes.append((f"{name}, one after the other", short))
    return tuple(named_mixes)


def reproduce_tts(seeds: Sequence[int], processes: int | None = None) -> StrideReport:
    """Plays all of it; takes minutes."""
    single_streams = [(stream.name, (stream,)) for stream in streams()]
    mixed_streams = mixes()
    tasks = [(group, seed) for _, group in (*single_streams, *mixed_streams) for seed in seeds]
    with make_process_pool(processes) as pool:
        played = list(pool.map(_play_group, tasks))
    runs = []
    for i, (name, _) in enumerate((*single_streams, *mixed_streams)):
        run_results = played[i * len(seeds) : (i + 1) * len(seeds)]
        fixed = {s: sum(result[0][s] for result in run_results) / len(run_results) for s in STRIDES}
        runs.append(
            StrideRun(
                name,
                fixed,
                tuple(chosen_rate for _, chosen_rate in run_results),
                tuple(chosen_rate / max(strides.values()) for strides, chosen_rate in run_results),
            )
        )
    return StrideReport(tuple(runs[: len(single_streams)]), tuple(runs[len(single_streams) :]))


def _play_group(task: tuple[tuple[Stream, ...], int]) -> tuple[dict[int, float], float]:
    """Tokens/s over those without updates, mean over the streams: of each stride, and chosen."""
    group, seed = task
    hindsight = {stride: play_fixed_stride(group, stride, seed) for stride in STRIDES}
    baseline = hindsight[0]
    return (
        {
            stride: _mean_ratio(stride_results, baseline)
            for stride, stride_results in hindsight.items()
        },
        _mean_ratio(play(group, seed), baseline),
    )


def _mean_ratio(results: Sequence[StreamResult], baseline: Sequence[StreamResult]) -> float:
    ratios = [
        a.tokens_per_second / b.tokens_per_second for a, b in zip(results, baseline, strict=True)
    ]
    return sum(ratios) / len(ratios)

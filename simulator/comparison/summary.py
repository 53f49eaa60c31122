"""Makes a report from runs: ratios over paired seeds, with their spread."""

import math
import statistics
from collections.abc import Collection, Sequence

from simulator import results
from simulator.comparison.contestants import OFF, ORACLE, OURS
from simulator.comparison.run import SeedRun
from simulator.scenarios.scenario_file import Scenario

# Student's t, 97.5 %, by degrees of freedom (1, 2, ...); beyond, the normal value is close.
_STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_STUDENT_T_LARGE = 2.1

Interval = tuple[float, float] | None


def summarise(
    scenario: Scenario,
    seeds: Sequence[SeedRun],
    selected: Collection[str] | None = None,
    sustained: Sequence[results.SustainedLoad] = (),
) -> results.ScenarioReport:
    """Makes the report over all seeds, of the wanted policies only if any are named."""
    names = [run.name for run in seeds[0].runs if selected is None or run.name in selected]
    # The single arm that was best over all seeds together.
    best_static = max(
        (run.name for run in seeds[0].runs if run.origin is results.PolicyOrigin.STATIC),
        key=lambda name: sum(math.log(seed.run(name).score) for seed in seeds),
    )
    peers = [
        run.name
        for run in seeds[0].runs
        if run.origin in {results.PolicyOrigin.IMPORTED, results.PolicyOrigin.RESTATED}
    ]
    policies = [_policy(name, seeds, best_static, peers) for name in names]
    policies.sort(key=lambda report: -report.score)
    missing = "".join(f" Left out: {name} ({reason})." for name, reason in seeds[0].missing.items())
    reference_run = next((run for run in seeds[0].runs if run.name == OURS), seeds[0].runs[0])
    return results.ScenarioReport(
        name=scenario.name,
        group=scenario.group,
        description=scenario.description + missing,
        shifting=scenario.shifting,
        steps=reference_run.steps,
        seeds=len(seeds),
        best_static=best_static,
        policies=tuple(policies),
        timeline=next((s.timeline for s in seeds if s.timeline is not None), None),
        open_loop=reference_run.latency is not None,
        sustained=tuple(sustained),
    )


def _policy(
    name: str, seeds: Sequence[SeedRun], best_static: str, peers: Sequence[str]
) -> results.PolicyReport:
    runs = [seed.run(name) for seed in seeds]
    oracle, oracle_ci = _ratio(name, ORACLE, seeds)
    static, static_ci = _ratio(name, best_static, seeds)
    has_off = any(run.name == OFF for run in seeds[0].runs)
    off, off_ci = _ratio(name, OFF, seeds) if has_off else (None, None)
    steps, tokens = sum(run.steps for run in runs), sum(run.tokens for run in runs)
    seconds = sum(run.seconds for run in runs)
    recovery = [value for run in runs for value in run.recovery]
    return results.PolicyReport(
        name=name,
        origin=runs[0].origin,
        score=math.exp(statistics.fmean(math.log(run.score) for run in runs)),
        tokens_per_second=tokens / seconds,
        ratio_to_oracle=oracle,
        ratio_to_best_static=static,
        ratio_to_off=off,
        ratio_to_oracle_ci=oracle_ci,
        ratio_to_best_static_ci=static_ci,
        ratio_to_off_ci=off_ci,
        switches_per_1000_steps=1000 * sum(run.switches for run in runs) / steps,
        recovery_steps=statistics.median(recovery) if recovery else None,
        probe_share=sum(run.probe_share * run.seconds for run in runs) / seconds,
        probe_step_share=sum(run.probe_steps for run in runs) / steps,
        tpot_ms=1e3 * (sum(run.sequence_seconds for run in runs) / tokens),
        decision_microseconds=1e6 * sum(run.decision_seconds for run in runs) / steps,
        latency=_mean_latency([run.latency for run in runs if run.latency is not None]),
        ratio_to_peers={peer: _ratio(name, peer, seeds)[0] for peer in peers if name == OURS},
    )


def _mean_latency(seeds: Sequence[results.Latency]) -> results.Latency | None:
    """Averages every value over the seeds."""
    if not seeds:
        return None

    def mean(spreads: Sequence[results.Spread]) -> results.Spread:
        return results.Spread(
            statistics.fmean(spread.mean for spread in spreads),
            statistics.fmean(spread.p50 for spread in spreads),
            statistics.fmean(spread.p99 for spread in spreads),
        )

    return results.Latency(
        mean([seed.per_token for seed in seeds]),
        mean([seed.tpot for seed in seeds]),
        mean([seed.end_to_end for seed in seeds]),
    )


def _ratio(name: str, baseline: str, seeds: Sequence[SeedRun]) -> tuple[float, Interval]:
    """Returns the geometric mean of score over score, and its 95 % interval (Student, on logs)."""
    logs = [math.log(seed.run(name).score / seed.run(baseline).score) for seed in seeds]
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return math.exp(mean), None
    variance = sum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    degrees = len(logs) - 1
    t = _STUDENT_T[degrees - 1] if degrees <= len(_STUDENT_T) else _STUDENT_T_LARGE
    half_width = t * math.sqrt(variance / len(logs))
    return math.exp(mean), (math.exp(mean - half_width), math.exp(mean + half_width))

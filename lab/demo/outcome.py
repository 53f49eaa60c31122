"""Holds what a demo has measured and computed, and makes the figures, for result.json too."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import OWN, StepCosts
from lab.cpu_engine.pace.step_log import LoggedStep
from lab.demo.exact import ExactPlay
from lab.harness.measured import Spread
from lab.paced.engines import STEERED
from lab.paced.lost_time import LostTime, Oracle
from lab.paced.plays import StreamPlay
from lab.paced.traffic import CLASSES, Stream

# The most steps that are sampled for gamma over time.
_SAMPLES_MAX = 2000


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """Holds all results of one run.

    plays: policy -> its plays, one a repeat, in order; the last policy is the steered one.
    oracles: of the stream of each repeat.  lost_times: of each steered play.  exact: empty where
    the unpaced part was left out.  paced: the costs were imposed; otherwise they were measured, and
    the plays took what they took.
    """

    stream: Stream
    costs: StepCosts
    dilation: float
    oracles: tuple[Oracle, ...]
    plays: Mapping[str, tuple[StreamPlay, ...]]
    lost_times: tuple[LostTime, ...]
    exact: tuple[ExactPlay, ...]
    profile: Mapping[str, Any]
    paced: bool = True

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies in the order of the tables."""
        return tuple(self.plays)

    @property
    def compared_policies(self) -> tuple[str, ...]:
        """Lists the policies that the steered one is compared with."""
        return tuple(policy for policy in self.plays if policy != STEERED)

    def rates(self, policy: str) -> Spread:
        """Tokens per second of the model's time, one for each repeat."""
        return Spread(tuple(play.tokens_per_second for play in self.plays[policy]))

    def phase_rates(self, policy: str, phase: int) -> Spread:
        """The same of one phase, counted from 0."""
        return Spread(tuple(play.phase_rate(phase) for play in self.plays[policy]))

    def ratio(self, policy: str, phase: int | None = None) -> Spread:
        """Tokens/s of the steered engine over another's, repeat by repeat."""
        if phase is None:
            return self.rates(STEERED).ratio_to(self.rates(policy))
        return self.phase_rates(STEERED, phase).ratio_to(self.phase_rates(policy, phase))

    def share_of_oracle(self, policy: str) -> Spread:
        """Tokens/s over those of the best arm of each phase, computed from the costs."""
        best = Spread(tuple(oracle.oracle.rate for oracle in self.oracles))
        return self.rates(policy).ratio_to(best)

    def phase_shares(self, policy: str, phase: int) -> Spread:
        """The same of one phase, counted from 0."""
        best = Spread(tuple(oracle.oracle.phases[phase] for oracle in self.oracles))
        return self.phase_rates(policy, phase).ratio_to(best)

    def time_over_costs(self, policy: str) -> float:
        """Seconds of the decode steps over those by the costs; arms without a cost are left out.

        About 1 where the costs are imposed.  Elsewhere it tells how well the profile fits an
        engine: a gain by this factor is not due to the policy's choices.
        """
        step_seconds = priced_seconds = 0.0
        for play in self.plays[policy]:
            for step in play.decode_steps:
                arm = Arm(step.drafter if step.gamma else OWN, step.gamma)
                if arm in self.costs.surface.arms:
                    warm = bool(step.drafter) and not step.asleep
                    step_seconds += step.seconds
                    priced_seconds += self.costs.decode_seconds(
                        arm, step.batch_size, step.kv_tokens, warm=warm
                    )
        return step_seconds / priced_seconds if priced_seconds else 0.0

    def exactness(self, policy: str) -> bool | None:
        """Whether every token of the unpaced part was plain decoding's; None if it was not run."""
        exact_play = next((play for play in self.exact if play.policy == policy), None)
        return None if exact_play is None else not exact_play.mismatches

    @property
    def all_exact(self) -> bool:
        """Whether no token of the unpaced part differed."""
        return not any(play.mismatches for play in self.exact)


def arm_name(arm: Arm) -> str:
    """Names an arm for a person."""
    return f"{arm.drafter} {arm.gamma}" if arm.gamma else "0"


def as_json(outcome: DemoOutcome) -> dict[str, Any]:
    """The runs, ratios and draft lengths; the caller adds how and where it was run.

    lab/demo/picture.py draws it.
    """
    return {
        "label": _label(outcome),
        "runs": [_run(outcome, policy) for policy in outcome.policies],
        "ratios": {
            f"steered/{policy}": {
                **outcome.ratio(policy).as_json(),
                "phases": [
                    outcome.ratio(policy, number).as_json()
                    for number in range(len(outcome.stream.phases))
                ],
            }
            for policy in outcome.compared_policies
        },
        "oracle": [_oracle(oracle) for oracle in outcome.oracles],
        "lost_time": [
            {name: round(value, 5) for name, value in asdict(lost_time).items()}
            | {"total": round(lost_time.total, 5)}
            for lost_time in outcome.lost_times
        ],
        "exact": [asdict(play) for play in outcome.exact],
        "stream": {
            "name": outcome.stream.name,
            "seeds": [play.stream.seed for play in outcome.plays[STEERED]],
            "phases": [
                {
                    "phase": phase.name,
                    "kinds": list(phase.domains),
                    "concurrency": phase.concurrency,
                    "requests": len(phase.requests),
                    "tokens": phase.new_tokens,
                }
                for phase in outcome.stream.phases
            ],
        },
    }


def _label(outcome: DemoOutcome) -> dict[str, Any]:
    """Says what is imposed, drawn, measured and real, for a reader and for the picture."""
    kinds = sorted({k for phase in outcome.stream.phases for k in phase.domains})
    acceptance_sources = {
        kind: CLASSES[kind].source if kind in CLASSES else "published with the table"
        for kind in kinds
    }
    source = outcome.costs.source
    if not outcome.paced:
        return {
            "title": "Step times are those of this machine; the oracle is computed from the "
            f"{source}.\nAcceptance is drawn from measured curves, alike for all policies.",
            "measured": "the duration of every step: nothing is imposed",
            "oracle": f"computed from the {source}",
            "drawn": acceptance_sources,
            "real": "SGLang with its kernels, graphs and schedule, the shim, the link, the sidecar",
            "time": "",
        }
    return {
        "title": f"Step times are imposed: {source}.\nAcceptance is drawn from measured curves; "
        "scheduler, batching, shim, link and sidecar are real.",
        "imposed": f"the duration of every step: {source}",
        "drawn": acceptance_sources,
        "real": "SGLang's scheduler and batching, the shim, the link, the sidecar, the profile",
        "dilation": outcome.dilation,
        "unit": "tokens/s, seconds and milliseconds are of the model's time",
        "time": "of the model's time",
    }


def _oracle(oracle: Oracle) -> dict[str, Any]:
    return {
        "tokens_per_second": round(oracle.oracle.rate, 2),
        "arms": [arm_name(arm) for arm in oracle.arms],
        "phases": [round(rate, 2) for rate in oracle.oracle.phases],
        "over_best_static": round(oracle.gain, 4),
        "best_static": arm_name(oracle.best_static),
        "statics": {
            arm_name(arm): round(static_result.rate, 2)
            for arm, static_result in oracle.statics.items()
        },
    }


def _run(outcome: DemoOutcome, policy: str) -> dict[str, Any]:
    plays = outcome.plays[policy]
    return {
        "policy": policy,
        "tokens_per_second": round(outcome.rates(policy).median, 2),
        "exact": outcome.exactness(policy),
        "rates": outcome.rates(policy).as_json(),
        "share_of_oracle": outcome.share_of_oracle(policy).as_json(),
        "time_over_costs": round(outcome.time_over_costs(policy), 4),
        "phase_shares": [
            round(outcome.phase_shares(policy, number).median, 4)
            for number in range(len(outcome.stream.phases))
        ],
        "acceptance_length": round(plays[0].acceptance_length, 3),
        "phases": [
            outcome.phase_rates(policy, number).as_json()
            for number in range(len(outcome.stream.phases))
        ],
        "repeats": [_play(play) for play in plays],
    }


def _play(play: StreamPlay) -> dict[str, Any]:
    steps = play.decode_steps
    origin = play.phase_bounds[0][0]
    every = max(1, len(steps) // _SAMPLES_MAX)
    return {
        "tokens_per_second": round(play.tokens_per_second, 2),
        "seconds": round(play.seconds, 3),
        "steps": len(steps),
        "late_share": round(play.late_share, 5),
        "token_milliseconds": {f"p{p}": round(play.token_milliseconds(p), 3) for p in (50, 90, 99)},
        "latency_seconds": {f"p{p}": round(play.latency_seconds(p), 3) for p in (50, 90, 99)},
        "probes": sum(step.probe > 0 for step in steps),
        "switches": sum(_arm(earlier) != _arm(later) for earlier, later in pairwise(steps)),
        "shim_microseconds": round(1e6 * sum(s.shim_seconds for s in steps) / len(steps), 1),
        "unsteered": sum(not step.steered for step in steps),
        "choices": [
            {choice: round(share, 4) for choice, share in play.choices(number).items()}
            for number in range(len(play.stream.phases))
        ],
        "began": [
            round((phase_start - origin) / play.dilation, 3) for phase_start, _ in play.phase_bounds
        ],
        "samples": [_sample(step, play) for step in steps[::every]],
        "probe_samples": [_sample(step, play) for step in steps if step.probe],
    }


def _arm(step: LoggedStep) -> tuple[str, int, bool]:
    return (step.drafter if step.gamma else "", step.gamma, step.asleep)


def _sample(step: LoggedStep, play: StreamPlay) -> list[Any]:
    """Seconds since the stream began, batch size, draft length, drafter."""
    start_seconds = (step.began - play.phase_bounds[0][0]) / play.dilation
    return [round(start_seconds, 3), step.batch_size, step.gamma, step.drafter]

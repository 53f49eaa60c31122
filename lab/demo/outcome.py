"""Holds what a demo has measured and computed, and makes the figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import OWN, StepCosts
from lab.demo.exact import ExactPlay
from lab.harness.measured import Spread
from lab.paced.engines import STEERED
from lab.paced.lost_time import LostTime, Oracle
from lab.paced.plays import StreamPlay
from lab.paced.traffic import Stream


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """Everything of one run.

    plays: policy -> its plays, one a repeat, in order; the last policy is the steered one.
    oracles: of the stream of each repeat.  lost: of each steered play.  exact: empty where the
    unpaced part was left out.  paced: the costs were imposed; otherwise they were measured, and
    the plays took what they took.
    """

    stream: Stream
    costs: StepCosts
    dilation: float
    oracles: tuple[Oracle, ...]
    plays: Mapping[str, tuple[StreamPlay, ...]]
    lost: tuple[LostTime, ...]
    exact: tuple[ExactPlay, ...]
    profile: Mapping[str, Any]
    paced: bool = True

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies in the order of the tables."""
        return tuple(self.plays)

    @property
    def others(self) -> tuple[str, ...]:
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
            pairs = zip(self.rates(STEERED).values, self.rates(policy).values, strict=True)
        else:
            pairs = zip(
                self.phase_rates(STEERED, phase).values,
                self.phase_rates(policy, phase).values,
                strict=True,
            )
        return Spread(tuple(ours / theirs for ours, theirs in pairs))

    def share_of_oracle(self, policy: str) -> Spread:
        """Tokens/s over those of the best arm of each phase, computed from the costs."""
        pairs = zip(self.rates(policy).values, self.oracles, strict=True)
        return Spread(tuple(rate / oracle.oracle.rate for rate, oracle in pairs))

    def phase_shares(self, policy: str, phase: int) -> Spread:
        """The same of one phase, counted from 0."""
        pairs = zip(self.phase_rates(policy, phase).values, self.oracles, strict=True)
        return Spread(tuple(rate / oracle.oracle.phases[phase] for rate, oracle in pairs))

    def time_over_costs(self, policy: str) -> float:
        """Seconds of the decode steps over what the costs say of them; arms without one left out.

        About 1 where the costs are imposed.  Elsewhere it tells how far the profile holds for an
        engine: what a policy gains by it, it does not owe to its choices.
        """
        took = priced = 0.0
        for play in self.plays[policy]:
            for step in play.decode_steps:
                arm = Arm(step.drafter if step.gamma else OWN, step.gamma)
                if arm in self.costs.surface.arms:
                    warm = bool(step.drafter) and not step.asleep
                    took += step.seconds
                    priced += self.costs.decode_seconds(
                        arm, step.batch_size, step.kv_tokens, warm=warm
                    )
        return took / priced if priced else 0.0

    def exactness(self, policy: str) -> bool | None:
        """Whether every token of the unpaced part was plain decoding's; None if it was not run."""
        found = next((play for play in self.exact if play.policy == policy), None)
        return None if found is None else not found.mismatches

    @property
    def all_exact(self) -> bool:
        """Whether no token of the unpaced part differed."""
        return not any(play.mismatches for play in self.exact)


def arm_name(arm: Arm) -> str:
    """Names an arm for a person."""
    return f"{arm.drafter} {arm.gamma}" if arm.gamma else "0"

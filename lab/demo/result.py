"""Turns the outcome into the numbers of build/demo/result.json."""

from dataclasses import asdict
from typing import Any

from lab.demo.compare import DemoOutcome, PolicyPlays, choice_shares
from lab.harness.load_generator import Play, acceptance_length


def as_json(outcome: DemoOutcome) -> dict[str, Any]:
    """The runs, ratios and draft lengths; the caller adds how and where it was run."""
    return {
        "runs": [_run(outcome, policy) for policy in outcome.policies],
        "ratios": {
            f"{outcome.steered.policy}/{other.policy}": {
                **outcome.ratio(other).as_json(),
                "phases": [
                    outcome.ratio(other, number).as_json() for number in range(len(outcome.stream))
                ],
            }
            for other in outcome.others
        },
        "gamma": {
            "sampled_hz": 10,
            "shares": _rounded(choice_shares([s for samples in outcome.watched for s in samples])),
            "repeats": [
                {
                    "phases": [
                        _rounded(choice_shares(outcome.samples_of(repeat, number)))
                        for number in range(len(outcome.stream))
                    ],
                    "samples": [
                        [
                            round(s.at - outcome.steered.plays[repeat].phases[0].started, 3),
                            s.batch_size,
                            s.gamma,
                            s.drafter,
                        ]
                        for s in samples
                    ],
                    "probes": sum(s.probe for s in samples),
                    "unsteered": sum(s.unsteered for s in samples),
                }
                for repeat, samples in enumerate(outcome.watched)
            ],
        },
        "static_selection": _selection(outcome),
        "stream": [
            {
                "phase": phase.name,
                "domain": phase.domain,
                "concurrency": phase.concurrency,
                "requests": len(phase.requests),
                "tokens": phase.new_tokens,
            }
            for phase in outcome.stream
        ],
    }


def _run(outcome: DemoOutcome, policy: PolicyPlays) -> dict[str, Any]:
    return {
        "policy": policy.policy,
        "tokens_per_second": round(policy.tokens_per_second().median, 2),
        "exact": outcome.exact(policy),
        "acceptance_length": round(acceptance_length(policy.answers), 3),
        "acceptance_length_by_domain": {
            domain: round(value, 3) for domain, value in policy.acceptance_by_domain().items()
        },
        "phases": [
            policy.tokens_per_second(number).as_json() for number in range(len(outcome.stream))
        ],
        "repeats": [_repeat(outcome, play) for play in policy.plays],
    }


def _selection(outcome: DemoOutcome) -> dict[str, Any] | None:
    selection = outcome.selection
    if selection is None:
        return None
    return {
        "gamma": selection.gamma,
        "tokens_per_second": {
            str(gamma): [round(play.tokens_per_second, 2) for play in plays]
            for gamma, plays in selection.plays.items()
        },
        "hindsight_tokens_per_second": round(selection.hindsight, 2),
        "phases": {
            str(gamma): [
                round(selection.rate(gamma, number), 2) for number in range(len(outcome.stream))
            ]
            for gamma in selection.plays
        },
    }


def _repeat(outcome: DemoOutcome, play: Play) -> dict[str, Any]:
    wrong = outcome.mismatches(play)
    return {
        "tokens_per_second": round(play.tokens_per_second, 2),
        "seconds": round(play.seconds, 3),
        "foreign_cores": round(play.foreign_cores, 2),
        "lost_requests": list(play.lost),
        "exact": not wrong,
        "mismatches": [asdict(mismatch) for mismatch in wrong],
        "phases": [
            {
                "seconds": round(phase.seconds, 3),
                "tokens_per_second": round(phase.tokens_per_second, 2),
                "acceptance_length": round(acceptance_length(phase.answers), 3),
            }
            for phase in play.phases
        ],
    }


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {choice: round(share, 4) for choice, share in shares.items()}

"""The unpaced part: the small trained models, and every token compared with plain decoding.

The steered engine has two drafters, and its arm is changed at random while it answers.  Everything
runs in float32 and greedily (in bfloat16 even SGLang's own speculation differs from plain decoding
by rounding), and no step is held to any pace.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from lab.cpu_engine.engine_command import MODELS, engine_command
from lab.cpu_engine.forking import popen
from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.harness.engine_environment import steered_by
from lab.harness.engines import Harness, Workplace, launch_engine
from lab.harness.load_generator import Answer, StreamPhase, StreamRequest, acceptance_length
from lab.harness.random_arms import RandomArms
from lab.harness.sidecar import SidecarHandle
from lab.harness.terminal import Terminal
from lab.paced.engines import STEERED, is_steered, speculation_flags

GAMMAS = (0, 1, 2, 3, 5, 7)
ARMS = (
    *(("eagle3", gamma) for gamma in GAMMAS),
    *(("dflash", gamma) for gamma in GAMMAS if gamma),
)
_MAX_BATCH = 8
_PROMPT_TOKENS, _NEW_TOKENS = 48, 40
# Concurrent requests in each phase.
_CONCURRENCY = (1, 8)
_READY_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token in which an answer differs from plain decoding's."""

    request: int
    position: int
    expected: int
    actual: int


@dataclass(frozen=True, slots=True)
class ExactPlay:
    """One policy's answers, compared with plain decoding's.

    arms: what the steered engine ran meanwhile, as "DRAFTER GAMMA".
    """

    policy: str
    tokens: int
    acceptance_length: float
    mismatches: tuple[Mismatch, ...]
    arms: tuple[str, ...] = ()


def build_stream(seed: int) -> tuple[StreamPhase, ...]:
    """Builds prompts of every domain, alone and eight at a time; equal seeds give equal streams."""
    rng = np.random.default_rng(seed)
    prompts = {
        domain: iter(held_out_prompts(domain, 1 + sum(_CONCURRENCY), _PROMPT_TOKENS, seed))
        for domain in DOMAINS
    }
    phases = []
    index = 0
    for concurrency in _CONCURRENCY:
        domains = list(DOMAINS) * max(1, concurrency // len(DOMAINS))
        rng.shuffle(domains)
        requests = []
        for domain in domains:
            prompt = tuple(next(prompts[domain]))[:_PROMPT_TOKENS]
            requests.append(StreamRequest(index, domain, prompt, _NEW_TOKENS))
            index += 1
        phases.append(StreamPhase(f"×{concurrency}", concurrency, tuple(requests)))
    return tuple(phases)


def run(
    policies: Sequence[str], place: Workplace, terminal: Terminal, seed: int
) -> tuple[ExactPlay, ...]:
    """Plays the prompts on an engine of each policy; the first one is plain decoding.

    Raises HarnessError.
    """
    with ExitStack() as stack:
        part = _ExactPart(place, terminal, stack)
        part.start(policies)
        stream = build_stream(seed)
        expected = part.answers(policies[0], stream)
        return tuple(part.compare(policy, stream, expected, seed) for policy in policies)


class _ExactPart(Harness):
    """A sidecar and one engine a policy, of the small trained models."""

    def __init__(self, place: Workplace, terminal: Terminal, stack: ExitStack) -> None:
        super().__init__(place, terminal, stack)
        self._sidecar = stack.enter_context(SidecarHandle(place.address, STEERED))

    def start(self, policies: Sequence[str]) -> None:
        """Starts everything side by side, and waits for it."""
        with self._terminal.show_progress("engines with the small trained models, without a pace"):
            self._start_sidecar(self._sidecar)
            for policy in policies:
                self._register_engine(
                    launch_engine(
                        policy,
                        lambda port, policy=policy: engine_command(  # type: ignore[misc]
                            port, _MAX_BATCH, speculation_flags(policy, MODELS / "draft-mixed")
                        ),
                        environment(policy, self._place),
                        self._place,
                        popen,
                    )
                )
            for policy in policies:
                sidecar = self._sidecar if is_steered(policy) else None
                self._engines[policy].wait_ready(_READY_SECONDS, sidecar=sidecar)

    def answers(self, policy: str, stream: Sequence[StreamPhase]) -> tuple[Answer, ...]:
        """Plays the prompts."""
        return self._play(policy, stream, f"{policy}, unpaced").answers

    def compare(
        self, policy: str, stream: Sequence[StreamPhase], expected: Sequence[Answer], seed: int
    ) -> ExactPlay:
        """Plays the prompts and compares every token; the steered engine changes its arm."""
        if not is_steered(policy):
            return compare_answers(policy, expected, self.answers(policy, stream), ())
        with self._sidecar.pinned(3) as pin, RandomArms(pin, ARMS, seed):
            answers = self.answers(policy, stream)
        arms = dict.fromkeys(f"{r.drafter} {r.gamma}" if r.gamma else "0" for r in pin.reports)
        return compare_answers(policy, expected, answers, tuple(sorted(arms)))


def environment(policy: str, place: Workplace) -> dict[str, str]:
    """Makes the variables of an engine; only the steered one gets the sidecar's address."""
    if not is_steered(policy):
        return {}
    second = {"SPECULATION_DFLASH_MODEL_PATH": str(MODELS / "dflash")}
    return steered_by(place.address, STEERED, GAMMAS) | second


def compare_answers(
    policy: str, expected: Sequence[Answer], answers: Sequence[Answer], arms: tuple[str, ...]
) -> ExactPlay:
    """Compares answers token by token with those expected, of the same requests in order."""
    mismatches = []
    for expected_answer, answer in zip(expected, answers, strict=True):
        pairs = enumerate(zip(expected_answer.tokens, answer.tokens, strict=True))
        first = next(((position, a, b) for position, (a, b) in pairs if a != b), None)
        if first is not None:
            mismatches.append(Mismatch(expected_answer.request.index, *first))
    tokens = sum(len(answer.tokens) for answer in answers)
    return ExactPlay(policy, tokens, acceptance_length(answers), tuple(mismatches), arms)

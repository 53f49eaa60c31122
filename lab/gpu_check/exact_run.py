"""Runs the part `exact`: plain decoding, then the same prompts under random arms."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lab.gpu_check import exact
from lab.gpu_check.exact import ARMS, EXACT, NO_OVERLAP, PLAIN, Difference
from lab.harness.errors import HarnessError
from lab.harness.load_generator import Answer, Play
from lab.harness.random_arms import RandomArms
from lab.harness.sidecar import SidecarHandle
from lab.harness.stream import StreamPhase

# Plays a stream on the engine of a policy.
Player = Callable[[str, Sequence[StreamPhase], str], Play]

_SEED = 11


def steered_policies(*, on_cpu: bool) -> tuple[str, ...]:
    """Names the engines to compare; on a CPU SGLang has no overlap schedule to turn off."""
    return (EXACT,) if on_cpu else (EXACT, NO_OVERLAP)


class Comparison:
    """Compares engines with plain decoding's answers to one stream.

    play: plays a stream on an engine.  plain_url: of plain decoding.
    """

    def __init__(self, play: Player, plain_url: str, stream: Sequence[StreamPhase]) -> None:
        self._play = play
        self._url = plain_url
        self._stream = stream
        self._expected = play(PLAIN, stream, "plain decoding").answers
        self._found: list[Difference] = []
        self._ran: dict[str, None] = {}
        self._tokens = 0

    def compare(self, policy: str, sidecar: SidecarHandle, plays: int) -> None:
        """Plays the stream `plays` times, each with another order of arms."""
        drafter, gamma = ARMS[-1]
        for number in range(plays):
            with sidecar.pinned(gamma, drafter) as pin:
                with RandomArms(pin, ARMS, _SEED + number):
                    played = self._play(policy, self._stream, f"{policy}: random arms")
                ran = dict.fromkeys(f"{r.drafter} {r.gamma}" for r in pin.reports)
            if not ran:
                raise HarnessError(f"{policy} reported no step while its arms were being changed")
            self._ran |= ran
            self._tokens += sum(len(answer.tokens) for answer in played.answers)
            found = self._differences(policy, played.answers, f"one of {', '.join(ran)}")
            if found and not self._found:
                found[0] = replace(found[0], arm=self._culprits(policy, sidecar, found[0]))
            self._found += found

    def document(self) -> dict[str, Any]:
        """Returns the findings as plain values."""
        return exact.verdict(self._found, self._tokens, sorted(self._ran))

    def _differences(self, policy: str, found: Sequence[Answer], arm: str) -> list[Difference]:
        wanted = {answer.request.index for answer in found}
        expected = [answer for answer in self._expected if answer.request.index in wanted]
        return exact.differences(
            policy, expected, found, lambda context: exact.top_two(self._url, context), arm
        )

    def _culprits(self, policy: str, sidecar: SidecarHandle, first: Difference) -> str:
        """Names the arms that differ at the same place when each answers the prompt alone.

        Reports do not name requests, so what ran at a token of a batch cannot be looked up.
        """
        request = next(
            answer.request for answer in self._expected if answer.request.index == first.prompt
        )
        stream = [StreamPhase("again", request.domain, 1, (request,))]
        again = []
        for drafter, gamma in ARMS:
            with sidecar.pinned(gamma, drafter):
                played = self._play(policy, stream, f"{policy}: {drafter} {gamma} again")
            if self._differences(policy, played.answers, ""):
                again.append(f"{drafter} {gamma}")
        return ", ".join(again) + " (each when alone)" if again else f"{first.arm}; none alone"

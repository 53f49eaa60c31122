"""Compares every token of the small trained models under random arms with plain decoding's.

In float32, with CUDA graphs, with and without the overlap schedule where SGLang has one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lab.gpu_check import comparison, small_engines
from lab.gpu_check.budget import Work
from lab.gpu_check.check import Arm, Check
from lab.gpu_check.comparison import Difference
from lab.gpu_check.parts.part import Document, Part
from lab.gpu_check.plan import Planner
from lab.gpu_check.small_engines import PLAIN
from lab.harness.errors import HarnessError
from lab.harness.load_generator import Answer, Play, StreamPhase
from lab.harness.random_arms import RandomArms
from lab.harness.sidecar import SidecarHandle

# Plays a stream on the engine of a policy.
Player = Callable[[str, Sequence[StreamPhase], str], Play]

_SEED = 11


class ExactPart(Part):
    """Compares every token with plain decoding's."""

    KEY = "exact"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        sizes = planner.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        work = planner.play(stream)
        for policy in small_engines.compared_policies(planner.device, planner.scale):
            work += planner.only(PLAIN, policy) + planner.play(stream).times(sizes.plays)
        return work

    def run(self, check: Check) -> None:
        """Plays the prompts on each engine while its arms change at random."""
        check.terminal.heading("Tokens under random arms, against plain decoding")
        sizes = check.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        found = None
        for policy in small_engines.compared_policies(check.options.device, check.scale):
            check.only(PLAIN, policy)
            if found is None:
                found = Comparison(
                    check.play, check.url(PLAIN), stream, small_engines.arms(check.options.device)
                )
            for number in range(sizes.plays):
                found.compare(policy, check.sidecar(policy), number)
                check.document[self.KEY] = found.document()
                check.save()

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict and the counts."""
        exact = document[self.KEY]
        details = (
            f"{exact['tokens']} tokens, {len(exact['arms'])} arms, {exact['wrong']} wrong, "
            f"{exact['rounding']} near-ties that rounding decided"
        )
        return "FAILED" if exact["wrong"] else "passed", details

    def problems(self, document: Document) -> list[str]:
        """Lists the wrong tokens."""
        return comparison.wrong_sentences(document[self.KEY]["differences"])


class Comparison:
    """Compares engines with plain decoding's answers to one stream.

    play: plays a stream on an engine.  plain_url: of plain decoding.  arms: to change between.
    """

    def __init__(
        self, play: Player, plain_url: str, stream: Sequence[StreamPhase], arms: Sequence[Arm]
    ) -> None:
        self._play = play
        self._arms = arms
        self._url = plain_url
        self._stream = stream
        self._expected = play(PLAIN, stream, "plain decoding").answers
        self._found: list[Difference] = []
        self._ran: dict[str, None] = {}
        self._tokens = 0

    def compare(self, policy: str, sidecar: SidecarHandle, number: int) -> None:
        """Plays the stream once; number: of the order of arms."""
        drafter, gamma = self._arms[-1]
        with sidecar.pinned(gamma, drafter) as pin:
            with RandomArms(pin, self._arms, _SEED + number):
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
        return {
            "tokens": self._tokens,
            "arms": sorted(self._ran),
            "wrong": sum(one.verdict == comparison.WRONG for one in self._found),
            "rounding": sum(one.verdict == comparison.ROUNDING for one in self._found),
            "differences": [one.as_json() for one in self._found],
        }

    def _differences(self, policy: str, found: Sequence[Answer], arm: str) -> list[Difference]:
        wanted = {answer.request.index for answer in found}
        expected = [answer for answer in self._expected if answer.request.index in wanted]
        return comparison.differences(
            policy, expected, found, lambda context: comparison.top_two(self._url, context), arm
        )

    def _culprits(self, policy: str, sidecar: SidecarHandle, first: Difference) -> str:
        """Names the arms that differ at the same place when each answers the prompt alone.

        Reports do not name requests, so what ran at a token of a batch cannot be looked up.
        """
        request = next(
            answer.request for answer in self._expected if answer.request.index == first.prompt
        )
        stream = [StreamPhase("again", 1, (request,))]
        again = []
        for drafter, gamma in self._arms:
            with sidecar.pinned(gamma, drafter):
                played = self._play(policy, stream, f"{policy}: {drafter} {gamma} again")
            if self._differences(policy, played.answers, ""):
                again.append(f"{drafter} {gamma}")
        return ", ".join(again) + " (each when alone)" if again else f"{first.arm}; none alone"

"""Compares tokens of the small trained models under random arms with plain decoding's.

In float32 every token, with CUDA graphs, with and without the overlap schedule where SGLang has
one.  In bfloat16 the products of a verification round otherwise than those of a decode step, so
answers differ under any speculation: they are counted with and without the plugin, which must not
add to that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lab.gpu_check import comparison, small_engines
from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Arm, Check
from lab.gpu_check.comparison import Difference
from lab.gpu_check.parts.part import Document, Part, table
from lab.gpu_check.small_engines import (
    EXACT_BFLOAT16,
    FIXED_BFLOAT16,
    PLAIN,
    PLAIN_BFLOAT16,
    STARTUP_GAMMA,
)
from lab.harness.errors import HarnessError
from lab.harness.load_generator import Answer, Play, StreamPhase
from lab.harness.random_arms import RandomArms
from lab.harness.sidecar import SidecarHandle

# Plays a stream on the engine of a policy.
Player = Callable[[str, Sequence[StreamPhase], str], Play]

_SEED = 11
_ROUNDING_SEED = 31
_WORDS = {
    PLAIN_BFLOAT16: "plain decoding, a second time",
    FIXED_BFLOAT16: f"SGLang's own γ = {STARTUP_GAMMA}, without the plugin",
    EXACT_BFLOAT16: "random arms, with the plugin",
}


class ExactPart(Part):
    """Compares every token with plain decoding's."""

    KEY = "exact"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        sizes = planner.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        work = planner.play(stream)
        for engine_name in small_engines.compared_policies(planner.device, planner.scale):
            work += planner.count_starts(PLAIN, engine_name) + planner.play(stream).multiply(
                sizes.plays
            )
        return work

    def run(self, check: Check) -> None:
        """Plays the prompts on each engine while its arms change at random."""
        check.terminal.heading("Tokens under random arms, against plain decoding")
        sizes = check.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        comparer = None
        for engine_name in small_engines.compared_policies(check.options.device, check.scale):
            check.run_only(PLAIN, engine_name)
            if comparer is None:
                comparer = Comparison(
                    check.play, check.url(PLAIN), stream, small_engines.arms(check.options.device)
                )
            for number in range(sizes.plays):
                comparer.compare(engine_name, check.sidecar(engine_name), number)
                check.document[self.KEY] = comparer.document()
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
        self._all_differences: list[Difference] = []
        self._arms_run: dict[str, None] = {}
        self._tokens = 0

    def compare(self, engine_name: str, sidecar: SidecarHandle, number: int) -> None:
        """Plays the stream once; number: of the order of arms."""
        drafter, gamma = self._arms[-1]
        with sidecar.pinned(gamma, drafter) as pin:
            with RandomArms(pin, self._arms, _SEED + number):
                played = self._play(engine_name, self._stream, f"{engine_name}: random arms")
            arms_run = dict.fromkeys(f"{r.drafter} {r.gamma}" for r in pin.reports)
        if not arms_run:
            raise HarnessError(f"{engine_name} reported no step while its arms were being changed")
        self._arms_run |= arms_run
        self._tokens += sum(len(answer.tokens) for answer in played.answers)
        differences = self._compare_answers(
            engine_name, played.answers, f"one of {', '.join(arms_run)}"
        )
        if differences and not self._all_differences:
            differences[0] = replace(
                differences[0], arm=self._find_failing_arms(engine_name, sidecar, differences[0])
            )
        self._all_differences += differences

    def document(self) -> dict[str, Any]:
        """Returns the findings as plain values."""
        return {
            "tokens": self._tokens,
            "arms": sorted(self._arms_run),
            "wrong": sum(
                difference.verdict == comparison.WRONG for difference in self._all_differences
            ),
            "rounding": sum(
                difference.verdict == comparison.ROUNDING for difference in self._all_differences
            ),
            "differences": [difference.as_json() for difference in self._all_differences],
        }

    def _compare_answers(
        self, engine_name: str, answers: Sequence[Answer], arm: str
    ) -> list[Difference]:
        indexes = {answer.request.index for answer in answers}
        expected = [answer for answer in self._expected if answer.request.index in indexes]
        return comparison.find_differences(
            engine_name,
            expected,
            answers,
            lambda context: comparison.top_two(self._url, context),
            arm,
        )

    def _find_failing_arms(
        self, engine_name: str, sidecar: SidecarHandle, first: Difference
    ) -> str:
        """Names the arms that differ at the same place when each answers the prompt alone.

        Reports do not name requests, so what ran at a token of a batch cannot be looked up.
        """
        request = next(
            answer.request for answer in self._expected if answer.request.index == first.prompt
        )
        stream = [StreamPhase("again", 1, (request,))]
        failing_arms = []
        for drafter, gamma in self._arms:
            with sidecar.pinned(gamma, drafter):
                played = self._play(engine_name, stream, f"{engine_name}: {drafter} {gamma} again")
            if self._compare_answers(engine_name, played.answers, ""):
                failing_arms.append(f"{drafter} {gamma}")
        return (
            ", ".join(failing_arms) + " (each when alone)"
            if failing_arms
            else f"{first.arm}; none alone"
        )


class RoundingPart(Part):
    """Counts the answers that differ in bfloat16."""

    KEY = "rounding"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        sizes = planner.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        work = planner.count_starts(PLAIN_BFLOAT16, FIXED_BFLOAT16) + planner.play(stream).multiply(
            2
        )
        work += planner.play(stream).multiply(sizes.plays)
        return (
            work + planner.count_starts(EXACT_BFLOAT16) + planner.play(stream).multiply(sizes.plays)
        )

    def run(self, check: Check) -> None:
        """Plays the prompts on each engine and counts the answers that differ."""
        check.terminal.heading("bfloat16: answers that differ from plain decoding")
        sizes = check.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        check.run_only(PLAIN_BFLOAT16, FIXED_BFLOAT16)
        expected = check.play(PLAIN_BFLOAT16, stream, "plain decoding").answers
        counts = check.document.setdefault(self.KEY, {})
        repeated_answers = check.play(PLAIN_BFLOAT16, stream, "plain decoding again").answers
        counts[PLAIN_BFLOAT16] = count_differing(expected, [repeated_answers])
        fixed = [check.play(FIXED_BFLOAT16, stream).answers for _ in range(sizes.plays)]
        counts[FIXED_BFLOAT16] = count_differing(expected, fixed)
        check.save()
        check.run_only(EXACT_BFLOAT16)
        arms = small_engines.arms(check.options.device)
        drafter, gamma = arms[-1]
        plays = []
        for number in range(sizes.plays):
            with (
                check.sidecar(EXACT_BFLOAT16).pinned(gamma, drafter) as pin,
                RandomArms(pin, arms, _ROUNDING_SEED + number),
            ):
                plays.append(check.play(EXACT_BFLOAT16, stream, "random arms").answers)
        counts[EXACT_BFLOAT16] = count_differing(expected, plays)

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the shares."""
        counts = document[self.KEY]
        return "measured", "; ".join(
            f"{_WORDS[engine_name]}: {answer_counts['differing']} of {answer_counts['answers']} "
            "answers differ"
            for engine_name, answer_counts in counts.items()
        )

    def sections(self, document: Document) -> list[str]:
        """Makes a table of the shares."""
        rows = [
            [_WORDS[engine_name], str(answer_counts["answers"]), str(answer_counts["differing"]),
             f"{answer_counts['differing'] / answer_counts['answers']:.3f}"]
            for engine_name, answer_counts in document[self.KEY].items()
        ]  # fmt: skip
        title = "bfloat16, answers that differ from plain decoding's:"
        return [f"{title}\n\n" + table(["engine", "answers", "differ", "share"], rows)]


def count_differing(
    expected: Sequence[Answer], plays: Sequence[Sequence[Answer]]
) -> dict[str, int]:
    """Counts answers, and those that differ anywhere from plain decoding's."""
    pairs = [
        (reference.tokens, actual.tokens)
        for play in plays
        for reference, actual in zip(expected, play, strict=True)
    ]
    return {
        "answers": len(pairs),
        "differing": sum(reference != actual for reference, actual in pairs),
    }

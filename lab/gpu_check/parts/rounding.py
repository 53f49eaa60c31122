"""Counts answers that differ from plain decoding's in bfloat16, with and without the plugin.

In bfloat16 the products of a verification round otherwise than those of a decode step, so answers
differ under any speculation.  The plugin must not add to that.
"""

from collections.abc import Sequence

from lab.gpu_check import comparison, small_engines
from lab.gpu_check.budget import Work
from lab.gpu_check.check import Check
from lab.gpu_check.parts.part import Document, Part
from lab.gpu_check.plan import Planner
from lab.gpu_check.small_engines import (
    EXACT_BFLOAT16,
    FIXED_BFLOAT16,
    PLAIN_BFLOAT16,
    STARTUP_GAMMA,
)
from lab.gpu_check.tables import table
from lab.harness.load_generator import Answer
from lab.harness.random_arms import RandomArms

_SEED = 31
_WORDS = {
    PLAIN_BFLOAT16: "plain decoding, a second time",
    FIXED_BFLOAT16: f"SGLang's own γ = {STARTUP_GAMMA}, without the plugin",
    EXACT_BFLOAT16: "random arms, with the plugin",
}


class RoundingPart(Part):
    """Counts the answers that differ in bfloat16."""

    KEY = "rounding"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        sizes = planner.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        work = planner.only(PLAIN_BFLOAT16, FIXED_BFLOAT16) + planner.play(stream).times(2)
        work += planner.play(stream).times(sizes.plays)
        return work + planner.only(EXACT_BFLOAT16) + planner.play(stream).times(sizes.plays)

    def run(self, check: Check) -> None:
        """Plays the prompts on each engine and counts the answers that differ."""
        check.terminal.heading("bfloat16: answers that differ from plain decoding")
        sizes = check.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        check.only(PLAIN_BFLOAT16, FIXED_BFLOAT16)
        expected = check.play(PLAIN_BFLOAT16, stream, "plain decoding").answers
        counts = check.document.setdefault(self.KEY, {})
        again = check.play(PLAIN_BFLOAT16, stream, "plain decoding again").answers
        counts[PLAIN_BFLOAT16] = count_differing(expected, [again])
        fixed = [check.play(FIXED_BFLOAT16, stream).answers for _ in range(sizes.plays)]
        counts[FIXED_BFLOAT16] = count_differing(expected, fixed)
        check.save()
        check.only(EXACT_BFLOAT16)
        arms = small_engines.arms(check.options.device)
        drafter, gamma = arms[-1]
        plays = []
        for number in range(sizes.plays):
            with (
                check.sidecar(EXACT_BFLOAT16).pinned(gamma, drafter) as pin,
                RandomArms(pin, arms, _SEED + number),
            ):
                plays.append(check.play(EXACT_BFLOAT16, stream, "random arms").answers)
        counts[EXACT_BFLOAT16] = count_differing(expected, plays)

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the shares."""
        counts = document[self.KEY]
        return "measured", "; ".join(
            f"{_WORDS[policy]}: {found['differing']} of {found['answers']} answers differ"
            for policy, found in counts.items()
        )

    def sections(self, document: Document) -> list[str]:
        """Makes a table of the shares."""
        rows = [
            [_WORDS[policy], str(found["answers"]), str(found["differing"]),
             f"{found['differing'] / found['answers']:.3f}"]
            for policy, found in document[self.KEY].items()
        ]  # fmt: skip
        title = "bfloat16, answers that differ from plain decoding's:"
        return [f"{title}\n\n" + table(["engine", "answers", "differ", "share"], rows)]


def count_differing(
    expected: Sequence[Answer], plays: Sequence[Sequence[Answer]]
) -> dict[str, int]:
    """Counts answers, and those that differ anywhere from plain decoding's."""
    pairs = [
        (right.tokens, ours.tokens)
        for play in plays
        for right, ours in zip(expected, play, strict=True)
    ]
    return {"answers": len(pairs), "differing": sum(right != ours for right, ours in pairs)}

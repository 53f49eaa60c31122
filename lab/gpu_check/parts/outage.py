"""Kills the sidecar while the engine answers, and starts it again.

Every request is answered with plain decoding's tokens.  The engine continues unsteered, and is
steered again after the restart.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.gpu_check import comparison
from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Check
from lab.gpu_check.comparison import Difference
from lab.gpu_check.parts.part import Document, Part
from lab.gpu_check.small_engines import EXACT, PLAIN
from lab.harness.background_thread import BackgroundThread
from lab.harness.errors import HarnessError
from lab.harness.load_generator import Answer, Play

# Plays of the stream that an outage takes, for the plan: before, during and after it.
_PLAYS = 6
# Longer than a lease and its grace, and than an agent waits before it dials again.
_MAX_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.1


class OutagePart(Part):
    """Kills the sidecar under load, and brings it back."""

    KEY = "outage"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        sizes = planner.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        return planner.count_starts(PLAIN, EXACT) + planner.play(stream).multiply(_PLAYS + 1)

    def run(self, check: Check) -> None:
        """Kills the sidecar once it steers, waits until the engine notices, and starts it again."""
        check.terminal.heading("The sidecar is killed, and comes back")
        sizes = check.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        check.run_only(PLAIN, EXACT)
        expected = check.play(PLAIN, stream, "plain decoding").answers
        with (
            check.terminal.show_progress("requests without a pause") as work,
            RepeatedPlay(lambda: check.play_silently(EXACT, stream)) as player,
        ):
            wait_until(check, lambda: _is_steered(check), player, "the engine is steered")
            status_before = check.status(EXACT)
            check.kill_sidecar()
            killed = time.monotonic()
            wait_until(check, lambda: not _is_steered(check), player, "the engine noticed")
            noticed = time.monotonic()
            status_during = check.status(EXACT)
            check.restart_sidecar()
            wait_until(check, lambda: _is_steered(check), player, "the engine is steered again")
            work.result = "steered again"
            steered_again = time.monotonic()
        status_after = check.status(EXACT)
        for played in player.plays:
            check.count(played)
        plain = check.url(PLAIN)
        check.document[self.KEY] = _document(
            expected, player.plays, lambda context: comparison.top_two(plain, context)
        ) | {
            "seconds_until_unsteered": round(noticed - killed, 2),
            "seconds_until_steered": round(steered_again - noticed, 2),
            "source_meanwhile": status_during["source"],
            "lapses": status_after["lapses"] - status_before["lapses"],
            "reports_dropped": status_after["reports_dropped"] - status_before["reports_dropped"],
        }

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict, counts and seconds."""
        results = document[self.KEY]
        details = (
            f"{results['answers']} answers, {len(results['lost'])} lost, {results['wrong']} wrong; "
            f"unsteered {results['seconds_until_unsteered']:.1f} s after the sidecar was killed, "
            f"steered {results['seconds_until_steered']:.1f} s after it was started again; "
            f"{results['reports_dropped']} reports dropped"
        )
        return "FAILED" if self.problems(document) else "passed", details

    def problems(self, document: Document) -> list[str]:
        """Lists lost requests and wrong tokens."""
        results = document[self.KEY]
        return [
            *(f"without its sidecar, {lost_request}" for lost_request in results["lost"]),
            *(
                f"without its sidecar, {sentence}"
                for sentence in comparison.wrong_sentences(results["differences"])
            ),
        ]


class RepeatedPlay(BackgroundThread):
    """Plays a stream again and again while the context is open; leaving waits for the last play.

    plays: those that have ended.  error: what ended them early.
    """

    def __init__(self, play: Callable[[], Play]) -> None:
        super().__init__("play-again")
        self._play = play
        self.plays: list[Play] = []
        self.error: Exception | None = None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.plays.append(self._play())
            except HarnessError as error:
                self.error = error
                return


def wait_until(
    check: Check, condition: Callable[[], bool], player: RepeatedPlay, description: str
) -> None:
    """Waits until a state is reached.

    Raises HarnessError when the engine failed or it takes too long, OutOfTimeError when the check's
    time is up.
    """
    deadline = time.monotonic() + min(_MAX_WAIT_SECONDS, check.deadline.remaining_seconds)
    while not condition():
        if player.error is not None:
            raise player.error
        if time.monotonic() > deadline:
            check.deadline.require(0.0, f"the outage, until {description},")
            raise HarnessError(f"timed out waiting until {description}: {check.status(EXACT)}")
        time.sleep(_POLL_SECONDS)


def _is_steered(check: Check) -> bool:
    """Whether the engine's last choice came from a plan that was in force."""
    return bool(check.status(EXACT)["source"] == "PLAN")


def _document(
    expected: Sequence[Answer],
    plays: Sequence[Play],
    top_two: Callable[[Sequence[int]], Mapping[int, float]],
) -> dict[str, Any]:
    differing: list[Difference] = []
    for played in plays:
        differing += comparison.find_differences(EXACT, expected, played.answers, top_two, "any")
    return {
        "plays": len(plays),
        "answers": sum(len(played.answers) for played in plays),
        "tokens": sum(len(answer.tokens) for played in plays for answer in played.answers),
        "lost": [sentence for played in plays for sentence in played.lost_requests],
        "wrong": sum(difference.verdict == comparison.WRONG for difference in differing),
        "differences": [difference.as_json() for difference in differing],
    }

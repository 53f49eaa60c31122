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
_MOST_SECONDS = 120.0
_LOOK_SECONDS = 0.1


class OutagePart(Part):
    """Kills the sidecar under load, and brings it back."""

    KEY = "outage"

    def plan(self, planner: Planner) -> Work:
        """Counts the work."""
        sizes = planner.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        return planner.only(PLAIN, EXACT) + planner.play(stream).times(_PLAYS + 1)

    def run(self, check: Check) -> None:
        """Kills the sidecar once it steers, waits until the engine notices, and starts it again."""
        check.terminal.heading("The sidecar is killed, and comes back")
        sizes = check.scale.exact
        stream = comparison.build_stream(sizes.prompts, sizes.new_tokens)
        check.only(PLAIN, EXACT)
        expected = check.play(PLAIN, stream, "plain decoding").answers
        with (
            check.terminal.working("requests without a pause") as work,
            PlayAgain(lambda: check.play_unshown(EXACT, stream)) as player,
        ):
            wait_until(check, lambda: _is_steered(check), player, "the engine is steered")
            before = check.status(EXACT)
            check.kill_sidecar()
            killed = time.monotonic()
            wait_until(check, lambda: not _is_steered(check), player, "the engine noticed")
            noticed = time.monotonic()
            away = check.status(EXACT)
            check.restart_sidecar()
            wait_until(check, lambda: _is_steered(check), player, "the engine is steered again")
            work.result = "steered again"
            steered_again = time.monotonic()
        after = check.status(EXACT)
        for played in player.plays:
            check.count(played)
        plain = check.url(PLAIN)
        check.document[self.KEY] = _document(
            expected, player.plays, lambda context: comparison.top_two(plain, context)
        ) | {
            "seconds_until_unsteered": round(noticed - killed, 2),
            "seconds_until_steered": round(steered_again - noticed, 2),
            "source_meanwhile": away["source"],
            "lapses": after["lapses"] - before["lapses"],
            "reports_dropped": after["reports_dropped"] - before["reports_dropped"],
        }

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict, counts and seconds."""
        found = document[self.KEY]
        details = (
            f"{found['answers']} answers, {len(found['lost'])} lost, {found['wrong']} wrong; "
            f"unsteered {found['seconds_until_unsteered']:.1f} s after the sidecar was killed, "
            f"steered {found['seconds_until_steered']:.1f} s after it was started again; "
            f"{found['reports_dropped']} reports dropped"
        )
        return "FAILED" if self.problems(document) else "passed", details

    def problems(self, document: Document) -> list[str]:
        """Lists lost requests and wrong tokens."""
        found = document[self.KEY]
        return [
            *(f"without its sidecar, {lost}" for lost in found["lost"]),
            *(
                f"without its sidecar, {one}"
                for one in comparison.wrong_sentences(found["differences"])
            ),
        ]


class PlayAgain(BackgroundThread):
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


def wait_until(check: Check, reached: Callable[[], bool], player: PlayAgain, what: str) -> None:
    """Waits until a state is reached.

    Raises HarnessError when the engine failed or it takes too long, OutOfTimeError when the check's
    time is up.
    """
    until = time.monotonic() + min(_MOST_SECONDS, check.deadline.left)
    while not reached():
        if player.error is not None:
            raise player.error
        if time.monotonic() > until:
            check.deadline.require(0.0, f"the outage, until {what},")
            raise HarnessError(f"timed out waiting until {what}: {check.status(EXACT)}")
        time.sleep(_LOOK_SECONDS)


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
        differing += comparison.differences(EXACT, expected, played.answers, top_two, "any")
    return {
        "plays": len(plays),
        "answers": sum(len(played.answers) for played in plays),
        "tokens": sum(len(answer.tokens) for played in plays for answer in played.answers),
        "lost": [sentence for played in plays for sentence in played.lost],
        "wrong": sum(one.verdict == comparison.WRONG for one in differing),
        "differences": [one.as_json() for one in differing],
    }

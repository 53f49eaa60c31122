"""Lets a small trained drafter learn online while it serves, and compares its tokens.

The drafter has only seen code, and serves CSV, so that there is something to learn.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lab.cpu_engine.models.prompts import held_out_prompts
from lab.gpu_check import comparison, syncs
from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Check
from lab.gpu_check.comparison import Difference
from lab.gpu_check.parts.part import Document, Part
from lab.gpu_check.shapes import Device
from lab.gpu_check.small_engines import LEARNING, LEARNING_GAMMA, PLAIN
from lab.harness.load_generator import StreamPhase, acceptance_length
from lab.harness.sidecar import temporary_override

# The override: this draft length, and an update every few steps.
RULE = ("--gamma", str(LEARNING_GAMMA), "--regime", "online:2")

_DOMAIN = "csv"
_PROMPT_TOKENS = 60
_BATCH = 4
# Requests, tokens of an answer, and plays.
_SIZES = (8, 256, 4)
_SIZES_ON_A_PROCESSOR = (4, 96, 2)
# The trainer's state before it can take anything; the import of torch may take half a minute.
_STARTING = "starting"
_TRAINER_SECONDS = 180.0
_POLL_SECONDS = 0.5


class LearningPart(Part):
    """Has a drafter learn online, and compares its tokens."""

    KEY = "learning"

    def plan(self, planner: Planner) -> Work:
        """Counts the work.

        One more play ends the ledger's steps, and some plays wait for the trainer.
        """
        _, _, plays = _sizes(planner.device)
        stream = build_stream(planner.device)
        work = planner.count_starts(PLAIN, LEARNING) + planner.play(stream)
        return work + planner.play(stream).multiply(plays + 2)

    def run(self, check: Check) -> None:
        """Has the drafter learn; compares its tokens, and counts what waits for the device."""
        check.terminal.heading("A drafter that learns while it serves")
        _, _, plays = _sizes(check.options.device)
        stream = build_stream(check.options.device)
        check.run_only(PLAIN, LEARNING)
        plain = check.url(PLAIN)
        expected = check.play(PLAIN, stream, "plain decoding").answers
        differing: list[Difference] = []
        lengths: list[float] = []
        ledger = check.ledger.with_stem(LEARNING)
        with temporary_override(check.place.address, *RULE):
            wait_for_trainer(check, stream)
            switch = syncs.switch_path(ledger)
            switch.touch()
            for number in range(plays):
                answers = check.play(
                    LEARNING, stream, f"{LEARNING}: {number + 1} of {plays}"
                ).answers
                lengths.append(acceptance_length(answers))
                differing += comparison.find_differences(
                    LEARNING, expected, answers, lambda context: comparison.top_two(plain, context),
                    f"eagle3 {LEARNING_GAMMA}",
                )  # fmt: skip
                check.document[self.KEY] = _document(
                    differing, lengths, check.status(LEARNING), None
                )
                check.save()
            switch.unlink()
            check.play(LEARNING, stream, "the last steps")
        check.document[self.KEY] = _document(
            differing, lengths, check.status(LEARNING), syncs.read_ledger(ledger)
        )

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict, updates, acceptance and synchronisations."""
        results = document[self.KEY]
        online = results["online"] or {"updates": 0, "refused": 0, "restored": 0}
        lengths = ", ".join(f"{length:.2f}" for length in results["acceptance_lengths"])
        details = (
            f"{results['wrong']} wrong tokens; {online['updates']} updates landed, "
            f"{online['refused']} refused, {online['restored']} taken back; "
            f"acceptance length by play: {lengths}; "
            f"{syncs.summary_text(results['syncs'])}"
        )
        return "FAILED" if self.problems(document) else "passed", details

    def problems(self, document: Document) -> list[str]:
        """Lists wrong tokens, and says where nothing was learnt."""
        results = document[self.KEY]
        wrong = [
            f"while learning, {sentence}"
            for sentence in comparison.wrong_sentences(results["differences"])
        ]
        online = results["online"]
        if not online or not online["updates"]:
            state = online["state"] if online else "there was no trainer"
            wrong.append(f"no online update landed: {state}")
        return wrong


def wait_for_trainer(check: Check, stream: Sequence[StreamPhase]) -> None:
    """Waits until the trainer's process has started, which needs an engine that decodes."""
    deadline = time.monotonic() + min(_TRAINER_SECONDS, check.deadline.remaining_seconds)
    first = stream[0].requests[:1]
    short = [StreamPhase("one request", 1, first)]
    with check.terminal.show_progress("waiting for the trainer's process"):
        while time.monotonic() < deadline:
            online = check.status(LEARNING)["online"]
            if not online or online["state"] != _STARTING:
                return
            check.count(check.play_silently(LEARNING, short))
            time.sleep(_POLL_SECONDS)


def build_stream(device: Device) -> tuple[StreamPhase, ...]:
    """Builds requests for CSV, a few at a time."""
    requests, new_tokens, _ = _sizes(device)
    prompts = held_out_prompts(_DOMAIN, requests, _PROMPT_TOKENS, 1)
    return (StreamPhase.from_prompts(_DOMAIN, _BATCH, prompts, new_tokens),)


def _sizes(device: Device) -> tuple[int, int, int]:
    return _SIZES if device is Device.GPU else _SIZES_ON_A_PROCESSOR


def _document(
    differences: Sequence[Difference],
    lengths: Sequence[float],
    status: Mapping[str, Any],
    ledger: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Makes the part's document.

    lengths: acceptance length of each play.  status: what the plugin says.
    """
    return {
        "wrong": sum(difference.verdict == comparison.WRONG for difference in differences),
        "differences": [difference.as_json() for difference in differences],
        "acceptance_lengths": [round(length, 3) for length in lengths],
        "online": status["online"],
        "syncs": ledger,
    }

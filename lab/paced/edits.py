"""Plays code edits on a paced engine: `python -m lab.paced.edits`.

The drafter of each row, between an EAGLE3 drafter and a lookup in the prompt, against the best
single arm.  Run are plain decoding, every fixed arm of a single drafter, the mixture, and steered.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from controller.core.engine_spec import Arm
from lab.cpu_engine.models.edits import EncodedEdit, load_edits
from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.pace.step_costs import LOOKUP, OWN, load_step_costs
from lab.harness.engines import Workplace
from lab.harness.load_generator import StreamPhase
from lab.harness.measured import Spread, run_facts, write_result
from lab.harness.processes import end_on_sigterm, raised_priority
from lab.harness.terminal import Terminal
from lab.paced.engines import OFF, STEERED
from lab.paced.plays import LATE_SHARE_MAX, StreamPlay
from lab.paced.run import PacedHarness
from lab.paced.traffic import Stream, make_request

TABLE = "h100-llama3.1-8b"
MODELS = Path(__file__).parents[1] / "cpu_engine" / "models" / "code-edits"
GAMMAS = (0, 1, 2, 3, 4, 5, 7)
MIXTURE = f"{OWN}+{LOOKUP}"
# The engine without a lookup, on which a single drafter does not pay for one.
SINGLE_DRAFTER = f"{STEERED}-{OWN}"
_SEED, _WARM_UP_SEED = 2211, 977
_PROFILE_SECONDS = 20.0
# Arms that ran less are left out of the table.
_MIN_SHOWN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class EditsOptions:
    """The options of a run.

    requests: in a play.  gammas: draft lengths of the fixed arms.  dilation: None to measure it.
    late_share_max: a play with a larger share of late passes is rejected.
    """

    concurrency: int
    requests: int
    repeats: int
    gammas: tuple[int, ...]
    dilation: float | None
    output: Path
    late_share_max: float = LATE_SHARE_MAX


def build_stream(
    name: str, edits: tuple[EncodedEdit, ...], concurrency: int, requests: int, seed: int
) -> Stream:
    """Draws edits in random order; an edit is repeated when all have been drawn.

    concurrency: requests at a time.  An answer is as long as the true one, whatever the model
    writes.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < requests:
        order += rng.permutation(len(edits)).tolist()
    selected_edits = [edits[index] for index in order[:requests]]
    stream_requests = tuple(
        make_request(edit.kind, number, len(edit.answer), edit.prompt)
        for number, edit in enumerate(selected_edits)
    )
    return Stream(name, seed, (StreamPhase(name, concurrency, stream_requests),))


@dataclass(frozen=True)
class EditsOutcome:
    """Holds the plays of one run.

    plain_play: plain decoding.  singles: each fixed arm of a single drafter.  mixed: each fixed arm
    of the mixture.  steered: one play a repeat.
    """

    plain_play: StreamPlay
    singles: Mapping[Arm, StreamPlay]
    mixed: Mapping[Arm, StreamPlay]
    steered: Sequence[StreamPlay]

    @property
    def best_arm(self) -> Arm | None:
        """The fastest arm of a single drafter, found by running all; None for plain decoding."""
        arm = max(self.singles, key=lambda arm: self.singles[arm].tokens_per_second)
        faster = self.singles[arm].tokens_per_second > self.plain_play.tokens_per_second
        return arm if faster else None

    @property
    def best(self) -> StreamPlay:
        """The play of the best single arm."""
        arm = self.best_arm
        return self.plain_play if arm is None else self.singles[arm]

    @property
    def gain(self) -> Spread:
        """Steered over the best single arm, by repeat."""
        best = self.best.tokens_per_second
        return Spread(tuple(play.tokens_per_second / best for play in self.steered))

    @property
    def plays(self) -> tuple[StreamPlay, ...]:
        """All plays that speculate."""
        return (*self.singles.values(), *self.mixed.values(), *self.steered)

    @property
    def differing_answers(self) -> int:
        """Answers that differ from plain decoding's in any token."""
        expected = tokens_by_request(self.plain_play)
        return sum(
            tokens != expected[request]
            for play in self.plays
            for request, tokens in tokens_by_request(play).items()
        )

    @property
    def compared_answers(self) -> int:
        """Answers that were compared."""
        return sum(len(play.client_play.answers) for play in self.plays)

    def as_json(self) -> dict[str, Any]:
        """The outcome as it stands in a result file."""
        return {
            "off": _play(self.plain_play),
            "singles": {arm_name(arm): _play(play) for arm, play in self.singles.items()},
            "mixed": {arm_name(arm): _play(play) for arm, play in self.mixed.items()},
            "steered": [_play(play) for play in self.steered],
            "best": "off" if self.best_arm is None else arm_name(self.best_arm),
            "gain": self.gain.as_json(),
            "answers": {"compared": self.compared_answers, "differing": self.differing_answers},
        }


def tokens_by_request(play: StreamPlay) -> dict[str, tuple[int, ...]]:
    """The tokens of each answer, by the request's id."""
    return {answer.request.rid: answer.tokens for answer in play.client_play.answers}


def arm_name(arm: Arm) -> str:
    """Names an arm: its drafter and its draft length."""
    return f"{arm.drafter} {arm.gamma}"


def shares(play: StreamPlay) -> dict[str, float]:
    """Share of the decode steps by what drafted, the most frequent first."""
    steps = play.decode_steps
    counts = Counter(
        "off" if step.gamma == 0 else f"{step.drafter}{'+ngram' if step.mixed else ''} {step.gamma}"
        for step in steps
    )
    return {name: count / len(steps) for name, count in counts.most_common()}


def _play(play: StreamPlay) -> dict[str, Any]:
    return {
        "tokens_per_second": round(play.tokens_per_second, 1),
        "acceptance_length": round(play.acceptance_length, 3),
        "steps": len(play.decode_steps),
        "late_share": round(play.late_share, 4),
        "shares": {name: round(share, 3) for name, share in shares(play).items()},
    }


def label(source: str) -> str:
    """Says what is imposed and what is real."""
    return (
        f"Step times are imposed, by a {source}, and the lookup pays for its kernels; the target "
        "and its EAGLE3 drafter are small, trained to edit code, and every token is theirs. Time "
        "is the model's."
    )


def show(outcome: EditsOutcome, source: str, terminal: Terminal) -> None:
    """Prints the table and a summary."""
    best = outcome.best.tokens_per_second
    rows = [("off", outcome.plain_play)]
    rows += [(arm_name(arm), play) for arm, play in outcome.singles.items()]
    rows += [(f"{arm_name(arm)}, fixed", play) for arm, play in outcome.mixed.items()]
    rows += [("steered", play) for play in outcome.steered]
    (phase,) = outcome.plain_play.stream.phases
    terminal.table(
        f"{len(phase.requests)} code edits, {phase.concurrency} at a time",
        ["", "tokens/s", "÷ best single", "tokens a step", "steps"],
        [_row(name, play, best) for name, play in rows],
    )
    gain = outcome.gain
    terminal.say(
        f"Steered over the best single arm "
        f"({'off' if outcome.best_arm is None else arm_name(outcome.best_arm)}): {gain.median:.3f} "
        f"({gain.low:.3f}–{gain.high:.3f}). {outcome.compared_answers - outcome.differing_answers} "
        "of "
        f"{outcome.compared_answers} answers have plain decoding's tokens. {label(source)}"
    )


def _row(name: str, play: StreamPlay, best: float) -> list[str]:
    arm_texts = [
        f"{arm} {share:.0%}" for arm, share in shares(play).items() if share >= _MIN_SHOWN_SHARE
    ]
    return [
        name,
        f"{play.tokens_per_second:.0f}",
        f"{play.tokens_per_second / best:.3f}",
        f"{play.acceptance_length:.2f}",
        ", ".join(arm_texts) if name == "steered" else "",
    ]


@raised_priority()
def run(options: EditsOptions, terminal: Terminal) -> EditsOutcome:
    """Runs everything and writes result.json.  Raises HarnessError."""
    started, facts = time.monotonic(), run_facts()
    edits = load_edits(MODELS)
    source = load_step_costs(TABLE, GAMMAS, lookup=True).source
    with ExitStack() as stack:
        place = stack.enter_context(Workplace.temporary(options.output, "edits"))
        harness = _Edits(place, terminal, stack, options)
        outcome = harness.play(edits)
        harness.stop()
    document = {
        **facts,
        "seconds": round(time.monotonic() - started, 1),
        "label": label(source),
        "concurrency": options.concurrency,
        "requests": options.requests,
        "dilation": harness.dilation,
        **outcome.as_json(),
    }
    write_result(document, options.output)
    show(outcome, source, terminal)
    return outcome


class _Edits(PacedHarness):
    """The running processes, and what is played on them."""

    def __init__(
        self, place: Workplace, terminal: Terminal, stack: ExitStack, options: EditsOptions
    ) -> None:
        size = options.concurrency
        pace = Pace(TABLE, options.dilation or 8.0, gammas=GAMMAS, max_batch_size=size, lookup=True)
        super().__init__(place, terminal, stack, pace, size, trained=MODELS)
        self.late_share_max = options.late_share_max
        self._options = options

    def play(self, edits: tuple[EncodedEdit, ...]) -> EditsOutcome:
        """Plays everything, two engines at a time."""
        options = self._options
        policies = (OFF, SINGLE_DRAFTER, STEERED)
        stream = self._stream("edits", edits, options.requests, _SEED)
        warm_up = self._stream("warm-up", edits, options.requests, _WARM_UP_SEED)
        short = self._stream("short", edits, 2 * options.concurrency, _WARM_UP_SEED)
        self.start(policies, {STEERED: {"SPECULATION_LOOKUP": "1"}})
        self.find_dilation(policies, fixed=options.dilation is not None, stream=short)
        self.start_sidecar(policies)
        plain_play = self.play_paced(OFF, stream)
        own_arms = [Arm(OWN, gamma) for gamma in options.gammas]
        lookup = [Arm(LOOKUP, gamma) for gamma in options.gammas]
        singles: dict[Arm, StreamPlay] = {}
        for pair in zip(own_arms, lookup, strict=True):
            jobs = {
                arm_name(arm): partial(
                    self._play_pinned, arm, stream, SINGLE_DRAFTER if arm in own_arms else STEERED
                )
                for arm in pair
            }
            plays = self.play_all(jobs, " and ".join(jobs))
            singles |= {arm: plays[arm_name(arm)] for arm in pair}
        self.profile(STEERED, _PROFILE_SECONDS, sorted({1, 8, options.concurrency}))
        mixed = self._play_mixtures(singles, stream)
        self.play_all({STEERED: partial(self.play_paced, STEERED, warm_up)}, "warming up")
        steered = []
        for repeat in range(options.repeats):
            text = f"steered, {repeat + 1} of {options.repeats}"
            job = partial(self.play_paced, STEERED, stream)
            steered.append(self.play_all({STEERED: job}, text)[STEERED])
        return EditsOutcome(plain_play, singles, mixed, steered)

    def _play_mixtures(
        self, singles: dict[Arm, StreamPlay], stream: Stream
    ) -> dict[Arm, StreamPlay]:
        """Plays the mixture at the two draft lengths at which one of its drafters was best."""
        gammas = set()
        for drafter in (OWN, LOOKUP):
            rates = {a: p.tokens_per_second for a, p in singles.items() if a.drafter == drafter}
            gammas.add(max(rates, key=lambda arm: rates[arm]).gamma)
        played = {}
        for arm in (Arm(MIXTURE, gamma) for gamma in sorted(gammas)):
            name = arm_name(arm)
            play = partial(self._play_pinned, arm, stream, STEERED)
            played[arm] = self.play_all({name: play}, name)[name]
        return played

    def _play_pinned(self, arm: Arm, stream: Stream, policy: str) -> StreamPlay:
        with self.sidecar(policy).pinned(arm.gamma, arm.drafter):
            return self.play_paced(policy, stream)

    def _stream(self, name: str, edits: Iterable[EncodedEdit], requests: int, seed: int) -> Stream:
        return build_stream(name, tuple(edits), self._options.concurrency, requests, seed)


def edits(
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Edits at a time.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Edits in a play.")] = 192,
    repeats: Annotated[int, typer.Option(min=1, help="How often steered is played.")] = 3,
    dilation: Annotated[
        float | None, typer.Option(min=1.0, help="Machine seconds a second; found by default.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Two draft lengths, one repeat, any late pass: does it work?"),
    ] = False,
    output: Annotated[Path, typer.Option(help="Where result and logs go.")] = Path("build/edits"),
) -> None:
    """Plays code edits on the real SGLang at an H100's pace: each drafter, and one for each row."""
    end_on_sigterm()
    terminal = Terminal()
    gammas = (3, 7) if quick else tuple(gamma for gamma in GAMMAS if gamma)
    options = EditsOptions(
        concurrency,
        requests,
        1 if quick else repeats,
        gammas,
        dilation,
        output,
        1.0 if quick else LATE_SHARE_MAX,
    )
    with terminal.exit_on_error("The edits failed"):
        run(options, terminal)
    terminal.say(f"\n{output / 'result.json'}  {output / 'logs'}/")


if __name__ == "__main__":
    typer.run(edits)

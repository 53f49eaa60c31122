"""Runs the edits: plain decoding, every fixed arm of a single drafter, the mixture, and steered."""

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from controller.core.engine_spec import Arm
from lab.cpu_engine.models.edits import EncodedEdit, load_edits
from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.pace.step_costs import LOOKUP, OWN, load_step_costs
from lab.harness.engines import Workplace
from lab.harness.machine import run_facts, write_result
from lab.harness.processes import preferred
from lab.harness.terminal import Terminal
from lab.paced.day import Stream
from lab.paced.edits import report
from lab.paced.edits.outcome import EditsOutcome, name_of
from lab.paced.edits.stream import build_stream
from lab.paced.engines import OFF, STEERED
from lab.paced.plays import LATE_SHARE_MAX, StreamPlay
from lab.paced.run import PacedHarness

TABLE = "h100-llama3.1-8b"
MODELS = Path(__file__).parents[2] / "cpu_engine" / "models" / "code-edits"
GAMMAS = (0, 1, 2, 3, 4, 5, 7)
MIXTURE = f"{OWN}+{LOOKUP}"
# The engine without a lookup, on which a single drafter does not pay for one.
ALONE = f"{STEERED}-{OWN}"
_SEED, _WARM_UP_SEED = 2211, 977
_PROFILE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class EditsOptions:
    """The options of a run.

    requests: in a play.  gammas: draft lengths of the fixed arms.  dilation: None: the machine's.
    late_share_max: a play of which more passes were late is rejected.
    """

    concurrency: int
    requests: int
    repeats: int
    gammas: tuple[int, ...]
    dilation: float | None
    output: Path
    late_share_max: float = LATE_SHARE_MAX


@preferred()
def run(options: EditsOptions, terminal: Terminal) -> EditsOutcome:
    """Runs everything and writes result.json.  Raises HarnessError."""
    started, facts = time.monotonic(), run_facts()
    edits = load_edits(MODELS)
    source = load_step_costs(TABLE, GAMMAS, lookup=True).source
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="speculation-edits-")))
        harness = _Edits(Workplace(options.output, scratch), terminal, stack, options)
        outcome = harness.play(edits)
        harness.stop()
    document = {
        **facts,
        "seconds": round(time.monotonic() - started, 1),
        "label": report.label(source),
        "concurrency": options.concurrency,
        "requests": options.requests,
        "dilation": harness.dilation,
        **outcome.as_json(),
    }
    write_result(document, options.output)
    report.show(outcome, source, terminal)
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
        policies = (OFF, ALONE, STEERED)
        stream = self._stream("edits", edits, options.requests, _SEED)
        warm_up = self._stream("warm-up", edits, options.requests, _WARM_UP_SEED)
        short = self._stream("short", edits, 2 * options.concurrency, _WARM_UP_SEED)
        self.start(policies, {STEERED: {"SPECULATION_LOOKUP": "1"}})
        self.find_dilation(policies, fixed=options.dilation is not None, stream=short)
        self.start_sidecar(policies)
        off = self.play_paced(OFF, stream)
        own = [Arm(OWN, gamma) for gamma in options.gammas]
        lookup = [Arm(LOOKUP, gamma) for gamma in options.gammas]
        singles: dict[Arm, StreamPlay] = {}
        for pair in zip(own, lookup, strict=True):
            jobs = {
                name_of(arm): partial(self._pinned, arm, stream, ALONE if arm in own else STEERED)
                for arm in pair
            }
            plays = self.play_all(jobs, " and ".join(jobs))
            singles |= {arm: plays[name_of(arm)] for arm in pair}
        self.profile(STEERED, _PROFILE_SECONDS, sorted({1, 8, options.concurrency}))
        mixed = self._mixed(singles, stream)
        self.play_all({STEERED: partial(self.play_paced, STEERED, warm_up)}, "warming up")
        steered = []
        for repeat in range(options.repeats):
            text = f"steered, {repeat + 1} of {options.repeats}"
            job = partial(self.play_paced, STEERED, stream)
            steered.append(self.play_all({STEERED: job}, text)[STEERED])
        return EditsOutcome(off, singles, mixed, steered)

    def _mixed(self, singles: dict[Arm, StreamPlay], stream: Stream) -> dict[Arm, StreamPlay]:
        """Plays the mixture at the two draft lengths at which one of its drafters was best."""
        gammas = set()
        for drafter in (OWN, LOOKUP):
            rates = {a: p.tokens_per_second for a, p in singles.items() if a.drafter == drafter}
            gammas.add(max(rates, key=lambda arm: rates[arm]).gamma)
        played = {}
        for arm in (Arm(MIXTURE, gamma) for gamma in sorted(gammas)):
            name = name_of(arm)
            play = partial(self._pinned, arm, stream, STEERED)
            played[arm] = self.play_all({name: play}, name)[name]
        return played

    def _pinned(self, arm: Arm, stream: Stream, policy: str) -> StreamPlay:
        with self.sidecar(policy).pinned(arm.gamma, arm.drafter):
            return self.play_paced(policy, stream)

    def _stream(self, name: str, edits: Iterable[EncodedEdit], requests: int, seed: int) -> Stream:
        return build_stream(name, tuple(edits), self._options.concurrency, requests, seed)

"""Runs a sidecar and one engine at a time, as the parts of the lab need them, paced or not."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lab.cpu_engine.engine_command import MODELS, SHALLOW, eagle3_flags, engine_command
from lab.cpu_engine.forking import popen
from lab.cpu_engine.models.prompts import held_out_prompts
from lab.cpu_engine.pace.pacer import VARIABLE, Pace
from lab.cpu_engine.pace.step_log import LoggedStep, await_log, read_log
from lab.cpu_engine.pace.updates import UpdateCosts
from lab.harness.engine_environment import steered_by
from lab.harness.engines import (
    Engine,
    Workplace,
    launch_engine,
    launch_sidecar,
    measure_profile,
    wait_serving,
)
from lab.harness.load_generator import StreamPhase, acceptance_length
from lab.harness.sidecar import Pin, SidecarHandle, temporary_override
from lab.harness.terminal import Terminal
from lab.paced.run import dilated_planner

ENGINE_ID = "lab"
_READY_SECONDS = 150.0
_PROMPT_TOKENS = 60
_BATCH_MAX = 8
_START_GAMMA = 3
# The pace of an engine that has one.
TABLE = "h100-llama3.1-8b"
# Seconds of this machine that a second of the model takes, about: the sidecar's own times are
# stretched by it.
_DILATION = 4.0


@dataclass(frozen=True, slots=True)
class PlayResult:
    """The result of some requests.

    acceptance_length: tokens a verification.  tokens: of each answer.
    """

    tokens_per_second: float
    acceptance_length: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LabSetting:
    """The options of a run.

    output: for logs.  quick: small numbers, to see that it runs.  seeds: repeats.
    """

    output: Path
    scratch: Path
    quick: bool
    seeds: int
    terminal: Terminal


class Lab:
    """A running engine under a sidecar."""

    def __init__(self, engine: Engine, sidecar: SidecarHandle, place: Workplace) -> None:
        self._engine = engine
        self.sidecar = sidecar
        self._place = place

    def generate(self, domain: str, count: int, new_tokens: int, seed: int) -> PlayResult:
        """Sends `count` requests at once and decodes them greedily."""
        prompts = held_out_prompts(domain, count, _PROMPT_TOKENS, seed)
        played = self._engine.play([StreamPhase.from_prompts(domain, count, prompts, new_tokens)])
        answers = played.answers
        return PlayResult(
            played.tokens_per_second,
            acceptance_length(answers),
            tuple(answer.tokens for answer in answers),
        )

    @contextmanager
    def pinned(self, gamma: int) -> Iterator[Pin]:
        """Holds the engine to a draft length; the pin keeps the reports."""
        drafter = self.sidecar.status().engine.drafters[0].name
        with self.sidecar.pinned(gamma, drafter) as pin:
            yield pin

    def profile(self, budget_seconds: float) -> None:
        """Measures what steps cost.  Raises HarnessError."""
        measure_profile(self._place, self._engine, self.sidecar, budget_seconds)

    @contextmanager
    def regime(self, text: str) -> Iterator[None]:
        """Sets online updates as an operator does: "off", "online:5"."""
        with temporary_override(self._place.address, "--regime", text):
            yield


@contextmanager
def start_engine(  # noqa: PLR0913 - the parts differ in all of these
    setting: LabSetting,
    name: str,
    draft: Path,
    gammas: Sequence[int],
    engine: Mapping[str, str] | None = None,
    sidecar: Mapping[str, str] | None = None,
    *,
    batch_max: int = _BATCH_MAX,
    models: Path = MODELS,
    flags: Sequence[str] = (),
) -> Iterator[Lab]:
    """Starts a sidecar and an engine, and ends them with the context.  Raises HarnessError.

    name: for logs.  draft: folder of an EAGLE3 drafter.  engine, sidecar: their environment
    variables.  models: the set of the target.  flags: of the engine, instead of those for that
    drafter.
    """
    scratch = setting.scratch / name
    scratch.mkdir()
    place = Workplace(setting.output, scratch)
    variables = steered_by(place.address, ENGINE_ID, gammas) | dict(engine or {})
    with ExitStack() as stack:
        client = stack.enter_context(SidecarHandle(place.address, ENGINE_ID))
        child = stack.enter_context(
            launch_sidecar(place, environment=sidecar, log=f"{name}-sidecar")
        )
        wait_serving(child, client)

        def command(port: int) -> list[str]:
            engine_flags = flags or eagle3_flags(draft, _START_GAMMA)
            return engine_command(port, batch_max, engine_flags, models)

        launched = launch_engine(name, command, variables, place, popen)
        stack.enter_context(launched.child)
        launched.wait_ready(_READY_SECONDS, sidecar=client)
        yield Lab(launched, client, place)


@dataclass(frozen=True, slots=True)
class StreamPlay:
    """The passes of some requests, and their answers.  All seconds are the model's."""

    steps: tuple[LoggedStep, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))

    @property
    def seconds(self) -> float:
        """Seconds of all passes, prefills included."""
        return sum(step.seconds for step in self.steps)

    @property
    def halves(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """Tokens and seconds of the passes up to half of the tokens, and of the others."""
        gained_tokens = [step.tokens if step.is_decode else 0 for step in self.steps]
        cumulative_tokens = list(accumulate(gained_tokens))
        cut = bisect_left(cumulative_tokens, sum(gained_tokens) / 2) + 1
        return self._part(gained_tokens, 0, cut), self._part(gained_tokens, cut, len(gained_tokens))

    def _part(self, gained_tokens: Sequence[int], begin: int, end: int) -> tuple[int, float]:
        return sum(gained_tokens[begin:end]), sum(step.seconds for step in self.steps[begin:end])

    @property
    def acceptance_length(self) -> float:
        """Tokens of a sequence in a step that drafts; 1 without any."""
        drafted = [step for step in self.steps if step.gamma > 0]
        rows = sum(step.batch_size for step in drafted)
        return 1 + sum(step.accepted for step in drafted) / rows if rows else 1.0

    @property
    def updates(self) -> int:
        """Updates that landed in these passes."""
        return self.steps[-1].updates - self.steps[0].updates if self.steps else 0


class PacedLab:
    """A running engine whose passes and updates have the prices of a GPU; `lab` steers it.

    Nothing waits for these prices (see `Pace.held`): they are added up, and the engine reports
    them.  So the figures do not depend on how quick this machine is, or on what else runs on it.
    """

    def __init__(self, lab: Lab, log: Path) -> None:
        self.lab = lab
        self._log = log

    def play(self, domain: str, count: int, new_tokens: int, seed: int) -> StreamPlay:
        """Sends `count` requests at once and decodes them greedily.  Raises HarnessError.

        Nothing is held, so the machine decides how many passes go by before a request arrives.
        Many more than the engine runs at once wait in its queue from the first passes on: then
        the batch is full on every machine until the last ones.
        """
        begin = read_log(self._log).end
        played = self.lab.generate(domain, count, new_tokens, seed)
        return StreamPlay(await_log(self._log, begin, count).steps, played.tokens)


@contextmanager
def start_paced_engine(
    setting: LabSetting,
    name: str,
    draft: str,
    gammas: Sequence[int],
    updates: UpdateCosts,
    batch_max: int,
    engine: Mapping[str, str] | None = None,
    sidecar: Mapping[str, str] | None = None,
) -> Iterator[PacedLab]:
    """Starts both, with online updates; ends them with the context.  Raises HarnessError.

    draft: the drafter, of the shallow set: what a step costs is imposed, and its target is quick.
    updates: their price.  engine, sidecar: further variables.
    """
    log = setting.scratch / f"{name}.jsonl"
    pace = Pace(
        TABLE,
        1.0,
        log=str(log),
        gammas=tuple(gammas),
        max_batch_size=batch_max,
        updates=updates,
        held=False,
    )
    variables = {VARIABLE: pace.as_json(), "SPECULATION_ONLINE_UPDATES": "1", **(engine or {})}
    planner = {**dilated_planner(_DILATION), **(sidecar or {})}
    draft_folder = SHALLOW / draft
    with start_engine(
        setting, name, draft_folder, gammas, variables, planner, batch_max=batch_max, models=SHALLOW
    ) as lab:
        yield PacedLab(lab, log)

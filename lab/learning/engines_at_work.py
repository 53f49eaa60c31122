"""Runs a sidecar and one engine at a time, as the parts of the lab need them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.cpu_engine.engine_command import MODELS, eagle3_flags, engine_command
from lab.cpu_engine.forking import popen
from lab.cpu_engine.models.prompts import held_out_prompts
from lab.harness.engines import (
    Engine,
    Workplace,
    launch_engine,
    launch_sidecar,
    measure_profile,
    wait_serving,
)
from lab.harness.load_generator import acceptance_length
from lab.harness.overrides import overridden
from lab.harness.sidecar import Pin, SidecarHandle
from lab.harness.stream import StreamPhase, StreamRequest
from lab.harness.terminal import Terminal

ENGINE_ID = "lab"
_READY_SECONDS = 150.0
_PROMPT_TOKENS = 60
_BATCH_MAX = 8
_START_GAMMA = 3


@dataclass(frozen=True, slots=True)
class Played:
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

    def generate(self, domain: str, count: int, new_tokens: int, seed: int) -> Played:
        """Sends `count` requests at once and decodes them greedily."""
        prompts = held_out_prompts(domain, count, _PROMPT_TOKENS, seed)
        requests = tuple(
            StreamRequest(index, domain, tuple(prompt), new_tokens)
            for index, prompt in enumerate(prompts)
        )
        played = self._engine.play([StreamPhase(domain, domain, count, requests)])
        answers = played.answers
        return Played(
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
        with overridden(self._place.address, "--regime", text):
            yield


@contextmanager
def running(  # noqa: PLR0913 - the parts differ in all of these
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
    variables = {
        "SPECULATION_SIDECAR": place.address,
        "SPECULATION_ENGINE_ID": ENGINE_ID,
        "SPECULATION_GAMMAS": ",".join(map(str, gammas)),
        **(engine or {}),
    }
    with ExitStack() as stack:
        client = stack.enter_context(SidecarHandle(place.address, ENGINE_ID))
        child = stack.enter_context(
            launch_sidecar(place, environment=sidecar, log=f"{name}-sidecar")
        )
        wait_serving(child, client)

        def command(port: int) -> list[str]:
            own = flags or eagle3_flags(draft, _START_GAMMA)
            return engine_command(port, batch_max, own, models)

        launched = launch_engine(name, command, variables, place, popen)
        stack.enter_context(launched.child)
        launched.wait_ready(_READY_SECONDS, sidecar=client)
        yield Lab(launched, client, place)

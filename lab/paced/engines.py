"""Starts paced engines: SGLang servers that differ in their speculation flags alone.

Their weights are dummies, as small as SGLang accepts, because a step has to end within the pace of
a GPU.  Their acceptance is drawn (see pace/).  Where the tokens matter, a small trained set is
served.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.cpu_engine.engine_command import adaptive_flags, chain_flags, server_command
from lab.cpu_engine.forking import popen
from lab.cpu_engine.pace.pacer import VARIABLE, Pace
from lab.cpu_engine.pace.step_costs import OWN, SECOND
from lab.harness.engine_environment import steered_by
from lab.harness.engines import Engine, Workplace, launch_engine

OFF, ADAPTIVE, STEERED = "off", "sglang-adaptive", "steered"
_STATIC = "static-"
# A steered engine starts with SGLang's usual number of drafts.
_START_GAMMA = 3
READY_SECONDS = 240.0
# SGLang would choose it by the device's memory; the simulator reads prompts in the same chunks.
PREFILL_CHUNK_TOKENS = 8192
_MAX_TOKENS = 196608
# More than prompt and answer of the longest request.
CONTEXT = 2048
_SHAPE = Path(__file__).with_name("shape.json")


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds what all engines of a run share.

    pace: without its log, which each engine has for itself.  second: whether the steered engine has
    a DFlash drafter beside its own.  predictor: its own is the target's multi-token predictor
    (NEXTN), and not an EAGLE3 drafter.  trained: the models are a trained set, `target` and
    `draft`, and no dummies.
    """

    pace: Pace
    models: Path
    max_batch_size: int
    second: bool = False
    predictor: bool = False
    trained: bool = False

    @classmethod
    def make(
        cls,
        pace: Pace,
        folder: Path,
        max_batch_size: int,
        *,
        second: bool,
        predictor: bool = False,
    ) -> "Setting":
        """Writes the models' configs to a folder."""
        for name, config in json.loads(_SHAPE.read_text(encoding="utf-8")).items():
            model = folder / name
            model.mkdir(parents=True, exist_ok=True)
            (model / "config.json").write_text(json.dumps(config))
        return cls(pace, folder, max_batch_size, second, predictor)

    @property
    def target(self) -> Path:
        """The folder of the target."""
        return self.models / ("mimo" if self.predictor else "target")

    @property
    def draft(self) -> Path:
        """The folder of the engines' own drafter."""
        if self.trained:
            return self.models / "draft"
        return self.target if self.predictor else self.models / OWN

    @property
    def algorithm(self) -> str:
        """SGLang's name for speculation with the engines' own drafter."""
        return "NEXTN" if self.predictor else "EAGLE3"

    @property
    def own_drafter(self) -> str:
        """Returns what the steered engine calls its own drafter."""
        return self.algorithm.lower()


def static_policy(gamma: int) -> str:
    """Names SGLang's own speculation with a fixed draft length, without the plugin."""
    return f"{_STATIC}{gamma}"


def is_steered(policy: str) -> bool:
    """Whether an engine has the plugin; such names begin with "steered"."""
    return policy.startswith(STEERED)


def log_path(policy: str, place: Workplace) -> Path:
    """Names the file to which an engine writes its passes."""
    return place.output / "steps" / f"{policy}.jsonl"


def command(policy: str, setting: Setting, port: int) -> list[str]:
    """Makes the command line of an engine."""
    flags = [
        # In bfloat16 the tokens would depend on how many rows are verified together.
        *(("--dtype", "float32") if setting.trained else ("--load-format", "dummy")),
        "--skip-tokenizer-init",
        "--chunked-prefill-size", str(PREFILL_CHUNK_TOKENS),
        # On a CPU SGLang does not speculate with the overlap schedule: no engine has it.
        "--disable-overlap-schedule",
        *speculation_flags(policy, setting.draft, setting.algorithm),
    ]  # fmt: skip
    return server_command(
        "lab.cpu_engine.serve", setting.target, port, setting.max_batch_size, flags,
        max_tokens=_MAX_TOKENS, context=CONTEXT,
    )  # fmt: skip


def speculation_flags(policy: str, draft: Path, algorithm: str = "EAGLE3") -> list[str]:
    """Returns the flags that distinguish the engines' command lines; draft: its folder."""
    if policy == OFF:
        return []
    if policy == ADAPTIVE:
        return adaptive_flags(algorithm, draft)
    gamma = _START_GAMMA if is_steered(policy) else int(policy.removeprefix(_STATIC))
    return chain_flags(algorithm, draft, gamma)


def environment(policy: str, setting: Setting, place: Workplace) -> dict[str, str]:
    """Makes the variables of an engine; only a steered one gets the sidecar's address."""
    pace = replace(setting.pace, log=str(fresh_log(policy, place)))
    variables = {VARIABLE: pace.as_json(), **steering(policy, setting.pace.gammas, place)}
    if setting.second and is_steered(policy):
        variables["SPECULATION_DFLASH_MODEL_PATH"] = str(setting.models / SECOND)
    return variables


def fresh_log(policy: str, place: Workplace) -> Path:
    """Makes room for an engine's log; returns its absolute path."""
    log = log_path(policy, place).absolute()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    return log


def steering(policy: str, gammas: Sequence[int], place: Workplace) -> dict[str, str]:
    """Makes the variables of the plugin, none for an engine that is not steered."""
    return steered_by(place.address, policy, gammas) if is_steered(policy) else {}


def launch(
    policy: str,
    setting: Setting,
    place: Workplace,
    extra_variables: Mapping[str, str] | None = None,
) -> Engine:
    """Starts an engine and does not wait for it.  extra_variables: further variables."""
    variables = environment(policy, setting, place) | dict(extra_variables or {})

    def make(port: int) -> Sequence[str]:
        return command(policy, setting, port)

    return launch_engine(policy, make, variables, place, popen)

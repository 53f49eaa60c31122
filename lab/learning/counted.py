"""Measures claims of Test-Time Speculation (arXiv:2605.09329), in counted tokens and updates.

Every engine runs in lockstep with its trainer (LAB_LOCKSTEP of lab.cpu_engine.serve), so that an
update of every S-th round lands before the next step: what is accepted does not depend on the
machine.

An update is priced at the widths of published drafters, without running one: its arithmetic is
counted, and the memory that moves is that of `UpdateCosts`; together they are the seconds of an
H100, as on the paced engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from controller.core.cost.roofline import device_from_data_sheet
from controller.core.engine_spec import Arm
from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.online import OnlineSettings
from lab.cpu_engine.engine_command import SHALLOW, eagle3_flags
from lab.cpu_engine.pace.step_costs import OWN, load_step_costs
from lab.cpu_engine.pace.updates import DEVICE, OPTIMISER_BYTES, UTILISATION, WEIGHT_BYTES
from lab.cpu_engine.serve import LOCKSTEP_VARIABLE
from lab.harness.errors import HarnessError
from lab.harness.measured import Spread
from lab.harness.sidecar import count_tokens
from lab.learning.engines import Lab, LabSetting, start_engine
from speculation.v1 import engine_pb2

STRIDE: Final = 5
_GAMMA: Final = 3
# A DFlash drafter needs room for its whole block.
_GAMMAS: Final = (0, _GAMMA, 7)
# Slightly more than the drafts that an engine has to see before it learns.
_BASELINE_DRAFTS: Final = 220
_NO_LIMIT: Final = 1 << 20
# Of Llama-3.1-8B and its EAGLE3 drafter (yuhuili/EAGLE3-LLaMA3.1-Instruct-8B).
_LLAMA: Final = DecoderShape(
    hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, layers=1, vocabulary=128256
)
_EAGLE3: Final = Eagle3Shape(_LLAMA, (2, 16, 29), draft_vocabulary=32000)
_EAGLE3_DRAFTS: Final = 3
# Of Qwen3-8B and its DFlash drafter (z-lab/Qwen3-8B-DFlash-b16).
_QWEN: Final = DecoderShape(
    hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=12288, layers=5, vocabulary=151936
)
_DFLASH: Final = DFlashShape(_QWEN, (1, 9, 17, 25, 33), block=16, mask_token=151669)
# A step of one request with three drafts on that device (table h100-llama3.1-8b).
_STEP_ARM: Final = Arm(OWN, 3)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter of the shallow target, and a domain that it has something to learn on."""

    name: str
    folder: Path
    domain: str

    @property
    def flags(self) -> list[str]:
        """Returns the engine's flags."""
        target = ["--model-path", str(SHALLOW / "target")]
        if self.name == "EAGLE3":
            return target + eagle3_flags(self.folder, _GAMMA)
        return [
            *target, "--speculative-algorithm", "DFLASH",
            "--speculative-draft-model-path", str(self.folder),
        ]  # fmt: skip


# One that has never seen the traffic, and one that has seen little of it.
DRAFTERS: Final = (
    Drafter("EAGLE3", SHALLOW / "draft-code", "csv"),
    Drafter("DFlash", SHALLOW / "dflash", "csv"),
)
# They know the traffic, and were trained on short sequences of it.
SHORT_TRAINED: Final = (
    Drafter("EAGLE3", SHALLOW / "draft-mixed", "json"),
    Drafter("DFlash", SHALLOW / "dflash", "json"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A verification of one request.

    context: tokens before it.  gained_tokens: tokens, bonus included.  seconds: of the step.
    update: of the update that landed before it, 0 where none did.
    """

    context: int
    gained_tokens: int
    seconds: float
    update: float


Answer = tuple[Step, ...]


def drafting_steps(reports: Sequence[engine_pb2.StepReport]) -> Answer:
    """Returns the drafting steps of a request that ran alone (`last_play`)."""
    return tuple(
        Step(
            report.kv_tokens,
            1 + next(k for k, count in enumerate(report.accepted_counts) if count),
            report.step_seconds,
            report.update_seconds,
        )
        for report in last_play(reports)
        if report.gamma == _GAMMA
    )


def last_play(reports: Sequence[engine_pb2.StepReport]) -> list[engine_pb2.StepReport]:
    """Returns the steps of a request that ran alone; of its last play if it was sent again."""
    single_reports = [report for report in reports if report.batch_size == 1]
    begins = [
        index
        for index, (earlier, later) in enumerate(pairwise(single_reports), 1)
        if later.kv_tokens < earlier.kv_tokens
    ]
    return single_reports[begins[-1] if begins else 0 :]


def count_last_play_tokens(reports: Sequence[engine_pb2.StepReport]) -> int:
    """Counts the tokens that the steps of a request's last play have made."""
    return count_tokens(last_play(reports))


def acceptance(answer: Answer, first: int = 0, last: int = _NO_LIMIT) -> float:
    """Computes tokens a verification in contexts from `first` to before `last`; 0 without any."""
    gained_tokens = [step.gained_tokens for step in answer if first <= step.context < last]
    return sum(gained_tokens) / len(gained_tokens) if gained_tokens else 0.0


def gain(
    answers: Sequence[Answer],
    baseline_answers: Sequence[Answer],
    first: int = 0,
    last: int = _NO_LIMIT,
) -> Spread:
    """Compares acceptance in these contexts with that of the same prompts' other answers.

    Raises HarnessError when an answer was not drafted for in these contexts.
    """
    pairs = [
        (acceptance(answer, first, last), acceptance(baseline_answer, first, last))
        for answer, baseline_answer in zip(answers, baseline_answers, strict=True)
    ]
    if not all(answer and baseline_answer for answer, baseline_answer in pairs):
        raise HarnessError(f"no step with drafts in contexts {first} to {last} of an answer")
    return Spread(tuple(answer / baseline_answer for answer, baseline_answer in pairs))


def net_gain(answers: Sequence[Answer], baseline_answers: Sequence[Answer], price: float) -> float:
    """Computes the median gain if updates took their time from the steps.

    price: of an update, in steps (`update_price`).
    """
    return gain(answers, baseline_answers).median / (1 + price / STRIDE)


@contextmanager
def start_learning_engine(
    setting: LabSetting, drafter: Drafter, name: str, variables: Mapping[str, str]
) -> Iterator[Lab]:
    """Starts an engine whose requests begin with the loaded drafter, ready to learn."""
    engine = {
        "SPECULATION_ONLINE_UPDATES": "1",
        "SPECULATION_ONLINE_SCOPE": "request",
        LOCKSTEP_VARIABLE: "1",
        **variables,
    }
    with start_engine(
        setting, name, drafter.folder, _GAMMAS, engine, batch_max=1, flags=drafter.flags
    ) as lab:
        with lab.regime("off"), lab.pinned(_GAMMA) as pin:
            while len(pin.reports) < _BASELINE_DRAFTS:
                lab.generate(drafter.domain, 1, 300, 7)
        yield lab


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to the same prompts: steps of each, and tokens of each."""

    steps: tuple[Answer, ...]
    tokens: tuple[tuple[int, ...], ...]


def generate_answers(
    lab: Lab, drafter: Drafter, tokens: int, seeds: int, *, learn: bool
) -> Answers:
    """Generates an answer of that many tokens for every seed, with updates or without."""
    answers: list[Answer] = []
    answer_tokens: list[tuple[int, ...]] = []
    with lab.regime(f"online:{STRIDE}" if learn else "off"), lab.pinned(_GAMMA) as pin:
        for seed in range(seeds):
            reports_before = len(pin.reports)
            played = lab.generate(drafter.domain, 1, tokens, 300 + seed)
            # The prompt's step makes the first token, and no report.
            decoded = len(played.tokens[0]) - 1
            reports = pin.reports_since(reports_before, decoded, count_last_play_tokens)
            answers.append(drafting_steps(reports))
            answer_tokens += played.tokens
    return Answers(tuple(answers), tuple(answer_tokens))


def drafters(
    setting: LabSetting, candidates: tuple[Drafter, ...] = DRAFTERS
) -> tuple[Drafter, ...]:
    """Returns those that a headline compares; a quick one has the first only."""
    return candidates[:1] if setting.quick else candidates


@cache
def update_flops(drafter: str, window: int) -> float:
    """Counts an update of one request, forward and backward.

    drafter: EAGLE3 or DFlash.  window: positions that the default anchors attend to.
    """
    with torch.device("meta"):
        student, drafts = _student(drafter)
        width = len(student.shape.feature_layers) * student.shape.decoder.hidden
        with FlopCounterMode(display=False) as flop_counter:
            unrolled = student.unroll(
                torch.empty(1, window, width),
                torch.zeros(1, window + drafts + 1, dtype=torch.long),
                drafts,
                first_anchor=window - OnlineSettings().anchors,
                positions=torch.arange(window)[None],
                valid=torch.ones(1, window, dtype=torch.bool),
            )
            torch.autograd.backward(unrolled, [torch.ones_like(logits) for logits in unrolled])
    return float(flop_counter.get_total_flops())


@cache
def update_price(drafter: str, window: int, optimiser_steps: int = 1) -> float:
    """Computes the device's seconds of an update of one request, over those of a step."""
    gpu = device_from_data_sheet(DEVICE)
    with torch.device("meta"):
        student, drafts = _student(drafter)
        parameters = sum(part.numel() for part in student.parameters())
    # A block is drafted in one pass, which reads the weights once.
    passes = drafts if drafter == "EAGLE3" else 1
    memory = parameters * (OPTIMISER_BYTES + 2 * WEIGHT_BYTES * passes) / gpu.bandwidth
    arithmetic = update_flops(drafter, window) / (UTILISATION * gpu.peak_flops)
    step = load_step_costs("h100-llama3.1-8b", (_STEP_ARM.gamma,), 1)
    seconds = step.decode_seconds(_STEP_ARM, 1, int(step.surface.kv_reference))
    return optimiser_steps * (memory + arithmetic) / seconds


def _student(drafter: str) -> tuple[Eagle3Student | DFlashStudent, int]:
    """Makes a student on the `meta` device; returns it with the drafts of an update."""
    if drafter == "EAGLE3":
        embedding = torch.empty(_LLAMA.vocabulary, _LLAMA.hidden)
        return (
            Eagle3Student(_EAGLE3, embedding, tokens=torch.arange(_EAGLE3.draft_vocabulary_size)),
            _EAGLE3_DRAFTS,
        )
    student = DFlashStudent(_DFLASH, torch.empty(_QWEN.vocabulary, _QWEN.hidden))
    return student, student.max_drafts

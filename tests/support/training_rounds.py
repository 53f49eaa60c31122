"""A small target and a student of it, and rounds as an engine would have verified them."""

from dataclasses import replace

import torch
from torch.nn import functional

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student, MtpShape, MtpStudent
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.online import Round
from engine_shim.sglang.training.signals import Signal
from lab.cpu_engine.models.targets import Qwen3Target

SHAPE = DecoderShape(
    hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=48, layers=3, vocabulary=40, max_positions=64
)
LAYERS = (0, 1)


def make_target() -> Qwen3Target:
    torch.manual_seed(8)
    target = Qwen3Target(SHAPE)
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(20)
    return target.eval().requires_grad_(False)


def make_student(target: Qwen3Target) -> Eagle3Student:
    torch.manual_seed(9)
    return Eagle3Student(
        Eagle3Shape(SHAPE.replace_layers(1), LAYERS), target.model.embed_tokens.weight
    )


def with_draft_vocabulary(student: Eagle3Student, tokens: torch.Tensor) -> Eagle3Student:
    """The same drafter, which can draft these of its tokens only: the other rows of its head go."""
    shape = replace(student.shape, draft_vocabulary=len(tokens))
    pruned = Eagle3Student(shape, student.embedding, tokens=tokens)
    state = {name: part.detach() for name, part in student.state_dict().items()}
    pruned.load_state_dict(state | {"lm_head.weight": state["lm_head.weight"][tokens]})
    return pruned


def make_pruned_student(target: Qwen3Target) -> Eagle3Student:
    """It can draft 30 of the 40 tokens."""
    tokens = torch.arange(SHAPE.vocabulary)
    return with_draft_vocabulary(make_student(target), tokens[tokens % 4 != 1])


def make_block_student(target: Qwen3Target, block: int = 5) -> DFlashStudent:
    torch.manual_seed(10)
    shape = DFlashShape(SHAPE.replace_layers(2), LAYERS, block, mask_token=SHAPE.vocabulary - 1)
    return DFlashStudent(shape, target.model.embed_tokens.weight)


def make_predictor(target: Qwen3Target) -> MtpStudent:
    """Its features are those of one layer."""
    torch.manual_seed(11)
    embedding = target.model.embed_tokens.weight
    return MtpStudent(MtpShape(SHAPE.replace_layers(1)), embedding, head=0.5 * embedding)


def make_round(target: Qwen3Target, length: int, seed: int, top: int, requests: int = 1) -> Round:
    """Of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE.vocabulary, (requests, length), generator=generator)
    logits, features = target.logits_and_features(tokens, LAYERS)
    top_logs, top_tokens = functional.log_softmax(logits, dim=-1).topk(top, dim=-1)
    valid = torch.ones(requests, length, dtype=torch.bool)
    positions = torch.arange(length).expand(requests, length)
    return Round(tokens, torch.cat(features, dim=-1), top_tokens, top_logs, valid, valid, positions)


def concatenate_rounds(first: Round, second: Round) -> Round:
    """Both in one round, right-aligned."""
    longest = max(first.tokens.shape[1], second.tokens.shape[1])

    def pad(part: torch.Tensor) -> torch.Tensor:
        missing = longest - part.shape[1]
        return torch.cat([part.new_zeros(part.shape[0], missing, *part.shape[2:]), part], dim=1)

    return Round(*(torch.cat([pad(a), pad(b)]) for a, b in zip(first, second, strict=True)))


@torch.no_grad()
def make_signal(target: Qwen3Target, seed: int, length: int = 48, top: int = 8) -> Signal:
    """Greedy text of the target, as an engine would have served it."""
    tokens = torch.randint(SHAPE.vocabulary, (1, 4), generator=torch.Generator().manual_seed(seed))
    while tokens.shape[1] < length + 1:
        logits, _ = target.logits_and_features(tokens, LAYERS)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    logits, features = target.logits_and_features(tokens[:, :length], LAYERS)
    logs, top_tokens = logits.log_softmax(-1).topk(top, dim=-1)
    return Signal(
        tokens=tokens[0, :length],
        features=torch.cat(features, dim=-1)[0].to(torch.bfloat16),
        top_tokens=top_tokens[0].int(),
        top_logs=logs[0],
        start=0,
        accepted=3,
        tried=6,
    )

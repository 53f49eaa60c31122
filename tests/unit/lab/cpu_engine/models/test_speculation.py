"""The shipped pair in the real SGLang: lossless, and drafting exactly as the students were trained.

If any convention of `engine_shim.sglang.training.chain` were off (position, token shift, norm,
feature layer), the student would still train, but the served draft would accept another number of
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine_shim.sglang.training.chain import Eagle3Student
from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.cpu_engine.models.targets import Qwen3Target, load_target
from tests.support.engine import DRAFT, EAGLE3, TARGET, EngineProcess, Generated, running_engine
from trainer.checkpoint import load_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMA = 5
NEW_TOKENS = 64
ARGUMENTS = (
    *EAGLE3,
    *("--speculative-num-steps", str(GAMMA)),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", str(GAMMA + 1)),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running_engine(tmp_path_factory.mktemp("engine"), ARGUMENTS) as process:
        yield process


@pytest.fixture(scope="module")
def target() -> Qwen3Target:
    return load_target(TARGET).requires_grad_(False)


def answers(engine: EngineProcess, domain: str) -> list[tuple[list[int], Generated]]:
    prompts = held_out_prompts(domain, 3, 64, seed=23)
    return list(zip(prompts, engine.generate(prompts, [NEW_TOKENS] * len(prompts)), strict=True))


def rounds_of(student: Eagle3Student, features: Tensor, tokens: Tensor, prompt: int) -> int:
    """Verifications to get through ``tokens`` [1, length]; prefill gives the first new one."""
    known, rounds = prompt + 1, 0
    while known < tokens.shape[1]:
        chain = student.greedy_chain(features[:, : known - 1], tokens[:, :known], GAMMA)[0]
        truth = tokens[0, known : known + GAMMA]
        agreed = (chain[: len(truth)] == truth).int().cumprod(dim=0).sum()
        known += int(agreed) + 1
        rounds += 1
    return rounds


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_token_is_the_targets_own_choice(
    engine: EngineProcess, target: Qwen3Target, domain: str
) -> None:
    for prompt, answer in answers(engine, domain):
        logits = target(torch.tensor([prompt + answer.tokens]))[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        # Not argmax: two summation orders may break a near tie differently.
        assert bool((chosen > logits.amax(dim=1) - 1e-3).all())


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_served_draft_accepts_exactly_what_the_student_would(
    engine: EngineProcess, target: Qwen3Target, domain: str
) -> None:
    student = load_eagle3(DRAFT, target.model.embed_tokens.weight)
    for prompt, answer in answers(engine, domain):
        tokens = torch.tensor([prompt + answer.tokens])
        _, features = target.logits_and_features(tokens, student.shape.feature_layers)
        expected = rounds_of(student, torch.cat(features, dim=-1), tokens, len(prompt))
        assert answer.meta["spec_verify_ct"] == expected

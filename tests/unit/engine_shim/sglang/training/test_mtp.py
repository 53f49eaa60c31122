"""The predictor's student: written once more, row by row, and what the two say is the same."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import MtpShape, MtpStudent
from engine_shim.sglang.training.students import decode_shape, encode_shape, make_student

DECODER = DecoderShape(
    hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=1, vocabulary=61, max_positions=64
)
LENGTH, STEPS = 9, 3


@pytest.fixture
def student() -> MtpStudent:
    torch.manual_seed(5)
    embedding = torch.randn(DECODER.vocabulary, DECODER.hidden)
    new_student = MtpStudent(MtpShape(DECODER), embedding, head=torch.randn_like(embedding))
    with torch.no_grad():
        for parameter in new_student.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return new_student.eval()


def turned(x: Tensor, position: int) -> Tensor:
    half = DECODER.head_dim // 2
    angles = position * DECODER.rope_base ** (-torch.arange(half) * 2 / DECODER.head_dim)
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )


@torch.no_grad()
def chain_from(student: MtpStudent, features: Tensor, tokens: Tensor, row: int) -> list[Tensor]:
    """Logits of the steps of the chain that starts at `row`, one key after the other."""
    model, block = student.model, student.model.mtp_block
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def step(hidden: Tensor, token: int, position: int) -> tuple[Tensor, Tensor]:
        embedded = student.embedding[token] * (position != 0)
        pair = torch.cat([model.hidden_layernorm(hidden), model.token_layernorm(embedded)])
        residual = model.input_proj(pair)
        heads = block.self_attn.qkv_proj(block.input_layernorm(residual))
        q, k, v = heads.split([32, 16, 16])
        keys.append(turned(k.view(2, 8), position))
        values.append(v.view(2, 8))
        query = turned(q.view(4, 8), position)
        out = []
        for head in range(4):
            scores = torch.stack([query[head] @ key[head // 2] for key in keys]) / 8**0.5
            weights = scores.softmax(0)
            out.append(sum(w * value[head // 2] for w, value in zip(weights, values, strict=True)))
        residual = residual + block.self_attn.o_proj(torch.cat(out))
        residual = residual + block.mlp(block.post_attention_layernorm(residual))
        hidden = model.final_layernorm(residual)
        assert student.head is not None
        return hidden, functional.linear(hidden, student.head)

    for position in range(row + 1):
        hidden, logits = step(features[position], int(tokens[position + 1]), position)
    chain_logits = [logits]
    for further in range(1, STEPS):
        hidden, logits = step(hidden, int(tokens[row + 1 + further]), row + further)
        chain_logits.append(logits)
    return chain_logits


def test_all_chains_at_once_are_each_alone(student: MtpStudent) -> None:
    features = torch.randn(1, LENGTH, DECODER.hidden)
    tokens = torch.randint(DECODER.vocabulary, (1, LENGTH + STEPS))
    together = student.unroll(features, tokens, STEPS)
    for row in (0, 4, LENGTH - 1):
        alone = chain_from(student, features[0], tokens[0], row)
        for one, other in zip(together, alone, strict=True):
            assert torch.allclose(one[0, row], other, atol=1e-4)


def test_embedding_and_head_are_not_its_own(student: MtpStudent) -> None:
    names = dict(student.named_parameters())
    assert not {"embedding", "head"} & (names.keys() | student.state_dict().keys())
    assert "model.mtp_block.self_attn.qkv_proj.bias" in names


def test_it_is_made_again_from_its_sizes(student: MtpStudent) -> None:
    rebuilt_student = make_student(decode_shape(encode_shape(student.shape)), student.borrowed)
    assert isinstance(rebuilt_student, MtpStudent)
    rebuilt_student.load_state_dict(student.state_dict())
    with pytest.raises(ValueError, match="one layer, not 2"):
        MtpShape(DECODER.replace_layers(2))

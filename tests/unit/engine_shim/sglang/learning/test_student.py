"""Which drafters have a student, what of them is trained, and why others have none."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_shim.sglang.learning.student import DrafterWeights, WeightsDifferError, live_drafter
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.students import UnsupportedDrafterError
from engine_shim.sglang.training.students import make_student as make_live_student
from tests.support.live_drafters import LlamaForCausalLMEagle3, worker_of
from tests.support.training_rounds import (
    SHAPE,
    make_pruned_student,
    make_student,
    make_target,
)

HEAD = "lm_head.weight"


def eagle3(**changes: Any) -> LlamaForCausalLMEagle3:
    return LlamaForCausalLMEagle3(make_student(make_target()), **changes)


@pytest.mark.parametrize("make", [make_student, make_pruned_student])
def test_an_eagle3_drafter_is_described_with_its_vocabulary(
    make: Callable[..., Eagle3Student],
) -> None:
    ours = make(make_target())
    expected = {name: part.detach().clone() for name, part in ours.named_parameters()}
    drafter = live_drafter(worker_of(LlamaForCausalLMEagle3(ours)))
    student = make_live_student(drafter.shape, drafter.borrowed)
    assert isinstance(student, Eagle3Student)
    assert student.shape == ours.shape
    student.load_state_dict(drafter.parameters)
    for name, part in student.named_parameters():
        assert torch.equal(part, expected[name]), name
    assert torch.equal(student.embedding, ours.embedding)
    if ours.tokens is None:
        assert student.tokens is None
    else:
        assert student.tokens is not None
        assert torch.equal(student.tokens, ours.tokens)


def test_a_head_that_sglang_has_padded_is_trained_without_the_padding() -> None:
    ours = make_pruned_student(make_target())
    model = LlamaForCausalLMEagle3(ours)
    padded = torch.nn.Linear(SHAPE.hidden, 64, bias=False)
    model.lm_head = padded
    drafter = live_drafter(worker_of(model))
    assert drafter.parameters[HEAD].shape == (30, SHAPE.hidden)
    # Written in place: it is a part of the live one.
    DrafterWeights(drafter.parameters).serve(
        {name: part.detach() + 1 for name, part in drafter.parameters.items()}
    )
    before = padded.weight.detach().clone()
    DrafterWeights(drafter.parameters).serve(
        {name: part.detach() + 1 for name, part in drafter.parameters.items()}
    )
    assert torch.equal(padded.weight[:30], before[:30] + 1)
    assert torch.equal(padded.weight[30:], before[30:])


def test_the_targets_head_is_used_and_never_trained() -> None:
    """SGLang puts it into a drafter without a head of its own (draft_vocab_size is null)."""
    target = make_target()
    whole = make_student(target)
    head = target.model.embed_tokens.weight * 0.5
    ours = Eagle3Student(replace(whole.shape, own_head=False), whole.embedding, head)
    model = LlamaForCausalLMEagle3(ours)
    model.load_lm_head_from_target = True
    drafter = live_drafter(worker_of(model))
    assert HEAD not in drafter.parameters
    assert isinstance(drafter.shape, Eagle3Shape)
    assert not drafter.shape.own_head
    assert drafter.borrowed.head is not None
    assert torch.equal(drafter.borrowed.head, head)


def test_an_embedding_that_is_the_head_is_used_and_never_trained() -> None:
    whole = make_student(make_target())
    ours = Eagle3Student(replace(whole.shape, own_head=False), whole.embedding)
    drafter = live_drafter(worker_of(LlamaForCausalLMEagle3(ours, tie_word_embeddings=True)))
    assert HEAD not in drafter.parameters
    assert drafter.borrowed.head is None


def windowed() -> LlamaForCausalLMEagle3:
    model = eagle3()
    model.window = 64
    return model


def with_tokens(tokens: torch.Tensor, **changes: Any) -> LlamaForCausalLMEagle3:
    model = eagle3(**changes)
    model.hot_token_id = tokens
    return model


def of_other_parameters() -> LlamaForCausalLMEagle3:
    model = eagle3()
    model.lm_head = torch.nn.Linear(SHAPE.hidden, SHAPE.vocabulary - 1, bias=False)
    return model


def packed() -> LlamaForCausalLMEagle3:
    model = eagle3()
    weight = model.model.fc.weight
    del model.model.fc.weight
    model.model.fc.weight = torch.nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (torch.nn.Linear(1, 1), "it is a Linear, not one of LlamaForCausalLMEagle3, "),
        (windowed(), "it sees the last 64 positions only"),
        (with_tokens(torch.arange(30)), "its d2t has 30 tokens, its head 40"),
        (with_tokens(torch.arange(1, 41)), "names tokens that the target's 40 do not contain"),
        (with_tokens(torch.zeros(40)), "names a token twice"),
        (
            with_tokens(torch.arange(39, -1, -1), tie_word_embeddings=True),
            "its d2t reorders the target's head",
        ),
        (of_other_parameters(), r"its lm_head.weight is \(39, 32\), a student's \(40, 32\)"),
        (packed(), r"its model.fc.weight is stored as torch.float8_e4m3fn, which is packed"),
        (eagle3(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "are scaled"),
    ],
)
def test_others_are_named(model: Any, reason: str) -> None:
    with pytest.raises(UnsupportedDrafterError, match=reason):
        live_drafter(worker_of(model))


def test_what_was_copied_is_compared_by_value() -> None:
    """Two names for one memory: whatever is written first is not there in the end."""
    shared = torch.zeros(4)
    weights = DrafterWeights({"one": shared, "other": shared})
    weights.serve({"one": torch.ones(4), "other": torch.ones(4)})
    with pytest.raises(WeightsDifferError, match="one has other values"):
        weights.serve({"one": torch.ones(4), "other": torch.zeros(4)})


def test_a_draft_vocabulary_lies_where_the_drafter_does() -> None:
    """SGLang's loader makes it on the host; here the drafter lies on a device without values."""
    model = LlamaForCausalLMEagle3(make_pruned_student(make_target()))
    expected = model.hot_token_id
    model.to("meta")
    drafter = live_drafter(worker_of(model))
    assert {part.device.type for part in drafter.borrowed if part is not None} == {"meta"}
    assert model.hot_token_id is expected

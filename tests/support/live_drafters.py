"""As much of SGLang's drafters, and of the workers around them, as the plugin asks for."""

from types import SimpleNamespace
from typing import Any

import torch

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Student
from engine_shim.sglang.training.students import DECODER_KEYS


def config_of(shape: DecoderShape, **changes: Any) -> dict[str, Any]:
    """The config of an EAGLE3 drafter."""
    sizes = {key: getattr(shape, field) for field, key in DECODER_KEYS.items()}
    return {**sizes, "draft_vocab_size": shape.vocabulary, "num_hidden_layers": 1, **changes}


class Config(SimpleNamespace):
    """A config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class LlamaForCausalLMEagle3(torch.nn.Module):
    """It holds the very parameters of the student.  changes: of its config."""

    load_lm_head_from_target = False
    window: int | None = None

    def __init__(self, student: Eagle3Student, **changes: Any) -> None:
        super().__init__()
        shape = student.shape
        self.model = student.model
        self.model.embed_tokens = torch.nn.Embedding.from_pretrained(student.embedding)
        if student.lm_head is not None:
            self.lm_head: torch.nn.Module = student.lm_head
        elif student.head is not None:
            self.lm_head = torch.nn.Embedding.from_pretrained(student.head)
        self.hot_token_id = student.tokens
        layers = list(shape.feature_layers) or None
        named = {"eagle_aux_hidden_state_layer_ids": layers}
        facts = {"draft_vocab_size": shape.draft_vocabulary_size, "eagle_config": named}
        self.config = Config(**config_of(shape.decoder, **facts | changes))

    def get_attention_sliding_window_size(self) -> int | None:
        return self.window


def worker_of(model: Any) -> Any:
    """An `EAGLEWorkerV2` whose drafter is this model."""
    runner = SimpleNamespace(model=model)
    return SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=runner))

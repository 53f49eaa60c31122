"""An SGLang plugin that gives models without checkpoints weights with which they say something.

SGLang's `--load-format dummy` draws numbers so small that every token would be the same.
"""

import zlib

import torch
from torch import nn

# Of a layer beside the embedding that it adds to, so that drafts are right occasionally.
RIPPLE = 0.3
# From the embedding of a token and a hidden state (in this order) to a predictor's hidden state.
_FUSIONS = ("eh_proj.weight", "fc.weight")


def replace_dummies() -> None:
    """Replaces SGLang's weights for `--load-format dummy`; for the plugins of SGLang."""
    from sglang.srt.model_loader import loader, weight_utils

    for module in (weight_utils, loader):
        vars(module)["initialize_dummy_weights"] = draw


@torch.no_grad()
def draw(model: nn.Module, *_: object, **__: object) -> None:
    """Draws each weight by its name, so that two engines have the same ones."""
    # Whose head is its embedding would repeat each token if the layers added little to it.
    strength = 0.1 if getattr(model.config, "tie_word_embeddings", False) else 1.0
    for name, weight in model.state_dict().items():
        if not torch.is_floating_point(weight):
            continue
        drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(weight.shape, generator=drawn)
        if "embed_tokens" in name or "lm_head" in name or "shared_head.head" in name:
            weight.copy_(strength * noise)
        elif weight.dim() < 2:
            weight.copy_(_of_a_vector(name, noise))
        else:
            weight.copy_(RIPPLE * noise / weight.shape[-1] ** 0.5)
            if name.endswith(_FUSIONS) and weight.shape[1] == 2 * weight.shape[0]:
                # The embedding, and a little of the hidden state.
                weight[:, : weight.shape[0]] += torch.eye(weight.shape[0])


def _of_a_vector(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Norms keep their length; biases, and what gates a state, are small."""
    return 1 + 0.1 * noise if "norm" in name else 0.1 * noise

"""Counts what a drafter's blocks are accepted, by the paper's sampling, in plain torch.

Paper of the sampling: Fast Inference from Transformers via Speculative Decoding (Leviathan et al.),
Algorithm 1.  Blocks begin at fixed positions of answers that the target gave at the same
temperature, so every drafter is asked the same questions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.blocks import DecoderLayer
from trainer.language_model import LanguageModel
from trainer.sd2 import Sd2Draft

_EVERY = 8


class CachedModel:
    """A language model with the keys and values of what it has run, for steps of any width.

    steer: W_s of each layer, for a steered drafter; layers: whose outputs are kept as features.
    """

    def __init__(
        self, model: LanguageModel, layers: tuple[int, ...] = (), draft: Sd2Draft | None = None
    ) -> None:
        self._model = model
        self._layers = layers
        self._steer = None if draft is None else [*draft.steer]
        self._cache: list[tuple[Tensor, Tensor]] = []

    def cut(self, length: int) -> "CachedModel":
        """Returns one that has run the first `length` positions and nothing else."""
        short = CachedModel(self._model, self._layers)
        short._steer = self._steer
        short._cache = [(k[:, :, :length], v[:, :, :length]) for k, v in self._cache]
        return short

    def run(self, tokens: Tensor, steering: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Runs more positions; tokens, steering: [batch, n], [batch, n, width].

        Returns logits [batch, n, vocabulary] and features [batch, n, layers * hidden].
        """
        model = self._model.model
        begun = self._cache[0][0].shape[2] if self._cache else 0
        positions = torch.arange(begun, begun + tokens.shape[1])
        rotation = self._model.rotary.at(positions)
        sees = torch.arange(begun + tokens.shape[1]) <= positions[:, None]
        residual = model.embed_tokens(tokens)
        grown, features = [], []
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            heads = layer.self_attn.project(layer.input_layernorm(residual), rotation)
            q, k, v = (head.transpose(1, 2) for head in heads)
            if self._cache:
                k = torch.cat([self._cache[index][0], k], dim=2)
                v = torch.cat([self._cache[index][1], v], dim=2)
            grown.append((k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
            bias = None
            if self._steer is not None and steering is not None:
                bias = self._steer[index](steering)
            residual = layer.finish(residual, attended.transpose(1, 2).flatten(2), bias)
            if index in self._layers:
                features.append(residual)
        self._cache = grown
        logits = functional.linear(model.norm(residual), self._model.head)
        return logits, torch.cat(features, dim=-1) if features else None


@dataclass(frozen=True, slots=True)
class Answers:
    """Holds what the target answered at a temperature.

    tokens: [count, L], prompts included.  prompt: tokens of each prompt.  features: of all but the
    last position.  target: has run all but the last token.
    """

    temperature: float
    tokens: Tensor
    prompt: int
    features: Tensor
    target: CachedModel


@torch.no_grad()
def answered(
    target: LanguageModel,
    layers: tuple[int, ...],
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Answers:
    """Has the target answer prompts [count, length] at 0 (greedy) or another temperature."""
    model = CachedModel(target, layers)
    tokens, newest, found = prompts, prompts, []
    for _ in range(new_tokens):
        logits, features = model.run(newest)
        assert features is not None
        found.append(features)
        newest = _chosen(_shares(logits[:, -1], temperature), generator)
        tokens = torch.cat([tokens, newest], dim=1)
    return Answers(temperature, tokens, prompts.shape[1], torch.cat(found, dim=1), model)


@torch.no_grad()
def accepted(
    draft: Sd2Draft, answers: Answers, drafts: int, generator: torch.Generator, *, steered: bool
) -> float:
    """Computes the mean number of drafts that are accepted of a block.

    Each block is drafted at the temperature of the answers.  What counts is the probability that
    the target accepts its tokens, so that no dice are thrown for the verification.
    """
    tokens, features = answers.tokens, answers.features
    g = draft.steering(features) if steered else None
    context = CachedModel(draft.decoder, draft=draft)
    # Row p takes the token at p + 1.
    context.run(tokens[:, 1:], g)
    counts = []
    for newest in range(answers.prompt, tokens.shape[1] - 1, _EVERY):
        # Verified are the positions before `newest`.
        model = context.cut(newest - 1)
        last = None if g is None else g[:, newest - 1 : newest]
        chain, own = [tokens[:, newest : newest + 1]], []
        for _ in range(drafts):
            shares = _shares(model.run(chain[-1], last)[0][:, -1], answers.temperature)
            own.append(shares)
            chain.append(_chosen(shares, generator))
        theirs, _ = answers.target.cut(newest).run(torch.cat(chain[:-1], dim=1))
        kept = torch.ones(len(tokens))
        total = torch.zeros(len(tokens))
        for position, drafted in enumerate(chain[1:]):
            wanted = _shares(theirs[:, position], answers.temperature).gather(1, drafted)
            kept = kept * (wanted / own[position].gather(1, drafted)).clamp_max(1)[:, 0]
            total += kept
        counts.append(total)
    return float(torch.stack(counts).mean())


def _shares(logits: Tensor, temperature: float) -> Tensor:
    """Computes the distribution [batch, vocabulary] that tokens are drawn from."""
    if temperature == 0:
        return functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return functional.softmax(logits / temperature, dim=-1)


def _chosen(shares: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(shares, 1, generator=generator)

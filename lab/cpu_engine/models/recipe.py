"""Defines the shipped models: sizes, mixtures and training budgets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from engine_shim.sglang.training.blocks import LLAMA, QWEN2, QWEN3, DecoderShape, Family, Llama3Rope
from engine_shim.sglang.training.chain import Eagle3Shape, MtpShape
from engine_shim.sglang.training.dflash import DFlashShape
from lab.cpu_engine.models.schedule import StepBudget
from trainer.sd2 import Sd2Shape

MIXTURE: Final[Mapping[str, float]] = {"code": 0.4, "prose": 0.25, "json": 0.2, "csv": 0.15}

_SHALLOW_BUDGET: Final = StepBudget(steps=1000, seconds=300)
_FULL_BUDGET: Final = StepBudget(steps=700, seconds=600)


@dataclass(frozen=True)
class DraftRecipe:
    """The domains that one draft learns from, by weight, and how long it trains."""

    mixture: Mapping[str, float]
    budget: StepBudget


@dataclass(frozen=True)
class Sd2Recipe:
    """The domains that an SD2 draft learns from, its steps of pretraining and of distillation.

    family, hidden, tied, rope: of its decoder; hidden None for the target's.
    """

    mixture: Mapping[str, float]
    pretraining: int
    steps: int
    family: Family = QWEN3
    hidden: int | None = None
    tied: bool = True
    rope: Llama3Rope | None = None


@dataclass(frozen=True)
class EditRecipe:
    """Kinds of edits, by weight, and how long a target learns to copy and to edit.

    draft: how long its draft learns the target's answers.  It is not taught to copy first, so it
    learns what stands in many answers, and copies little, as drafters that learn from chats do.
    """

    mixture: Mapping[str, float]
    copying: StepBudget
    editing: StepBudget
    draft: StepBudget


_DRAFTS: Final = {
    "draft-mixed": DraftRecipe(MIXTURE, StepBudget(steps=600, seconds=720)),
    # Blind to three domains on purpose: traffic that leaves code is a real shift in acceptance.
    "draft-code": DraftRecipe({"code": 1.0}, StepBudget(steps=350, seconds=420)),
}
_BLOCKS: Final = {
    # A block of seven pays on regular text.  The drafter has to know the other domains as well.
    "dflash": DraftRecipe(
        {"json": 0.4, "csv": 0.3, "code": 0.2, "prose": 0.1}, StepBudget(steps=700, seconds=600)
    ),
}
_SD2: Final = {"sd2": Sd2Recipe(MIXTURE, 900, 500)}
# Narrower than the target, as in every pair of the paper, and of its other families.
_NARROW_SD2: Final = {
    "sd2-llama": Sd2Recipe(
        MIXTURE, 500, 250, LLAMA, hidden=64, tied=False, rope=Llama3Rope(8.0, 1.0, 4.0, 512)
    ),
    "sd2-qwen2": Sd2Recipe(MIXTURE, 200, 100, QWEN2, hidden=96),
}


@dataclass(frozen=True)
class Recipe:
    """A whole set.  The defaults are the one that the demo serves: about 35 minutes on one core.

    ``least_branch_share``: a layer whose output is less than this share of the residual stream it
    joins counts as doing nothing, and the target is refused.  ``predictor``: of a MiMo, which has
    Qwen2's layers; None for a Qwen3.
    """

    shape: DecoderShape = field(default_factory=DecoderShape)
    shallow_layers: int = 8
    shallow_budget: StepBudget = _SHALLOW_BUDGET
    full_budget: StepBudget = _FULL_BUDGET
    least_branch_share: float = 0.02
    drafts: Mapping[str, DraftRecipe] = field(default_factory=lambda: _DRAFTS)
    blocks: Mapping[str, DraftRecipe] = field(default_factory=lambda: _BLOCKS)
    sd2: Mapping[str, Sd2Recipe] = field(default_factory=lambda: _SD2)
    predictor: DraftRecipe | None = None
    block: int = 8

    @property
    def shallow_shape(self) -> DecoderShape:
        """The target before it is grown."""
        return self.shape.replace_layers(self.shallow_layers)

    @property
    def draft_shape(self) -> Eagle3Shape:
        """One layer, fed from a low, a middle and the highest target layer that SGLang can capture.

        SGLang reads the output of layer k on entering layer k + 1, so the last layer's own output
        is out of reach.
        """
        layers = self.shape.layers
        return Eagle3Shape(self.shape.replace_layers(1), (2, layers // 2, layers - 2))

    @property
    def predictor_shape(self) -> MtpShape:
        """One layer, fed with what the target's head reads."""
        return MtpShape(self.shape.replace_layers(1))

    def sd2_shape(self, sd2: Sd2Recipe) -> Sd2Shape:
        """Two layers, which are steered by what an EAGLE3 draft reads."""
        hidden = sd2.hidden or self.shape.hidden
        decoder = replace(
            self.shape, layers=2, hidden=hidden, head_dim=hidden // self.shape.heads,
            mlp=2 * hidden, rope=sd2.rope,
        )  # fmt: skip
        layers = self.draft_shape.feature_layers
        return Sd2Shape(decoder, self.shape.hidden, layers, sd2.family, sd2.tied)

    def block_shape(self, mask_token: int) -> DFlashShape:
        """Two layers, fed from five target layers spread over its depth."""
        layers = self.shape.layers
        features = tuple(sorted({round(1 + i * (layers - 4) / 4) for i in range(5)}))
        return DFlashShape(self.shape.replace_layers(2), features, self.block, mask_token)


# A target that edits code, from the shallow one, and an EAGLE3 drafter for it.
EDITS: Final = EditRecipe(
    {
        "check": 0.15, "describe": 0.15, "document": 0.1, "guard": 0.15, "licence": 0.1, "log": 0.2,
        "rename": 0.15,
    },
    copying=StepBudget(steps=550, seconds=400),
    editing=StepBudget(steps=900, seconds=900),
    draft=StepBudget(steps=800, seconds=600),
)  # fmt: skip

# For tests of what an engine does: with a quarter of the layers, its steps are much shorter.
SHALLOW: Final = Recipe(
    shape=DecoderShape(layers=6),
    shallow_layers=6,
    shallow_budget=StepBudget(steps=700, seconds=400),
    full_budget=StepBudget(steps=0, seconds=0),
    sd2={**_SD2, **_NARROW_SD2},
)

# A target with a multi-token predictor of its own, and DFlash beside it.
MIMO: Final = Recipe(
    shape=DecoderShape(layers=6),
    shallow_layers=6,
    shallow_budget=StepBudget(steps=700, seconds=400),
    full_budget=StepBudget(steps=0, seconds=0),
    drafts={},
    sd2={},
    predictor=DraftRecipe(MIXTURE, StepBudget(steps=400, seconds=300)),
)

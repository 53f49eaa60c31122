"""Defines models as far as their cost goes: shapes of published checkpoints without weights.

Each shape is a JSON file beside this module.

SGLang fills them in itself (`--load-format dummy`).  What such models say is noise, so how many
drafts are accepted is drawn from a curve instead; see acceptance.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Load:
    """One phase of the moving load: so many clients, each prompt and answer of so many tokens."""

    concurrency: int
    requests: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A target, an EAGLE3 and a DFlash drafter, and what to run on them.

    target, eagle3, dflash: their config.json.  gammas, graph_limits: as SPECULATION_GAMMAS and
    SPECULATION_GRAPH_LIMITS.  batch_sizes: of the profile.  static_gamma: of the engine without
    the plugin.
    """

    name: str
    target: Mapping[str, Any]
    eagle3: Mapping[str, Any]
    dflash: Mapping[str, Any]
    context_length: int
    gammas: tuple[int, ...]
    graph_limits: str
    batch_sizes: tuple[int, ...]
    loads: tuple[Load, ...]
    static_gamma: int = 3

    @property
    def max_batch(self) -> int:
        """Most sequences that decode at once."""
        return max(self.batch_sizes)

    @property
    def vocabulary(self) -> int:
        """Token ids that a prompt may hold lie below."""
        return int(self.target["vocab_size"])

    def arms(self) -> tuple[tuple[str, int], ...]:
        """Lists drafter and draft length of everything that can run; gamma 0 once."""
        block = int(self.dflash["block_size"])
        return (
            *(("eagle3", gamma) for gamma in self.gammas),
            *(("dflash", gamma) for gamma in self.gammas if 0 < gamma < block),
        )

    def write(self, folder: Path) -> "ModelFolders":
        """Makes a folder with a config.json for each model."""
        folders = ModelFolders(folder / "target", folder / "eagle3", folder / "dflash")
        for path, config in zip(
            (folders.target, folders.eagle3, folders.dflash),
            (self.target, self.eagle3, self.dflash),
            strict=True,
        ):
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return folders


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The folders of the models' configs."""

    target: Path
    eagle3: Path
    dflash: Path


def _load(name: str) -> Shape:
    text = (Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8")
    return TypeAdapter(Shape).validate_json(text)


# The drafters' sizes are those of the public EAGLE3 and DFlash (block 16) drafters for Qwen3-8B.
QWEN3_8B = _load("qwen3-8b")
# For a machine without a GPU: everything of the check but the sizes and the graphs.
SMALL = _load("small")

SHAPES = {shape.name: shape for shape in (QWEN3_8B, SMALL)}

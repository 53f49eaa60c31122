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

from lab.harness.errors import HarnessError


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
    SPECULATION_GRAPH_LIMITS.  batch_sizes: of the graphs and the cost table, ascending.
    context_tokens, long_context_tokens: prompt lengths of the two cost tables; 0 for one table
    alone.  pool_tokens: of an engine's KV pool; pair_pool_tokens: of each of two engines beside
    each other.  static_gamma: of the engine without the plugin.
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
    context_tokens: int
    long_context_tokens: int
    pool_tokens: int
    pair_pool_tokens: int
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

    def limits(self) -> dict[int, int]:
        """Returns the largest batch with graphs, of draft lengths that have a limit."""
        pairs = (part.split(":") for part in self.graph_limits.split(",") if part)
        return {int(gamma): int(size) for gamma, size in pairs}

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


class UnknownShapeError(HarnessError):
    """A shape was asked for that is neither known nor a readable file."""


def load_shape(given: str) -> Shape:
    """Returns the shape of that name, or the one in a JSON file.  Raises UnknownShapeError."""
    if given in SHAPES:
        return SHAPES[given]
    if not given.endswith(".json"):
        raise UnknownShapeError(
            f"--shape {given!r} is unknown: choose one of {', '.join(SHAPES)}, or name a file.json"
        )
    try:
        return _read(Path(given))
    except (OSError, ValueError) as error:
        raise UnknownShapeError(f"--shape {given}: {error}") from error


def _read(path: Path) -> Shape:
    return TypeAdapter(Shape).validate_json(path.read_text(encoding="utf-8"))


def _load(name: str) -> Shape:
    return _read(Path(__file__).parent / f"{name}.json")


# The drafters' sizes are those of the public EAGLE3 and DFlash (block 16) drafters for Qwen3-8B.
QWEN3_8B = _load("qwen3-8b")
# For a machine without a GPU: everything of the check but the sizes and the graphs.
SMALL = _load("small")
# For the emulation of CUDA, where a kernel of Triton's takes hundredths of a second.
EMULATED = _load("emulated")

SHAPES = {shape.name: shape for shape in (QWEN3_8B, SMALL, EMULATED)}

"""Copies the parts of a target that SpecForge's trainer reads: its config, embedding and head.

For an EAGLE3 drafter the trainer looks up the target's head in an index file and by its tensor
name.  A target in one file has no index, and a target with tied embeddings has no head tensor.  The
copy has both, and can be moved to other machines without the target's layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint import CONFIG, INDEX, WEIGHTS, write_json

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
# Errors that malformed configs or weights can cause.
MALFORMED_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


class TargetError(ValueError):
    """SpecForge could not read the folder as a target; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The parts of a target that a drafter uses.

    config: as in its folder.  embedding: [vocabulary, hidden].  head: the same shape; None if the
    embedding serves as head.
    """

    config: Mapping[str, Any]
    embedding: Tensor
    head: Tensor | None

    @property
    def head_key(self) -> str:
        """Returns the name of the matrix that serves as head."""
        return EMBEDDING if self.head is None else HEAD

    @property
    def layers(self) -> int:
        """Returns the number of the target's layers.  Raises TargetError."""
        layer_count = _text_config(self.config).get("num_hidden_layers")
        if type(layer_count) is not int:
            raise TargetError(f"the target's config has no num_hidden_layers, but {layer_count!r}")
        return layer_count


def read_target(folder: Path) -> TargetParts:
    """Reads a target's folder: config.json, and safetensors with or without an index.

    Raises TargetError.
    """
    try:
        return _read_parts(folder)
    except TargetError:
        raise
    except MALFORMED_ERRORS as error:
        raise TargetError(f"{folder} cannot be read as a target: {error!r}") from error


def write_target(parts: TargetParts, folder: Path, source: Path) -> None:
    """Writes a folder that SpecForge reads as a target.

    source: the target's folder, for the Python files of a custom model type.  Raises OSError,
    SafetensorError.
    """
    folder.mkdir(parents=True)
    tied = parts.head is None
    write_json(folder / CONFIG, {**parts.config, "tie_word_embeddings": tied})
    stored = {EMBEDDING: parts.embedding} | ({} if parts.head is None else {HEAD: parts.head})
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors makes the file readable for the owner only; a trainer often runs as another user.
    (folder / WEIGHTS).chmod(0o644)
    size = sum(part.nbytes for part in stored.values())
    weight_map = dict.fromkeys(stored, WEIGHTS)
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    for file in source.glob("*.py"):
        shutil.copy(file, folder)


def _read_parts(folder: Path) -> TargetParts:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    tensor_files = _find_tensor_files(folder)
    embedding = _find_tensor_name(tensor_files, EMBEDDING)
    if embedding is None:
        raise TargetError(f"{folder} has no {EMBEDDING} in safetensors files")
    tied = config.get("tie_word_embeddings", _text_config(config).get("tie_word_embeddings"))
    head = None if tied else _find_tensor_name(tensor_files, HEAD)
    if tied is False and head is None:
        raise TargetError(f"{folder} has no {HEAD}, and its config does not tie the head")
    return TargetParts(
        config,
        _read_matrix(tensor_files[embedding], embedding),
        None if head is None else _read_matrix(tensor_files[head], head),
    )


def _find_tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor."""
    index = folder / INDEX
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / Path(file).name for name, file in weight_map.items()}
    tensor_files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensor_files |= dict.fromkeys(file.keys(), path)
    return tensor_files


def _find_tensor_name(tensor_files: Mapping[str, Path], name: str) -> str | None:
    """Finds a tensor's full name; a model for images and text has a prefix before it."""
    matching_names = [
        tensor_name
        for tensor_name in tensor_files
        if tensor_name == name or tensor_name.endswith("." + name)
    ]
    return min(matching_names, key=len, default=None)


def _read_matrix(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        matrix: Tensor = file.get_tensor(name)
    if matrix.dim() != 2 or not matrix.is_floating_point():
        raise TargetError(
            f"{path}: {name} is {matrix.dtype} of {tuple(matrix.shape)}, not a matrix"
        )
    return matrix


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the text model, which is nested in that of an image and text model."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config

"""Defines what a check runs: on which device, models of which shape, at which scale.

Shapes have the cost of published models, and no weights.  Each is a JSON file beside this module.
SGLang fills in dummy weights (`--load-format dummy`).  Such models write noise, so the number of
accepted drafts is drawn from a curve instead; see acceptance.py.

A scale fits a check to its budget: how many graphs, tokens and repeats the parts use.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from lab.harness.errors import HarnessError
from lab.harness.measured import gpus


@dataclass(frozen=True, slots=True)
class Load:
    """One phase of the moving load: clients, requests, and tokens of each prompt and answer."""

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
        """The vocabulary's size; token ids of a prompt lie below it."""
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
    """The requested shape is neither a known name nor a readable file."""


def load_shape(name_or_path: str) -> Shape:
    """Returns the shape of that name, or the one in a JSON file.  Raises UnknownShapeError."""
    if name_or_path in SHAPES:
        return SHAPES[name_or_path]
    if not name_or_path.endswith(".json"):
        raise UnknownShapeError(
            f"--shape {name_or_path!r} is unknown: choose one of {', '.join(SHAPES)}, or name a "
            "file.json"
        )
    try:
        return _read(Path(name_or_path))
    except (OSError, ValueError) as error:
        raise UnknownShapeError(f"--shape {name_or_path}: {error}") from error


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


class Device(Enum):
    """A GPU, SGLang's CUDA paths on a processor, or SGLang's CPU paths."""

    GPU = "GPU"
    EMULATED = "emulated CUDA"
    CPU = "CPU"

    @property
    def server_module(self) -> str:
        """The module that serves: SGLang's own, or a stand-in with the same options."""
        return {
            Device.GPU: "sglang.launch_server",
            Device.EMULATED: "lab.cpu_engine.serve_emulated_cuda",
            Device.CPU: "lab.cpu_engine.serve",
        }[self]

    @property
    def takes_cuda_options(self) -> bool:
        """Whether engines are given the options of a GPU: memory, backends, graphs."""
        return self is not Device.CPU

    @property
    def overlaps(self) -> bool:
        """Whether SGLang has the overlap schedule there."""
        return self is not Device.CPU

    def names(self) -> list[str]:
        """Lists the devices, as a result file has them; empty without a GPU."""
        return gpus() if self is Device.GPU else []


# What commands that start engines of a shape take.
SglangOptions = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- OPTIONS OF SGLANG",
        show_default=False,
        help="Further options of SGLang for the engines of the shape; they follow --.",
    ),
]
OnCpu = Annotated[
    bool, typer.Option("--cpu", help="Try it out on this processor: SGLang's CPU paths.")
]
OnEmulatedCuda = Annotated[
    bool,
    typer.Option(
        "--emulated",
        envvar="LAB_EMULATED_CUDA",
        help="Try it out on this processor: SGLang's CUDA paths, with tiny models whatever the "
        "shape.",
    ),
]


class UnknownScaleError(HarnessError):
    """The requested scale does not exist."""


@dataclass(frozen=True, slots=True)
class ExactSizes:
    """Prompts of each domain, tokens of the longest answer, and plays of each engine."""

    prompts: int
    new_tokens: int
    plays: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the parts.

    graph_every: every n-th of the shape's batch sizes, and the largest, has a graph and a row in
    the cost table.  answer_share: of the length of the shape's answers.  repeats: pairs of
    plays that are compared.  profile_seconds: for one cost table.  both_schedules: whether engines
    without the overlap schedule are compared too.
    """

    name: str
    graph_every: int
    answer_share: float
    repeats: int
    profile_seconds: float
    exact: ExactSizes
    both_schedules: bool

    def batch_sizes(self, shape: Shape) -> tuple[int, ...]:
        """Returns the batch sizes that have graphs, ascending."""
        sizes = shape.batch_sizes
        return tuple(sorted({*sizes[:: self.graph_every], sizes[-1]}))


# From what an hour allows to what fits ten minutes with an engine start of 45 s.
SCALES = (
    Scale("full", 1, 1.0, 3, 120.0, ExactSizes(4, 256, 3), both_schedules=True),
    Scale("half", 1, 0.5, 2, 75.0, ExactSizes(2, 160, 2), both_schedules=True),
    Scale("quarter", 1, 0.25, 1, 60.0, ExactSizes(2, 128, 1), both_schedules=False),
    Scale("least", 2, 0.25, 1, 40.0, ExactSizes(1, 96, 1), both_schedules=False),
)
# Where a step takes hundredths of a second, or tenths, and its time means nothing.
WITHOUT_GPU = {
    Device.CPU: Scale("cpu", 1, 1.0, 1, 8.0, ExactSizes(2, 48, 1), both_schedules=False),
    Device.EMULATED: Scale("emulated", 1, 1.0, 1, 6.0, ExactSizes(1, 24, 1), both_schedules=False),
}


def largest_that_fits(seconds: float, price: Callable[[Scale], float]) -> Scale:
    """Returns the first of SCALES whose price is within the seconds, or the last one.

    price: seconds of a whole check at a scale.
    """
    return next((scale for scale in SCALES if price(scale) <= seconds), SCALES[-1])


def parse_scale(name: str) -> Scale | None:
    """Returns the scale of that name, None for "".  Raises UnknownScaleError."""
    if not name:
        return None
    known_scale = next((scale for scale in SCALES if scale.name == name), None)
    if known_scale is None:
        names = ", ".join(scale.name for scale in SCALES)
        raise UnknownScaleError(f"--scale {name!r} is unknown: choose one of {names}")
    return known_scale

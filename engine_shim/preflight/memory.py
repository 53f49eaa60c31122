"""Predicts the memory that the draft lengths of a command line take, without starting an engine.

    python -m engine_shim.preflight.memory --model-path MODEL --speculative-algorithm EAGLE3 ...

It takes SGLang's options and reads SPECULATION_* from the environment.  Exit code 2: SGLang or the
plugin rejects the options, or SGLang is not installed here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_shim.common.errors import PluginError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from engine_shim.sglang.memory import Prediction, Reserve

BAD_OPTIONS = 2
NOTES = """\
batch: the largest one with a graph; 0 without graphs
graphs: 2 MiB for each sequence of it, by SGLang's rule
backends: what attention backends keep, with or without graphs
tables: what they keep for graphs"""


def reserves_table(reserves: Sequence[Reserve]) -> str:
    """Returns one line for each additional draft length and one for their sum, in MiB."""
    names = ("length", "batch", "graphs", "backends", "tables", "total")
    rows = [
        (str(row.gamma), str(row.batch), row.graphs, row.backends, row.tables, row.total_mib)
        for row in reserves
    ]
    sums = (
        sum(row.graphs for row in reserves), sum(row.backends for row in reserves),
        sum(row.tables for row in reserves), sum(row.total_mib for row in reserves),
    )  # fmt: skip
    lines = ["".join(f"{name:>11}" for name in names)]
    for gamma, batch, *sizes in (*rows, ("sum", "", *sums)):
        lines.append(f"{gamma:>11}{batch:>11}" + "".join(f"{size:>11.1f}" for size in sizes))
    return "\n".join(lines)


def prediction_page(prediction: Prediction, share: str) -> str:
    """Returns the table with explanations; `share`: the last sentence."""
    shape = prediction.shape
    parts = [f"MiB for {name}: {size:.1f}" for name, size in prediction.parts_mib.items()]
    heading = f"MiB on each device, for each draft length beside {prediction.start_gamma}"
    return "\n".join(
        (
            f"{heading}, with which the engine starts.",
            f"Attention backends: {shape.description}"
            + ("." if shape.is_exact else "; their sizes are approximated."),
            reserves_table(prediction.reserves),
            NOTES,
            *parts,
            share,
        )
    )


def predict(options: list[str]) -> str:
    """Returns the page for SGLang's options.  Raises PluginError and the errors of SGLang."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from engine_shim.sglang.api.settings import load_settings
    from engine_shim.sglang.server_args import SteeredConfiguration

    os.environ.setdefault("SPECULATION_SIDECAR", "unix:/nowhere")
    settings = load_settings()
    load_plugins()
    args = prepare_server_args(options)
    args.resolve_once()
    return prediction_page(
        SteeredConfiguration(settings).predict_memory(args), memory_share_text(args)
    )


def memory_share_text(args: ServerArgs) -> str:
    """Describes the share of the device that SGLang takes, and who set it."""
    from sglang.srt.utils.common import get_device_memory_capacity

    from engine_shim.sglang.api import sglang_api

    view = sglang_api.resolving_args(args)
    share = f"--mem-fraction-static {view.mem_fraction_static}: "
    # The record's fields stay as the user wrote them.
    if args.mem_fraction_static is not None:
        return (
            share + "set by the user, so SGLang reserves no memory for this: the rest of the "
            "device must suffice"
        )
    if get_device_memory_capacity(view.device) is None:
        return share + "chosen without a device; run this where the engine will run"
    return share + "chosen by SGLang for the device of this machine, with memory for this"


def main(options: list[str]) -> int:
    """Prints the prediction; returns the exit code."""
    try:
        sys.stdout.write(predict(options) + "\n")
    except ImportError as error:
        sys.stderr.write(f"memory: run this in the engine's environment: {error}\n")
        return BAD_OPTIONS
    except (PluginError, ValueError, OSError, AssertionError, RuntimeError) as error:
        sys.stderr.write(f"memory: {type(error).__name__}: {error}\n")
        return BAD_OPTIONS
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

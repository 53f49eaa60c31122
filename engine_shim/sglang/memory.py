"""Predicts the memory that the draft lengths of a command line take, without starting an engine.

    python -m engine_shim.sglang.memory --model-path MODEL --speculative-algorithm EAGLE3 ...

It takes SGLang's options and reads SPECULATION_* from the environment.  Exit code 2: SGLang or the
plugin refuses them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from engine_shim.sglang.api.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_shim.sglang.graph_memory import Reserve

BAD_OPTIONS = 2


def table(reserves: Sequence[Reserve]) -> str:
    """Returns one line for each further draft length and one for their sum, in MiB."""
    names = ("length", "batch", "graphs", "workspace", "tables", "total")
    rows = [
        (str(row.gamma), str(row.batch), row.graphs, row.workspace, row.tables, row.total)
        for row in reserves
    ]
    columns = ("graphs", "workspace", "tables", "total")
    sums = [sum(getattr(row, column) for row in reserves) for column in columns]
    lines = ["".join(f"{name:>11}" for name in names)]
    for gamma, batch, *sizes in (*rows, ("sum", "", *sums)):
        lines.append(f"{gamma:>11}{batch:>11}" + "".join(f"{size:>11.1f}" for size in sizes))
    return "\n".join(lines)


def predict(options: list[str]) -> str:
    """Returns the table for SGLang's options.  Raises PluginError and what SGLang raises."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from engine_shim.sglang.api.settings import load_settings
    from engine_shim.sglang.server_args import SteeredConfiguration

    os.environ.setdefault("SPECULATION_SIDECAR", "unix:/nowhere")
    settings = load_settings()
    load_plugins()
    args = prepare_server_args(options)
    args.resolve_once()
    view: Any = resolving_view(args)
    configuration = SteeredConfiguration(settings)
    return (
        f"MiB for each draft length beside {view.speculative_num_steps}, with which the engine "
        f"starts:\n{table(configuration.reserves(args))}\n"
        f"MiB for the collection of training signals: {configuration.collecting_mib():.1f}\n"
        f"--mem-fraction-static {view.mem_fraction_static} (on the device that SGLang finds here)"
    )


def main(options: list[str]) -> int:
    """Prints the prediction; returns the exit code."""
    try:
        sys.stdout.write(predict(options) + "\n")
    except (PluginError, ValueError, OSError, AssertionError) as error:
        sys.stderr.write(f"memory: {type(error).__name__}: {error}\n")
        return BAD_OPTIONS
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

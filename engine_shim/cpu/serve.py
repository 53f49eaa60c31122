"""SGLang's own HTTP server on a CPU.

``python -m engine_shim.cpu.serve --model-path FOLDER [any SGLang option]`` is
``python -m sglang.launch_server`` with other defaults; every option given wins over them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engine_shim.cpu.environment import enter_cpu_environment

# None marks an option that takes no value.
_DEFAULTS: dict[str, str | None] = {
    "--device": "cpu",
    # The dtype in which a token's bits do not depend on the batch, so speculation is exact.
    "--dtype": "float32",
    "--disable-cuda-graph": None,
    "--skip-server-warmup": None,
    # SGLang would size its cache by the machine's memory and take most of it.
    "--max-running-requests": "16",
    "--max-total-tokens": "16384",
}


def with_cpu_defaults(arguments: Sequence[str]) -> list[str]:
    """The CPU defaults that ``arguments`` do not name themselves, then ``arguments``."""
    named = {argument.split("=", 1)[0] for argument in arguments}
    defaults: list[str] = []
    for option, value in _DEFAULTS.items():
        if option not in named:
            defaults += [option] if value is None else [option, value]
    return [*defaults, *arguments]


def main() -> None:
    """Serve until told to stop, then end the processes that SGLang started."""
    enter_cpu_environment()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(with_cpu_defaults(sys.argv[1:]))
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


# SGLang's processes are spawned, and a spawned process imports this module again.
if __name__ == "__main__":
    main()
